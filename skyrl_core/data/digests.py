"""Canonical JSON and SHA-256 digests: equal content has equal bytes, whichever process wrote it."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

CHUNK_BYTES = 1 << 20
_FLOAT_TAG = "$float"


def to_plain(value: Any, *, where: str = "value") -> Any:
    """`value` as JSON can hold it: mappings become dicts, sequences and arrays lists, NumPy scalars Python numbers.

    Raises TypeError naming the place (`value.a[3]`) when something in it has no plain form: it is never turned into
    its printed form, because two different objects may print alike.
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, np.generic):
        return to_plain(value.item(), where=where)
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist(), where=where)
    if isinstance(value, Mapping):
        return {_plain_key(key, where): to_plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [to_plain(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _plain_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r} ({type(key).__name__}); keys must be text")
    if key == _FLOAT_TAG:
        raise TypeError(f"{where} has the key {_FLOAT_TAG!r}, which is reserved")
    return str(key)


def _tag_floats(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as {"$float": "nan"}, so that every reader parses the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_TAG: repr(value)}
    if isinstance(value, dict):
        return {key: _tag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tag_floats(item) for item in value]
    return value


def _untag_floats(pairs: dict[str, Any]) -> Any:
    if len(pairs) == 1 and isinstance(pairs.get(_FLOAT_TAG), str):
        return float(pairs[_FLOAT_TAG])
    return pairs


def canonical_json(value: Any, *, indent: int | None = None) -> bytes:
    """ASCII JSON with sorted keys; floats in their shortest exact form, NaN and infinities tagged.

    Without `indent` it is compact: the form that digests are taken of. Raises TypeError as `to_plain` does.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    plain = _tag_floats(to_plain(value))
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=separators, indent=indent)
    return text.encode("ascii")


def parse_json(data: bytes) -> Any:
    """What `canonical_json` wrote. Raises ValueError when the bytes are no JSON (a torn file)."""
    return json.loads(data.decode("utf-8"), object_hook=_untag_floats)


def sha256_of_bytes(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 in hex of the value's canonical JSON. Raises TypeError for what JSON cannot hold."""
    return sha256_of_bytes(canonical_json(value))


def sha256_of_stream(stream: BinaryIO) -> tuple[int, str]:
    """(bytes read, SHA-256 in hex) of the rest of a stream, in bounded memory."""
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def sha256_of_file(path: str | Path) -> str:
    """SHA-256 in hex of a local file, in bounded memory."""
    with open(path, "rb") as stream:
        return sha256_of_stream(stream)[1]
