"""Reads back, from wandb's own local files, up to which step a run was durably recorded.

wandb writes in a process of its own and flushes every few seconds; when the run is killed, that process drops what it
had not written yet. So only the files say what survived. Their format is LevelDB's log: 32 KiB blocks of records
`crc32 (4 bytes), length (2), type (1), data`, little-endian, where a record too long for its block comes as a first,
middle and last part; each whole record is one `wandb_internal.Record` protobuf.
"""

import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from skyrl_core.tracking.protocol import NOTHING_LOGGED

logger = logging.getLogger(__name__)

_BLOCK = 32 * 1024
_FILE_HEADER = 7  # b":W&B", two bytes of magic, one of version; counted into the first block
_RECORD_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def last_recorded_step(run_dir: Path, run_id: str) -> int:
    """The highest history step in the files of run `run_id` under `{run_dir}/wandb`; NOTHING_LOGGED when there is none.

    An unreadable file counts as empty, with a warning: its points are logged once more rather than lost.
    """
    newest = NOTHING_LOGGED
    for path in sorted((run_dir / "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb")):
        try:
            newest = max([newest, *history_steps(path)])
        except Exception as error:  # the format belongs to wandb; a change of it must not stop a run
            logger.warning("%s cannot be read (%s: %s): its steps are logged again", path, type(error).__name__, error)
    return newest


def history_steps(path: Path) -> list[int]:
    """The step of every whole history row of a `.wandb` file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for data in log_records(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    return steps


def log_records(path: Path) -> Iterator[bytes]:
    """The whole records of a LevelDB log, one block in memory at a time. Ends at the first torn or altered record."""
    parts: list[bytes] = []
    with path.open("rb") as file:
        block, position = file.read(_BLOCK), _FILE_HEADER
        while block:
            while position + _RECORD_HEADER.size <= len(block):
                checksum, length, kind = _RECORD_HEADER.unpack_from(block, position)
                position += _RECORD_HEADER.size
                data = block[position : position + length]
                position += length
                if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(bytes([kind]) + data) != checksum:
                    return
                parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
                if kind in (_FULL, _LAST):
                    yield b"".join(parts)
            block, position = file.read(_BLOCK), 0
