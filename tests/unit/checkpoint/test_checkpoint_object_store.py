"""Checkpoints where there is no rename: a kill between any two requests leaves a whole checkpoint behind."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from skyrl_core.checkpoint.discovery import checkpoint_at, latest_checkpoint, list_checkpoints
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.retention import apply_retention, clean_leftovers
from skyrl_core.data.lease import Lease
from skyrl_core.data.object_storage import ObjectEffects, ObjectStorage
from skyrl_core.data.storage import Storage
from skyrl_core.errors import CheckpointError, LeaseLostError

FACTS: dict[str, Any] = {
    "config_digest": "c",
    "dataset_fingerprint": "d",
    "data_position": {"samples": 4},
    "world_size": 2,
    "run_name": "k",
}
NEVER = 10_000


class Killed(BaseException):
    """Not an Exception: like SIGKILL, nothing may catch it."""


class DyingObjects(ObjectEffects):
    """A client that dies at its n-th request and makes none after it."""

    def __init__(self, filesystem: Any, survive: int) -> None:
        super().__init__(filesystem)
        self.left = survive

    def _count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def put(self, path: str, data: bytes) -> None:
        self._count()
        super().put(path, data)

    def copy(self, source: str, target: str) -> None:
        self._count()
        super().copy(source, target)

    def delete(self, path: str) -> None:
        self._count()
        super().delete(path)


def new_root() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def dying(root: str, survive: int) -> Storage:
    return ObjectStorage(root, lambda filesystem: DyingObjects(filesystem, survive))


def save(storage: Storage, step: int, content: bytes) -> None:
    writer = CheckpointWriter(storage, step)
    for rank in range(2):
        with fsspec.open(f"{writer.directory}/policy/rank_{rank}.bin", "wb") as stream:
            stream.write(content + bytes([rank]))
    writer.commit(policy_version=step, **FACTS)


def content_of(uri: str) -> bytes:
    checkpoint_at(uri, verify="full")
    with fsspec.open(f"{uri}/policy/rank_0.bin", "rb") as stream:
        data: bytes = stream.read()
    return data[:-1]


def for_every_kill(act: Callable[[Storage], None], check: Callable[[str], None]) -> int:
    """`act` killed before request 0, 1, 2, …; `check` as found, after the next writer's clean-up, and after a retry."""
    for survive in range(NEVER):
        root = new_root()
        save(ObjectStorage(root), 2, b"two")
        try:
            act(dying(root, survive))
            survived = True
        except Killed:
            survived = False
        check(root)
        clean_leftovers(root)
        check(root)
        assert not [name for name in ObjectStorage(root).files("") if name.startswith(".")]
        act(ObjectStorage(root))
        check(root)
        if survived:
            return survive
    raise AssertionError("never survived")


def test_a_save_killed_anywhere_leaves_the_old_one_newest_or_the_new_one_whole() -> None:
    found: list[int] = []

    def check(root: str) -> None:
        newest = latest_checkpoint(root, verify="full")
        assert newest is not None
        assert content_of(newest.uri) == {2: b"two", 4: b"four"}[newest.step]
        assert 2 in [ref.step for ref in list_checkpoints(root, verify="full")]
        found.append(newest.step)

    for_every_kill(lambda storage: save(storage, 4, b"four"), check)
    assert set(found) == {2, 4}


def test_a_replacement_killed_anywhere_never_leaves_the_step_without_a_checkpoint() -> None:
    found: set[bytes] = set()

    def check(root: str) -> None:
        newest = latest_checkpoint(root, verify="full")
        assert newest is not None
        assert newest.step == 2
        found.add(content_of(newest.uri))

    effects = for_every_kill(lambda storage: save(storage, 2, b"new"), check)
    assert found == {b"two", b"new"}
    assert effects > 8


def test_a_deletion_killed_anywhere_never_shows_a_half_deleted_checkpoint() -> None:
    def act(storage: Storage) -> None:
        save(ObjectStorage(storage.uri), 4, b"four")
        apply_retention(storage, 1)

    def check(root: str) -> None:
        assert [ref.step for ref in list_checkpoints(root, verify="full")] in ([2, 4], [4])

    for_every_kill(act, check)


def test_the_writer_that_was_superseded_publishes_nothing() -> None:
    root = new_root()
    lease = Lease.acquire(root)
    writer = CheckpointWriter(root, 1, fence=lease.token)
    with fsspec.open(f"{writer.directory}/weights.bin", "wb") as stream:
        stream.write(b"one")
    lease.release()
    with Lease.acquire(root), pytest.raises(LeaseLostError):
        writer.commit(policy_version=1, **FACTS)
    assert latest_checkpoint(root) is None


def test_a_store_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        """What a client library raises that knows nothing of OSError."""

    def fail(*_: Any, **__: Any) -> None:
        raise Unreachable("no route to host")

    root = new_root()
    writer = CheckpointWriter(root, 1)
    with fsspec.open(f"{writer.directory}/weights.bin", "wb") as stream:
        stream.write(b"one")
    monkeypatch.setattr(ObjectEffects, "put", fail)
    with pytest.raises(CheckpointError, match=rf"step 1 in {root} cannot be committed: .*no route to host"):
        writer.commit(policy_version=1, **FACTS)
    assert latest_checkpoint(root) is None


def test_files_of_many_ranks_are_listed_with_paths_inside_the_checkpoint(tmp_path: Path) -> None:
    root = new_root()
    save(ObjectStorage(root), 7, b"x")
    newest = latest_checkpoint(root)
    assert newest is not None
    _, manifest = checkpoint_at(newest.uri)
    assert [(entry.path, entry.size) for entry in manifest.files] == [
        ("policy/rank_0.bin", 2),
        ("policy/rank_1.bin", 2),
    ]


def test_an_empty_folder_that_a_store_lists_after_a_deletion_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    root = new_root()
    save(ObjectStorage(root), 2, b"two")
    fsspec.filesystem("memory").makedirs(f"{root}/global_step_1/policy")
    assert [ref.step for ref in list_checkpoints(root)] == [2]
    assert caplog.text == ""
