"""The embedded Prefect server: a local SQLite server on loopback, started when no API is configured, shared by runs
that overlap, and stopped by the last of them.

A note in PREFECT_HOME names the server's process and its users. A server whose users were all killed is adopted by
the next start. Nothing here imports Prefect: settings must be in the environment before that import.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from skyrl_core.errors import ConfigurationError, OrchestrationError

_NOTE = "skyrl-flows-server.json"
_POLL_SECONDS = 0.1


def prefect_home() -> Path:
    """Prefect's folder, where its default SQLite database lies."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectServer:
    """A reachable Prefect API. `embedded` servers are ours to release; others belong to somebody else."""

    api_url: str
    embedded: bool
    adopted: bool = False
    log_path: Path | None = None

    @property
    def ui_url(self) -> str:
        """Address of the user interface that goes with the API."""
        return self.api_url.removesuffix("/api")

    def wait_ready(self, timeout: float) -> None:
        """Return when the API answers.

        Raises:
            OrchestrationError: it did not within `timeout` seconds; says where its log is or what to check.
        """
        deadline = time.monotonic() + timeout
        while not _healthy(self.api_url):
            gone = self.embedded and _read_note() is None
            if gone or time.monotonic() > deadline:
                raise OrchestrationError(self._unreachable(timeout))
            time.sleep(_POLL_SECONDS)

    def _unreachable(self, timeout: float) -> str:
        if self.embedded:
            return (
                f"the local Prefect server did not answer at {self.api_url} within {timeout:g} s; its log is "
                f"{self.log_path}. Raise flow.prefect_start_timeout_seconds on a slow machine."
            )
        return (
            f"the Prefect API at PREFECT_API_URL={self.api_url} does not answer. Start it, correct the address, or "
            "unset PREFECT_API_URL to use a local server."
        )

    def release(self) -> bool:
        """This process no longer uses the server. Stops an embedded one that nobody else uses; True if it stopped."""
        if not self.embedded:
            return False
        with _locked():
            note = _read_note()
            if note is None or note["api_url"] != self.api_url:
                return False
            users = [user for user in note["users"] if user["pid"] != os.getpid() and _alive(user)]
            if users:
                _write_note({**note, "users": users})
                return False
            _stop(note["server"])
            _note_path().unlink(missing_ok=True)
            return True


def ensure_server(port: int = 0) -> PrefectServer:
    """Find or start a Prefect API, without waiting until it answers (`wait_ready` does).

    PREFECT_API_URL wins and is only used; else a server that another run started is shared; else one is started on
    loopback at `port` (0: any free one) and PREFECT_API_URL is set for this process and its children.

    Raises:
        ConfigurationError: `port` is taken.
    """
    if configured := os.environ.get("PREFECT_API_URL"):
        return PrefectServer(api_url=configured, embedded=False)
    prefect_home().mkdir(parents=True, exist_ok=True)
    with _locked():
        note = _read_note()
        adopted = note is not None
        if note is None:
            note = _start(port)
        note["users"] = [user for user in note["users"] if _alive(user)] + [_identity(os.getpid())]
        _write_note(note)
    os.environ["PREFECT_API_URL"] = note["api_url"]
    return PrefectServer(api_url=note["api_url"], embedded=True, adopted=adopted, log_path=_log_path())


def _start(port: int) -> dict[str, Any]:
    port = claim_port(port)
    api_url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    with _log_path().open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A session of its own: Ctrl-C in the terminal ends the run, which then releases the server in order.
            start_new_session=True,
        )
    return {"api_url": api_url, "server": _identity(process.pid), "users": []}


def claim_port(port: int) -> int:
    """`port` when it is free on loopback, or any free one for 0. Raises ConfigurationError when it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"flow.prefect_port={port} cannot be used on 127.0.0.1: {error.strerror}. Name another port, or 0 for "
                "any free one."
            ) from error
        return int(probe.getsockname()[1])


def _healthy(api_url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{api_url}/health", timeout=2.0).status_code == httpx.codes.OK
    return False


@contextmanager
def _locked() -> Iterator[None]:
    with (prefect_home() / "skyrl-flows-server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _note_path() -> Path:
    return prefect_home() / _NOTE


def _log_path() -> Path:
    return prefect_home() / "skyrl-flows-server.log"


def _read_note() -> dict[str, Any] | None:
    """The note of a server that lives, else None."""
    try:
        note = json.loads(_note_path().read_text())
        return note if _alive(note["server"]) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _write_note(note: Mapping[str, Any]) -> None:
    aside = _note_path().with_suffix(".partial")
    aside.write_text(json.dumps(note))
    aside.replace(_note_path())


def _identity(pid: int) -> dict[str, float]:
    """A process id and its start time: ids are used again, the pair is not."""
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def _alive(process: Mapping[str, float]) -> bool:
    try:
        found = psutil.Process(int(process["pid"]))
        return found.create_time() == process["started"] and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stop(server: Mapping[str, float], patience: float = 10.0) -> None:
    if not _alive(server):
        return
    pid = int(server["pid"])
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    gone, _ = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=patience)
    if not gone and _alive(server):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
