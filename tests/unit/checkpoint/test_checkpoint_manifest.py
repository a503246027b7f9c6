"""What a manifest must withstand: being torn, altered, newer than the reader, or pointing outside its folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.checkpoint.discovery import checkpoint_at, latest_checkpoint, list_checkpoints
from skyrl_core.checkpoint.manifest import FORMAT_VERSION, CheckpointManifest, decode_manifest, encode_manifest
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.retention import apply_retention
from skyrl_core.data.digests import canonical_json, digest_of, parse_json
from skyrl_core.data.references import CheckpointRef, FileEntry
from skyrl_core.data.storage import LocalEffects, LocalStorage
from skyrl_core.errors import CheckpointError, CorruptCheckpointError

MANIFEST = CheckpointManifest(
    step=12,
    policy_version=12,
    files=(FileEntry(path="policy/weights.bin", size=3, sha256="0" * 64),),
    config_digest="c",
    dataset_fingerprint="d",
    data_position={"epoch": 1, "offset_samples": 96, "order": [0.1, None]},
    world_size=2,
    code_version="0.1.0",
    created_at="2026-01-01T00:00:00+00:00",
    run_name="k",
    metrics={"reward": 0.1 + 0.2, "bad": float("inf")},
)
FACTS: dict[str, Any] = {
    "config_digest": "c",
    "dataset_fingerprint": "d",
    "data_position": {},
    "world_size": 1,
    "run_name": "k",
}


def save(root: Path | LocalStorage, step: int, content: bytes) -> CheckpointRef:
    writer = CheckpointWriter(root, step)
    (Path(writer.directory) / "weights.bin").write_bytes(content)
    return writer.commit(policy_version=step, **FACTS)


def rewritten(**changes: Any) -> bytes:
    """The manifest with other fields and a checksum that fits them, as another version would write it."""
    content = parse_json(encode_manifest(MANIFEST)) | changes
    del content["sha256"]
    return canonical_json({**content, "sha256": digest_of(content)})


def test_a_manifest_is_read_back_exactly() -> None:
    assert decode_manifest(encode_manifest(MANIFEST), "m") == MANIFEST


def test_every_truncation_is_corrupt_and_named() -> None:
    data = encode_manifest(MANIFEST).rstrip()
    for size in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"^run/manifest\.json"):
            decode_manifest(data[:size], "run/manifest.json")


def test_an_altered_field_is_found_by_the_checksum() -> None:
    data = encode_manifest(MANIFEST).replace(b'"step": 12', b'"step": 13')
    with pytest.raises(CorruptCheckpointError, match="altered"):
        decode_manifest(data, "m")


def test_a_newer_version_that_this_one_understands_is_read_without_its_new_fields() -> None:
    data = rewritten(format_version=FORMAT_VERSION + 1, oldest_reader=FORMAT_VERSION, new_field=[1])
    found = decode_manifest(data, "m")
    assert found.step == 12
    assert found.format_version == FORMAT_VERSION + 1


def test_a_newer_version_that_this_one_does_not_understand_says_upgrade_instead_of_corrupt() -> None:
    data = rewritten(format_version=9, oldest_reader=9, code_version="3.0.0")
    with pytest.raises(CheckpointError, match=r"format 9 by skyrl-flows 3\.0\.0.*upgrade") as caught:
        decode_manifest(data, "m")
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/weights.bin", "policy/../../x"])
def test_a_file_outside_the_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="outside the checkpoint"):
        decode_manifest(rewritten(files=[{"path": path, "size": 1, "sha256": "0"}]), "m")


@pytest.mark.parametrize("data", [b"[]", b"3", b'{"sha256": 1, "oldest_reader": {}}', b'{"a": {"$float": 1}}', b"\xff"])
def test_other_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^m "):
        decode_manifest(data, "m")


@pytest.mark.parametrize("change", [{"files": [{"path": "a"}]}, {"files": "a"}, {"files": None}])
def test_a_manifest_with_fields_of_another_shape_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(rewritten(**change), "m")


def test_the_pointer_decides_unless_its_checkpoint_is_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, b"w")
    pointer = tmp_path / "latest_ckpt_global_step.txt"
    pointer.write_text("4\n")
    assert _step(tmp_path) == 4
    (tmp_path / "global_step_4" / "weights.bin").unlink()
    assert _step(tmp_path) == 6
    for text in ("99", "not a number", ""):
        pointer.write_text(text)
        assert _step(tmp_path) == 6
    assert "latest_ckpt_global_step.txt" in caplog.text
    pointer.unlink()
    assert _step(tmp_path) == 6


def _step(root: Path) -> int:
    found = latest_checkpoint(root)
    assert found is not None
    return found.step


def test_a_checkpoint_under_another_step_s_name_is_not_taken_for_that_step(tmp_path: Path) -> None:
    save(tmp_path, 2, b"w")
    shutil.copytree(tmp_path / "global_step_2", tmp_path / "global_step_8")
    assert [ref.step for ref in list_checkpoints(tmp_path)] == [2]


def test_a_run_s_folder_named_as_checkpoint_lists_those_inside(tmp_path: Path) -> None:
    save(tmp_path, 2, b"w")
    with pytest.raises(CheckpointError, match="global_step_2"):
        checkpoint_at(tmp_path)


def test_a_save_of_the_same_files_lets_the_first_stand(tmp_path: Path) -> None:
    first = save(tmp_path, 2, b"w")
    before = (Path(first.uri) / "manifest.json").stat().st_ino
    save(tmp_path, 4, b"x")
    assert save(tmp_path, 2, b"w") == first
    assert (Path(first.uri) / "manifest.json").stat().st_ino == before
    assert _step(tmp_path) == 2
    assert not list(tmp_path.glob(".*"))


def test_nothing_written_is_an_error_and_an_aborted_save_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to commit"):
        CheckpointWriter(tmp_path / "a", 1).commit(policy_version=1, **FACTS)
    with pytest.raises(RuntimeError, match="rank 1"), CheckpointWriter(tmp_path / "b", 1) as writer:
        (Path(writer.directory) / "weights.bin").write_bytes(b"half")
        raise RuntimeError("rank 1: no space left")
    assert list((tmp_path / "b").iterdir()) == []


def test_retention_counts_a_checkpoint_whose_replacement_was_cut_off(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, b"w")
    (tmp_path / "global_step_2").rename(tmp_path / ".global_step_2.abc.replaced")
    assert apply_retention(tmp_path, 2) == [2]
    assert [ref.step for ref in list_checkpoints(tmp_path)] == [4, 6]
    with pytest.raises(ValueError, match="at least 1"):
        apply_retention(tmp_path, 0)


def test_files_reach_the_disk_before_the_name_and_the_name_before_the_pointer(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    class Recording(LocalEffects):
        def fsync(self, path: Path) -> None:
            super().fsync(path)
            log.append(("fsync", path.name))

        def replace(self, source: Path, target: Path) -> None:
            super().replace(source, target)
            log.append(("replace", target.name))

    save(LocalStorage(tmp_path, Recording()), 2, b"w")
    named = log.index(("replace", "global_step_2"))
    pointed = log.index(("replace", "latest_ckpt_global_step.txt"))
    before = {name for action, name in log[:named] if action == "fsync"}
    partial = [name for name in before if name.endswith(".partial")]
    assert "weights.bin" in before
    assert len(partial) == 1
    assert log.index(("replace", "manifest.json")) < named - 1 - log[:named][::-1].index(("fsync", partial[0]))
    assert ("fsync", tmp_path.name) in log[named:pointed]
    assert ("fsync", tmp_path.name) in log[pointed:]


@pytest.mark.parametrize("inside", [None, "global_step_2", "policy/weights.bin"])
def test_a_newest_folder_without_a_manifest_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: str | None
) -> None:
    save(tmp_path, 2, b"w")
    broken = tmp_path / "global_step_8"
    broken.mkdir()
    if inside is not None:
        (broken / inside).parent.mkdir(exist_ok=True)
        (broken / inside).write_bytes(b"w")
    (tmp_path / "latest_ckpt_global_step.txt").write_text("8")
    assert _step(tmp_path) == 2
    assert "global_step_8/manifest.json is missing" in caplog.text
    assert save(tmp_path, 8, b"again").step == 8
    assert _step(tmp_path) == 8
