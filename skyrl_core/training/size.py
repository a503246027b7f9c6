"""How large a checkpoint of a model will be, from the headers of its weight files: nothing is loaded."""

import json
import math
import struct
from pathlib import Path

# fp32 weights and AdamW's two moments; the rest is small.
_BYTES_A_PARAMETER = 12


def checkpoint_bytes(model: str | Path) -> int | None:
    """Bytes of one checkpoint's files, all ranks together; None where the model has no readable safetensors here."""
    files = sorted(Path(model).expanduser().glob("*.safetensors"))
    try:
        return sum(_parameters(file) for file in files) * _BYTES_A_PARAMETER if files else None
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _parameters(file: Path) -> int:
    """Elements of all tensors of a safetensors file: 8 bytes of length (little endian), then a JSON header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
