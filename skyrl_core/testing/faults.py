"""Faults on demand: tests arm a point in the code, the process that reaches it dies, raises, or hangs, once.

Armed by the environment only, so a run without the variable pays one dictionary look-up per point:

    SKYRL_FLOWS_FAULTS="update.between_minibatches@step=3:kill-flow;generate.sampled@step=5:kill-self"
    SKYRL_FLOWS_FAULTS_DIR=/some/folder     # remembers what fired, so a restarted run is not hit twice

Actions: `kill-self` (SIGKILL to this process), `kill-flow` (SIGKILL to the flow process, whose id is in
SKYRL_FLOWS_FLOW_PID), `raise` (RuntimeError), `hang` (sleeps until killed). A fault may be limited to one rank,
engine or step by any `key=value` the point passes, joined with commas.
"""

import os
import signal
import time
from pathlib import Path

FAULTS_VARIABLE = "SKYRL_FLOWS_FAULTS"
FAULTS_DIR_VARIABLE = "SKYRL_FLOWS_FAULTS_DIR"
FLOW_PID_VARIABLE = "SKYRL_FLOWS_FLOW_PID"


def point(name: str, **where: object) -> None:
    """Do what is armed for `name` at this place, if anything. A no-op unless faults are armed."""
    armed = os.environ.get(FAULTS_VARIABLE)
    if not armed:
        return
    for number, fault in enumerate(armed.split(";")):
        target, _, action = fault.strip().rpartition(":")
        wanted_name, _, conditions = target.partition("@")
        pairs = [pair.split("=", 1) for pair in conditions.split(",") if pair]
        if wanted_name == name and all(str(where.get(key)) == value for key, value in pairs) and _first_time(number):
            _act(action, name)


def _first_time(number: int) -> bool:
    folder = Path(os.environ[FAULTS_DIR_VARIABLE])
    try:
        (folder / f"fault-{number}.fired").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _act(action: str, name: str) -> None:
    if action == "kill-self":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill-flow":
        os.kill(int(os.environ[FLOW_PID_VARIABLE]), signal.SIGKILL)
        time.sleep(60)
    elif action == "hang":
        time.sleep(3600)
    elif action == "raise":
        raise RuntimeError(f"fault injected at {name}")
    else:
        raise ValueError(f"{FAULTS_VARIABLE}: unknown action {action!r} for {name}")
