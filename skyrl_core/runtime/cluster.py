"""One Ray connection per flow process: join the cluster that is there, or start a local one and stop it at the end."""

import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from skyrl_core.errors import OrchestrationError
from skyrl_core.runtime.store_access import store_environment
from skyrl_core.testing.faults import FAULTS_DIR_VARIABLE, FAULTS_VARIABLE, FLOW_PID_VARIABLE

_KNOCK_SECONDS = 5.0
# What a worker process needs when it starts. Ray writes these into its logs and shows them on its pages.
_VISIBLE = ("PYTHONPATH", "HF_HUB_OFFLINE", "HF_HOME", FAULTS_VARIABLE, FAULTS_DIR_VARIABLE)

# Ray ends workers that were idle for a second once there are more processes than CPUs, which our actors alone can be. A
# stage that has to wait for a new worker waits for all of its imports.
_PATIENT = {"idle_worker_killing_time_threshold_ms": 600_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The cluster this process is connected to.

    `started` is True when this call started it. A joined cluster may have an autoscaler, so it `can_grow`; a local one
    never gets more than it has.
    """

    address: str
    started: bool
    can_grow: bool


@contextmanager
def ensure_ray(
    namespace: str, *, num_cpus: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """Connect to Ray and, on leaving, undo only what was done here.

    With RAY_ADDRESS set that cluster is joined; otherwise a local one is started. In a process that is connected
    already (a nested call, a test session) nothing is started or stopped. A local cluster dies with this process, also
    on SIGKILL, since Ray's own processes share its fate; in a joined cluster the run's actors do: none is detached.

    Args:
        namespace: Where this run's named actors live.
        num_cpus: Logical CPUs of a local cluster; None takes the machine's.
        environment: Further variables for every worker process, such as keys: they reach the workers as pickled bytes,
            as do those of the object store (AWS_*), so that they stand in no log and on no page of Ray.

    Raises:
        OrchestrationError: the address cannot be reached, or Ray did not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield RayCluster(address=ray.get_runtime_context().gcs_address, started=False, can_grow=bool(address))
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    arguments: dict[str, object] = {
        "address": address or "local",
        "namespace": namespace,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {
            "env_vars": worker_environment(),
            "worker_process_setup_hook": _setter({**store_environment(), **(environment or {})}),
        },
    }
    if not address:
        arguments |= {"include_dashboard": False, "num_cpus": num_cpus, "_system_config": _PATIENT}
    try:
        if address:
            _knock(address)
        context = ray.init(**arguments)
    except Exception as error:
        if address:
            raise OrchestrationError(f"Ray at RAY_ADDRESS={address} could not be joined: {_reason(error)}") from error
        raise OrchestrationError(f"a local Ray could not be started: {error}") from error
    try:
        yield RayCluster(address=context.address_info["address"], started=not address, can_grow=bool(address))
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError when nothing listens at `host:port`; Ray itself would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _reason(error: BaseException) -> str:
    """What went wrong and what to do, in one line."""
    causes = f"{error} {error.__cause__} {error.__context__}"
    if "AuthenticationError" in causes or "auth" in causes.lower():
        return (
            "it refused this process's token. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the "
            "cluster's token (here and where `ray start` runs)."
        )
    return f"{error}. Start it with `ray start --head`, or unset RAY_ADDRESS to use a local one."


def warm_worker(*modules: str) -> None:
    """Have one idle worker import `modules` in the background, so that the first task that needs them does not wait."""
    ray.remote(num_cpus=0, max_retries=0)(_import_all).remote(modules)


def _import_all(modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)


def _setter(variables: Mapping[str, str]) -> Callable[[], None]:
    """What every worker process calls before its first task."""

    def set_environment() -> None:
        os.environ.update(variables)

    return set_environment


def worker_environment() -> dict[str, str]:
    """Environment variables that every Ray worker of this run starts with.

    One thread per process keeps CPU results bit-identical. Modules named in the configuration (`module:function`) may
    live in the folder the user started from, so it leads the workers' search path.
    """
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", FLOW_PID_VARIABLE: str(os.getpid())}
    environment |= {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    search_path = [os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(search_path))
    return environment
