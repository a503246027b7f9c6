"""Reading wandb's log files: LevelDB log records written by hand from the format's description."""

import struct
import zlib
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from skyrl_core.tracking.wandb_files import history_steps, last_recorded_step, log_records

HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32768


def part(kind: int, data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), len(data), kind) + data


def history(step: int) -> bytes:
    record = Record()
    record.history.step.num = step
    return record.SerializeToString()


def write_run(run_dir: Path, folder: str, run_id: str, content: bytes) -> Path:
    path = run_dir / "wandb" / folder / f"run-{run_id}.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_whole_records_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(HEADER + part(1, b"one") + part(1, b"") + part(1, b"three"))
    assert list(log_records(path)) == [b"one", b"", b"three"]


def test_a_record_over_three_blocks_is_joined(tmp_path: Path) -> None:
    data = bytes(range(256)) * 300  # 76,800 bytes: more than two blocks of 32,768
    first = BLOCK - len(HEADER) - 7
    middle = BLOCK - 7
    path = tmp_path / "f"
    path.write_bytes(
        HEADER
        + part(2, data[:first])
        + part(3, data[first : first + middle])
        + part(4, data[first + middle :])
        + part(1, b"next")
    )
    assert list(log_records(path)) == [data, b"next"]


def test_a_block_too_full_for_a_header_ends_in_padding(tmp_path: Path) -> None:
    filling = b"x" * (BLOCK - len(HEADER) - 7 - 5)
    path = tmp_path / "f"
    path.write_bytes(HEADER + part(1, filling) + b"\0" * 5 + part(1, b"next"))
    assert list(log_records(path)) == [filling, b"next"]


@pytest.mark.parametrize("missing", range(1, 12))
def test_a_torn_last_record_is_left_out(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "f"
    path.write_bytes((HEADER + part(1, b"whole") + part(1, b"torn"))[:-missing])
    assert list(log_records(path)) == [b"whole"]


def test_reading_ends_at_an_altered_record(tmp_path: Path) -> None:
    altered = bytearray(part(1, b"altered"))
    altered[-1] ^= 1
    path = tmp_path / "f"
    path.write_bytes(HEADER + part(1, b"whole") + bytes(altered) + part(1, b"after"))
    assert list(log_records(path)) == [b"whole"]


def test_only_history_rows_count_as_steps(tmp_path: Path) -> None:
    other = Record()
    other.exit.exit_code = 1
    path = tmp_path / "f"
    path.write_bytes(HEADER + part(1, history(0)) + part(1, other.SerializeToString()) + part(1, history(3)))
    assert history_steps(path) == [0, 3]


def test_the_newest_step_is_sought_in_all_files_of_the_run_and_no_other(tmp_path: Path) -> None:
    write_run(tmp_path, "offline-run-20260101_000000-a-1", "a-1", HEADER + part(1, history(4)))
    write_run(tmp_path, "run-20260102_000000-a-1", "a-1", HEADER + part(1, history(2)))
    write_run(tmp_path, "offline-run-20260103_000000-a-1", "a-1", HEADER)
    write_run(tmp_path, "offline-run-20260104_000000-a-12", "a-12", HEADER + part(1, history(9)))
    assert last_recorded_step(tmp_path, "a-1") == 4
    assert last_recorded_step(tmp_path, "b-1") == -1


def test_a_file_of_an_unknown_format_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, "offline-run-20260101_000000-a-1", "a-1", HEADER + part(1, b"\xff\xff no protobuf"))
    assert last_recorded_step(tmp_path, "a-1") == -1
    assert "its steps are logged again" in caplog.text
