"""The embedded Prefect server: who uses it, who stops it, and what happens to one that a killed run left."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows import server
from skyrl_core.errors import ConfigurationError, OrchestrationError

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    # Registered with monkeypatch so that the value ensure_server sets is gone after the test.
    monkeypatch.setenv("PREFECT_API_URL", "")
    return tmp_path


@pytest.fixture
def stand_in(home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands in for a running server, with its note in place and no user alive."""
    process = subprocess.Popen(SLEEPER, start_new_session=True)
    identity = {"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
    note = {"api_url": "http://127.0.0.1:4999/api", "server": identity, "users": [{"pid": process.pid, "started": 1.0}]}
    (home / "skyrl-flows-server.json").write_text(json.dumps(note))
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_server_left_by_a_killed_run_is_adopted_and_stopped_by_its_last_user(
    home: Path, stand_in: "subprocess.Popen[bytes]"
) -> None:
    found = server.ensure_server()
    assert found.adopted
    assert found.embedded
    assert found.api_url == os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4999/api"
    assert found.release()
    stand_in.wait(timeout=30)
    assert not psutil.pid_exists(stand_in.pid)
    assert not (home / "skyrl-flows-server.json").exists()


def test_a_server_that_another_living_run_uses_is_left_running(home: Path, stand_in: "subprocess.Popen[bytes]") -> None:
    other = subprocess.Popen(SLEEPER)
    try:
        found = server.ensure_server()
        path = home / "skyrl-flows-server.json"
        note = json.loads(path.read_text())
        note["users"].append({"pid": other.pid, "started": psutil.Process(other.pid).create_time()})
        path.write_text(json.dumps(note))
        assert not found.release()
        assert stand_in.poll() is None
        assert [user["pid"] for user in json.loads(path.read_text())["users"]] == [other.pid]
    finally:
        other.kill()
        other.wait()


def test_a_note_whose_process_id_was_used_again_is_not_believed(home: Path) -> None:
    reused = {"pid": os.getpid(), "started": 1.0}
    note = {"api_url": "http://x/api", "server": reused, "users": []}
    (home / "skyrl-flows-server.json").write_text(json.dumps(note))
    assert server._read_note() is None


def test_a_torn_note_is_not_believed(home: Path) -> None:
    (home / "skyrl-flows-server.json").write_text('{"api_url": "http://x')
    assert server._read_note() is None


def test_a_named_port_that_is_busy_is_refused_before_anything_starts(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"flow.prefect_port={port}"):
            server.ensure_server(port)
    assert not (home / "skyrl-flows-server.json").exists()


def test_a_configured_api_that_does_not_answer_is_a_clear_message_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    found = server.ensure_server()
    assert not found.embedded
    with pytest.raises(OrchestrationError, match="PREFECT_API_URL"):
        found.wait_ready(timeout=0.0)
    assert not found.release()
