"""A save, a replacement or a deletion killed before any of its effects on the disk leaves a whole checkpoint behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.checkpoint.discovery import checkpoint_at, latest_checkpoint, list_checkpoints, read_manifest
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.resume import starting_point
from skyrl_core.checkpoint.retention import apply_retention, clean_leftovers
from skyrl_core.data.references import CheckpointRef
from skyrl_core.data.storage import LocalEffects, LocalStorage
from skyrl_core.errors import CheckpointError, ConfigurationError, CorruptCheckpointError

FACTS: dict[str, Any] = {
    "config_digest": "c",
    "dataset_fingerprint": "d",
    "data_position": {"epoch": 0, "offset_samples": 4},
    "world_size": 1,
    "run_name": "k",
}
NEVER = 10_000


class Killed(BaseException):
    """Not an Exception: like SIGKILL, nothing may catch it."""


class DyingEffects(LocalEffects):
    """Dies before its n-th effect; writes before that are on the disk, a dying write half so."""

    def __init__(self, survive: int) -> None:
        self.left = survive

    def _count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        if self.left == 0:
            super().write(path, data[: len(data) // 2], append=append)
        self._count()
        super().write(path, data, append=append)

    def fsync(self, path: Path) -> None:
        self._count()
        super().fsync(path)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count()
        super().remove_folder(path)


def save(root: Path, step: int, content: bytes, effects: LocalEffects | None = None) -> CheckpointRef:
    writer = CheckpointWriter(LocalStorage(root, effects), step)
    policy = Path(writer.directory) / "policy"
    policy.mkdir()
    (policy / "weights.bin").write_bytes(content)
    (policy / "state.json").write_bytes(b"{}")
    return writer.commit(policy_version=step, **FACTS)


def weights(ref: CheckpointRef) -> bytes:
    checkpoint_at(ref.uri)
    return (Path(ref.uri) / "policy" / "weights.bin").read_bytes()


def for_every_kill(tmp_path: Path, act: Callable[[Path, LocalEffects], None], check: Callable[[Path], None]) -> int:
    """Run `act` on a fresh folder, killed before effect 0, 1, 2, … until it survives; `check` after each, twice."""
    for survive in range(NEVER):
        root = tmp_path / f"run-{survive}"
        save(root, 2, b"two" * 100)
        try:
            act(root, DyingEffects(survive))
        except Killed:
            check(root)
            clean_leftovers(root)
            check(root)
            continue
        check(root)
        return survive
    raise AssertionError("never survived")


def test_a_save_killed_anywhere_leaves_the_old_one_newest_or_the_new_one_whole(tmp_path: Path) -> None:
    found: set[int] = set()

    def check(root: Path) -> None:
        newest = latest_checkpoint(root, verify="full")
        assert newest is not None
        found.add(newest.step)
        assert weights(newest) == {2: b"two" * 100, 4: b"four" * 100}[newest.step]
        assert 2 in [ref.step for ref in list_checkpoints(root, verify="full")]

    effects = for_every_kill(tmp_path, lambda root, dying: _ignore(save(root, 4, b"four" * 100, dying)), check)
    assert effects > 10
    assert found == {2, 4}


def test_a_replacement_killed_anywhere_never_leaves_the_step_without_a_checkpoint(tmp_path: Path) -> None:
    found: set[bytes] = set()

    def check(root: Path) -> None:
        newest = latest_checkpoint(root, verify="full")
        assert newest is not None
        assert newest.step == 2
        found.add(weights(newest)[:3])

    for_every_kill(tmp_path, lambda root, dying: _ignore(save(root, 2, b"new" * 100, dying)), check)
    assert found == {b"two", b"new"}


def test_a_deletion_killed_anywhere_never_shows_a_half_deleted_checkpoint(tmp_path: Path) -> None:
    def act(root: Path, dying: LocalEffects) -> None:
        save(root, 4, b"four" * 100)
        apply_retention(LocalStorage(root, dying), 1)

    def check(root: Path) -> None:
        steps = [ref.step for ref in list_checkpoints(root, verify="full")]
        assert steps in ([2, 4], [4])

    for_every_kill(tmp_path, act, check)


def _ignore(_: object) -> None:
    return None


def test_a_truncated_newest_falls_back_with_a_warning_that_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2, b"two" * 100)
    newest = save(tmp_path, 4, b"four" * 100)
    (Path(newest.uri) / "policy" / "weights.bin").write_bytes(b"four")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2
    assert "weights.bin" in caplog.text


@pytest.mark.parametrize("name", ["policy/weights.bin", "policy/state.json", "manifest.json"])
def test_a_missing_file_makes_the_checkpoint_incomplete(tmp_path: Path, name: str) -> None:
    save(tmp_path, 2, b"two" * 100)
    newest = save(tmp_path, 4, b"four" * 100)
    (Path(newest.uri) / name).unlink()
    assert [ref.step for ref in list_checkpoints(tmp_path)] == [2]
    with pytest.raises(CheckpointError, match="manifest" if name == "manifest.json" else Path(name).name):
        checkpoint_at(newest.uri)


def test_altered_bytes_of_the_right_size_are_found_by_their_checksum(tmp_path: Path) -> None:
    ref = save(tmp_path, 2, b"two" * 100)
    (Path(ref.uri) / "policy" / "weights.bin").write_bytes(b"TWO" * 100)
    with pytest.raises(CorruptCheckpointError, match=r"weights\.bin"):
        checkpoint_at(ref.uri)


def test_the_manifest_carries_what_resume_needs(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path, 2, b"two"))
    assert (manifest.step, manifest.policy_version, manifest.world_size, manifest.run_name) == (2, 2, 1, "k")
    assert manifest.data_position == {"epoch": 0, "offset_samples": 4}
    assert sorted(entry.path for entry in manifest.files) == ["policy/state.json", "policy/weights.bin"]
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "2"


def test_retention_keeps_the_newest_the_pointer_s_and_the_pinned(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, bytes([step]))
    (tmp_path / "latest_ckpt_global_step.txt").write_text("6")
    assert apply_retention(tmp_path, 1, pinned=[2]) == [4]
    assert [ref.step for ref in list_checkpoints(tmp_path)] == [2, 6, 8]
    assert apply_retention(tmp_path, -1) == []


def test_nothing_to_resume_starts_fresh(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert starting_point(str(tmp_path), mode="latest", path=None, name="k", started=False) is None


def test_a_run_with_results_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.run_name"):
        starting_point(str(tmp_path), mode="none", path=None, name="k", started=True)


def test_a_named_checkpoint_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        starting_point(str(tmp_path), mode="from_path", path=str(tmp_path / "nowhere"), name="k", started=False)
    ref = save(tmp_path, 2, b"two")
    found = starting_point(str(tmp_path), mode="from_path", path=ref.uri, name="k", started=False)
    assert found == ref


def test_a_run_that_began_with_a_checkpoint_keeps_it_and_takes_no_other(tmp_path: Path) -> None:
    first, other = save(tmp_path / "a", 2, b"two"), save(tmp_path / "b", 4, b"four")
    past: dict[str, Any] = {"name": "k", "started": True, "started_from": first.uri}
    assert starting_point(str(tmp_path), mode="latest", path=None, **past) == first
    assert starting_point(str(tmp_path), mode="from_path", path=first.uri, **past) == first
    with pytest.raises(ConfigurationError, match=r"another trainer\.run_name"):
        starting_point(str(tmp_path), mode="from_path", path=other.uri, **past)
