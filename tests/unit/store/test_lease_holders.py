"""Who counts as alive, what a holder tells others, and how a superseded one finds out."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.data.lease import Lease
from skyrl_core.data.storage import LocalStorage
from skyrl_core.errors import LeaseLostError, RunBusyError, StoreError, is_transient

TTL = 60.0


def leave_behind(root: Path, **changes: Any) -> None:
    """The token file of a holder that neither released nor lives in this process any more."""
    Lease.acquire(root, {"flow_run_id": "old"}, ttl_seconds=TTL).release()
    token = root / "lease" / "token_00000001.json"
    token.write_text(json.dumps({**json.loads(token.read_text()), "released": False, **changes}))


def test_a_holder_on_another_machine_lives_while_its_heartbeat_is_younger_than_its_ttl(tmp_path: Path) -> None:
    leave_behind(tmp_path, boot_id="another", host="node-7", pid=4711, heartbeat_at=time.time() - TTL / 2)
    with pytest.raises(RunBusyError, match=r"process 4711 on node-7 .*flow_run_id old") as caught:
        Lease.acquire(tmp_path)
    assert "trainer.run_name" in str(caught.value)
    assert not is_transient(caught.value)


def test_a_holder_on_another_machine_without_heartbeats_is_superseded(tmp_path: Path) -> None:
    leave_behind(tmp_path, boot_id="another", heartbeat_at=time.time() - 10 * TTL)
    with Lease.acquire(tmp_path) as lease:
        assert lease.token == 2
        assert lease.previous is not None
        assert lease.previous.info == {"flow_run_id": "old"}


def test_the_same_process_id_in_another_container_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    leave_behind(tmp_path, pid_namespace="pid:[1]", process_start="another", heartbeat_at=time.time())
    with pytest.raises(RunBusyError):
        Lease.acquire(tmp_path)


def test_a_reused_process_id_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    # The pid is this living process's own, but the holder had started at another time.
    leave_behind(tmp_path, process_start="tick 1", heartbeat_at=time.time())
    with Lease.acquire(tmp_path) as lease:
        assert lease.previous is not None


def test_a_living_process_is_respected_although_its_heartbeat_is_old(tmp_path: Path) -> None:
    leave_behind(tmp_path, heartbeat_at=0.0)
    with pytest.raises(RunBusyError):
        Lease.acquire(tmp_path)


def test_a_released_run_has_no_previous_holder_and_its_token_is_not_used_again(tmp_path: Path) -> None:
    first = Lease.acquire(tmp_path)
    first.release()
    first.release()
    with Lease.acquire(tmp_path) as second:
        assert (first.token, second.token) == (1, 2)
        assert second.previous is None


def test_an_unreadable_token_counts_as_dead_and_stays_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_behind(tmp_path)
    (tmp_path / "lease" / "token_00000001.json").write_text("{")
    with Lease.acquire(tmp_path) as lease:
        assert lease.token == 2
    assert "token_00000001.json" in caplog.text


def test_what_a_holder_adds_later_is_seen_by_others(tmp_path: Path) -> None:
    with Lease.acquire(tmp_path, {"flow_run_id": "a"}) as lease:
        lease.update(ui="http://127.0.0.1:4200")
        with pytest.raises(RunBusyError, match=r"flow_run_id a, ui http://127\.0\.0\.1:4200"):
            Lease.acquire(tmp_path)


def test_a_holder_is_told_that_a_newer_one_took_over(tmp_path: Path) -> None:
    old = Lease.acquire(tmp_path)
    old.check()
    old.release()
    with Lease.acquire(tmp_path), pytest.raises(LeaseLostError, match="token 2, this process holds 1"):
        old.check()


def test_heartbeats_are_written_and_outlast_a_storage_that_fails_once(tmp_path: Path) -> None:
    class Storage(LocalStorage):
        def __init__(self) -> None:
            super().__init__(tmp_path)
            self.attempts, self.written = 0, threading.Event()

        def publish(self, path: str, data: bytes) -> None:
            self.attempts += 1
            if self.attempts == 1:
                raise OSError("no route")
            super().publish(path, data)
            self.written.set()

    storage = Storage()
    with Lease.acquire(storage, ttl_seconds=0.05):
        assert storage.written.wait(timeout=60)
    holder = json.loads((tmp_path / "lease" / "token_00000001.json").read_text())
    assert holder["heartbeat_at"] > holder["acquired_at"]


def test_a_store_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="file"):
        Lease.acquire(tmp_path / "file")
