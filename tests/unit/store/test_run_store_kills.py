"""A stage's commit, pruning and dropping, killed before every single effect, on a disk and on an object store."""

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.data.lease import Lease
from skyrl_core.data.object_storage import ObjectEffects, ObjectStorage
from skyrl_core.data.references import StageRecord
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.storage import LocalEffects, LocalStorage, Storage, atomic_write_bytes
from skyrl_core.errors import LeaseLostError

OLD, NEW = b"old" * 50, b"new" * 70
NEVER = 10_000


class Killed(BaseException):
    """Not an Exception: like SIGKILL, nothing may catch it."""


class Countdown:
    """Dies at the n-th effect and at every later one: a dead process cleans nothing up."""

    def __init__(self, survive: int) -> None:
        self.left = survive

    def __call__(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


class PowerCut(LocalEffects):
    """A disk that loses power: what was written but not flushed is cut in half, whatever it was renamed to."""

    def __init__(self, survive: int) -> None:
        self.count = Countdown(survive)
        self.unflushed: set[Path] = set()

    def cut(self) -> None:
        for path in self.unflushed:
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def make_folder(self, path: Path) -> None:
        self.count()
        super().make_folder(path)

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        self.count()
        super().write(path, data, append=append)
        self.unflushed.add(path)

    def fsync(self, path: Path) -> None:
        self.count()
        super().fsync(path)
        self.unflushed.discard(path)

    def replace(self, source: Path, target: Path) -> None:
        self.count()
        super().replace(source, target)
        self._moved(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.count()
        super().link(source, target)
        if source in self.unflushed:
            self.unflushed.add(target)

    def remove(self, path: Path) -> None:
        self.count()
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self.count()
        super().remove_folder(path)

    def _moved(self, source: Path, target: Path) -> None:
        if source in self.unflushed:
            self.unflushed.discard(source)
            self.unflushed.add(target)


class DyingObjects(ObjectEffects):
    """An object store whose client dies between two requests."""

    def __init__(self, filesystem: Any, survive: int) -> None:
        super().__init__(filesystem)
        self.count = Countdown(survive)

    def put(self, path: str, data: bytes) -> None:
        self.count()
        super().put(path, data)

    def put_file(self, path: str, source: Path) -> None:
        self.count()
        super().put_file(path, source)

    def put_new(self, path: str, data: bytes) -> None:
        self.count()
        super().put_new(path, data)

    def delete(self, path: str) -> None:
        self.count()
        super().delete(path)


Act = Callable[[RunStore], object]
Check = Callable[[RunStore], None]


def new_root() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def dying_storage(kind: str, root: str, survive: int) -> tuple[Storage, Callable[[], None]]:
    """A storage that dies before its n-th effect, and what the death does to the disk."""
    if kind == "local":
        effects = PowerCut(survive)
        return LocalStorage(root, effects), effects.cut
    return ObjectStorage(root, lambda filesystem: DyingObjects(filesystem, survive)), lambda: None


def kill_everywhere(kind: str, tmp_path: Path, prepare: Act, act: Act, check: Check) -> int:
    """`act` killed before effect 0, 1, 2, …; then `check` by the next writer. Returns how many effects it has."""
    for survive in range(NEVER):
        root = str(tmp_path / f"run-{survive}") if kind == "local" else new_root()
        with Lease.acquire(root) as lease:
            prepare(RunStore.open(root, fence=lease.token))
            storage, cut = dying_storage(kind, root, survive)
            try:
                act(RunStore(storage, lease.token))
                survived = True
            except Killed:
                cut()
                survived = False
        with Lease.acquire(root) as lease:
            check(RunStore.open(root, fence=lease.token))
            leftovers_are_gone(root)
        if survived:
            return survive
    raise AssertionError("never survived")


def leftovers_are_gone(root: str) -> None:
    storage = LocalStorage(root) if "://" not in root else ObjectStorage(root)
    store = RunStore.open(root)
    kept = {f"step_{step:06d}/{stage}/record.json" for stage in ("score", "update") for step in (1, 2)}
    for stage in ("score", "update"):
        for record in store.records(stage):
            folder = f"step_{record.step:06d}/{stage}"
            kept |= set() if record.pruned else {f"{folder}/{entry.path}" for entry in record.files}
    assert set(storage.files("stages")) <= kept


def commit(store: RunStore, inputs: str, content: bytes, *, stage: str = "score", step: int = 1) -> StageRecord:
    files: dict[str, bytes | Path] = {"a.bin": content, "b.bin": content[::-1]}
    return store.write_stage(stage, step, inputs, files=files, summary={"reward": 0.5}, seconds=1.0)


def whole(store: RunStore, inputs: str, content: bytes, *, step: int = 1) -> bool:
    record = store.find_stage("score", step, inputs)
    if record is None:
        return False
    assert store.read_file(record, "a.bin") == content
    assert store.read_file(record, "b.bin") == content[::-1]
    assert record.summary == {"reward": 0.5}
    return True


KINDS = pytest.mark.parametrize("kind", ["local", "object"])


@KINDS
def test_a_first_commit_killed_anywhere_is_whole_or_not_done(tmp_path: Path, kind: str) -> None:
    outcomes: list[bool] = []
    effects = kill_everywhere(
        kind,
        tmp_path,
        prepare=lambda store: None,
        act=lambda store: commit(store, "new", NEW),
        check=lambda store: outcomes.append(whole(store, "new", NEW)),
    )
    # Not done up to the commit point, done from there on, and both were seen.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    assert effects == len(outcomes) - 1


@KINDS
def test_a_commit_over_other_inputs_killed_anywhere_leaves_the_old_or_the_new_record(tmp_path: Path, kind: str) -> None:
    outcomes: list[tuple[bool, bool]] = []

    def check(store: RunStore) -> None:
        found = whole(store, "old", OLD), whole(store, "new", NEW)
        outcomes.append(found)
        # And the stage can be done again for the new inputs from whatever is there.
        commit(store, "new", NEW)
        assert whole(store, "new", NEW)

    kill_everywhere(
        kind,
        tmp_path,
        prepare=lambda store: commit(store, "old", OLD),
        act=lambda store: commit(store, "new", NEW),
        check=check,
    )
    assert set(outcomes) == {(True, False), (False, True)}


@KINDS
def test_pruning_killed_anywhere_keeps_every_metric_and_every_later_file(tmp_path: Path, kind: str) -> None:
    def prepare(store: RunStore) -> None:
        commit(store, "i", OLD, step=1)
        commit(store, "i", OLD, step=2)

    def check(store: RunStore) -> None:
        assert [record.summary for record in store.records("score")] == [{"reward": 0.5}] * 2
        assert whole(store, "i", OLD, step=2)
        store.prune_before(2)
        assert [record.pruned for record in store.records("score")] == [True, False]

    kill_everywhere(kind, tmp_path, prepare, lambda store: store.prune_before(2), check)


@KINDS
def test_dropping_killed_anywhere_leaves_no_gap_and_nothing_half(tmp_path: Path, kind: str) -> None:
    def prepare(store: RunStore) -> None:
        commit(store, "i", OLD, step=1)
        commit(store, "i", OLD, step=2)

    def check(store: RunStore) -> None:
        steps = store.steps_with("score")
        assert steps in ([1, 2], [1], [])
        assert all(whole(store, "i", OLD, step=step) for step in steps)
        store.drop_from(1)
        assert store.steps_with("score") == []

    kill_everywhere(kind, tmp_path, prepare, lambda store: store.drop_from(1), check)


@pytest.mark.parametrize("before", [None, OLD])
def test_a_document_killed_anywhere_is_the_old_or_the_new_one(tmp_path: Path, before: bytes | None) -> None:
    seen: set[bytes | None] = set()
    for survive in range(NEVER):
        target = tmp_path / str(survive) / "summary.json"
        if before is not None:
            atomic_write_bytes(target, before)
        effects = PowerCut(survive)
        try:
            LocalStorage(target.parent, effects).publish(target.name, NEW)
        except Killed:
            effects.cut()
            seen.add(target.read_bytes() if target.exists() else None)
            continue
        assert target.read_bytes() == NEW
        break
    assert seen == {before, NEW}


def test_taking_the_lease_killed_anywhere_leaves_it_free_or_taken(tmp_path: Path) -> None:
    tokens: list[int] = []
    for survive in range(NEVER):
        root = tmp_path / str(survive)
        try:
            Lease.acquire(LocalStorage(root, PowerCut(survive))).release()
        except Killed:
            tokens.append(len(list(root.glob("lease/token_*.json"))))
            continue
        break
    assert tokens == sorted(tokens)
    assert set(tokens) == {0, 1}


def test_a_writer_superseded_while_it_writes_its_files_does_not_publish_their_record(tmp_path: Path) -> None:
    first = Lease.acquire(tmp_path)
    taken_over: list[Lease] = []

    class TakenOverMeanwhile(LocalStorage):
        def write(self, path: str, source: bytes | Path) -> tuple[int, str]:
            first.release()
            taken_over.append(Lease.acquire(tmp_path))
            return super().write(path, source)

    store = RunStore(TakenOverMeanwhile(tmp_path), first.token)
    with pytest.raises(LeaseLostError):
        store.write_stage("score", 1, "i", files={"a": OLD}, summary={}, seconds=0)
    assert store.read_stage("score", 1) is None
    taken_over[0].release()


def test_a_large_file_is_taken_in_pieces_and_verified_like_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "source").write_bytes(content)
    for root in (str(tmp_path / "run"), new_root()):
        with Lease.acquire(root) as lease:
            store = RunStore.open(root, fence=lease.token)
            files: dict[str, bytes | Path] = {"from_path": tmp_path / "source", "from_bytes": content}
            record = store.write_stage("score", 1, "i", files=files, summary={}, seconds=0)
            assert {entry.sha256 for entry in record.files} == {hashlib.sha256(content).hexdigest()}
            assert store.read_file(record, "from_path") == content
