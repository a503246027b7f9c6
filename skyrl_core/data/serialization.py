"""Rollouts, training batches and prompts as bytes: equal content gives equal bytes, and nothing is unpickled.

Arrays are stored in an uncompressed npz with fixed time stamps, ragged ones flat with their lengths, integers in the
narrowest type that holds them; text and mappings are canonical JSON inside it.
"""

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from skyrl_core.data.carriers import FloatArray, IntArray, Prompt, Rollout, RolloutBatch, TrainingBatch
from skyrl_core.data.digests import canonical_json, parse_json, to_plain
from skyrl_core.errors import DatasetError, StoreError

FORMAT = 1
_META = "meta.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_RAGGED_INTS = ("prompt_ids", "response_ids", "loss_mask", "policy_versions")
_RAGGED_FLOATS = ("token_rewards", "rollout_logprobs")
_TEXT_FIELDS = (
    "uid",
    "stop_reason",
    "data_source",
    "env_class",
    "env_metrics",
    "error",
    "greedy_reward",
    "sample_index",
    "turns",
)
_BATCH_INTS = ("input_ids", "attention_mask", "loss_mask", "group_ids", "trajectory_ids")

Arrays = dict[str, NDArray[Any]]


def rollouts_to_bytes(batch: RolloutBatch) -> bytes:
    """The batch as deterministic npz bytes. Raises TypeError when floats are not float32 or metrics are not plain."""
    arrays: Arrays = {}
    for name in _RAGGED_INTS:
        _put_ragged(arrays, name, [np.asarray(getattr(row, name), dtype=np.int64) for row in batch.rollouts], np.int64)
    for name in _RAGGED_FLOATS:
        _put_ragged(arrays, name, [getattr(row, name) for row in batch.rollouts], np.float32)
    rows = [{name: getattr(row, name) for name in _TEXT_FIELDS} for row in batch.rollouts]
    return _pack("RolloutBatch", {"step": batch.step, "rollouts": rows}, arrays)


def rollouts_from_bytes(data: bytes) -> RolloutBatch:
    """The inverse of `rollouts_to_bytes`, exact to the bit. Raises StoreError when the bytes are something else."""
    with _reading("RolloutBatch", data):
        meta, arrays = _unpack("RolloutBatch", data)
        rows: list[Mapping[str, Any]] = meta["rollouts"]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in _TEXT_FIELDS}
        for name in _RAGGED_INTS:
            columns[name] = _get_ragged(arrays, name, np.int64)
        for name in _RAGGED_FLOATS:
            columns[name] = _get_ragged(arrays, name, np.float32)
        columns["policy_versions"] = [tuple(int(item) for item in row) for row in columns["policy_versions"]]
        rows_again = zip(*columns.values(), strict=True)
        rollouts = tuple(Rollout(**dict(zip(columns, row, strict=True))) for row in rows_again)
        return RolloutBatch(step=meta["step"], rollouts=rollouts)


def training_batch_to_bytes(batch: TrainingBatch) -> bytes:
    """The batch as deterministic npz bytes; absent arrays stay absent. Raises TypeError when floats are not float32."""
    arrays: Arrays = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, np.ndarray):
            continue
        if field.name in _BATCH_INTS:
            arrays[field.name] = _narrow(value)
        elif field.name == "valid":
            arrays[field.name] = np.ascontiguousarray(value, dtype=np.bool_)
        else:
            arrays[field.name] = _float32(value, field.name)
    return _pack("TrainingBatch", {"step": batch.step, "prompt_width": batch.prompt_width}, arrays)


def training_batch_from_bytes(data: bytes) -> TrainingBatch:
    """The inverse of `training_batch_to_bytes`, exact to the bit. Raises StoreError for any other bytes."""
    with _reading("TrainingBatch", data):
        meta, arrays = _unpack("TrainingBatch", data)
        wide = {name: array.astype(np.int64) if name in _BATCH_INTS else array for name, array in arrays.items()}
        return TrainingBatch(step=meta["step"], prompt_width=meta["prompt_width"], **cast(Any, wide))


def prompts_to_bytes(prompts: Sequence[Prompt]) -> bytes:
    """Prompts as JSON. Raises DatasetError naming the uid and the column that JSON cannot hold.

    NumPy values become Python ones and tuples lists, as a dataset read from JSON would have them.
    """
    rows = [{field.name: _plain_field(prompt, field.name) for field in fields(prompt)} for prompt in prompts]
    return canonical_json({"kind": "Prompts", "format": FORMAT, "prompts": rows})


def prompts_from_bytes(data: bytes) -> list[Prompt]:
    """The inverse of `prompts_to_bytes`. Raises StoreError when the bytes are something else."""
    with _reading("Prompts", data):
        content = parse_json(data)
        _check_kind(content, "Prompts")
        return [Prompt(**{**row, "messages": tuple(row["messages"])}) for row in content["prompts"]]


@contextmanager
def _reading(kind: str, data: bytes) -> Iterator[None]:
    """What the zip, npy and JSON readers raise for bytes that are not theirs becomes one error."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,
        OSError,
        struct.error,
    ) as error:
        raise StoreError(f"these {len(data)} bytes hold no {kind}: {type(error).__name__}: {error}") from error


def _plain_field(prompt: Prompt, name: str) -> Any:
    try:
        return to_plain(getattr(prompt, name), where=name)
    except TypeError as error:
        raise DatasetError(
            f"prompt {prompt.uid}: {error}; keep only text, numbers, lists and mappings in the dataset's columns"
        ) from error


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """The same integers in the narrowest of uint8, int32, int64: chosen by content alone, so bytes stay equal."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in (np.uint8, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.ascontiguousarray(array, dtype=dtype)
    return np.ascontiguousarray(array, dtype=np.int64)


def _float32(array: NDArray[Any], name: str) -> FloatArray:
    if array.dtype != np.float32:
        raise TypeError(f"{name} is {array.dtype}; it must be float32 to be stored exactly")
    return np.ascontiguousarray(array)


def _put_ragged(arrays: Arrays, name: str, rows: Sequence[NDArray[Any] | None], dtype: type) -> None:
    """Flat values and lengths; length -1 stands for None, so absent and empty stay apart."""
    present = [row for row in rows if row is not None]
    if dtype is np.float32:
        present = [_float32(row, name) for row in present]
    flat: NDArray[Any] = np.concatenate(present) if present else np.zeros(0, dtype=dtype)
    arrays[name] = _narrow(flat) if dtype is np.int64 else flat
    arrays[f"{name}.lengths"] = np.asarray([-1 if row is None else len(row) for row in rows], dtype=np.int64)


def _get_ragged(arrays: Arrays, name: str, dtype: type) -> list[NDArray[Any] | None]:
    flat: NDArray[Any] = arrays[name].astype(dtype)
    lengths: IntArray = arrays[f"{name}.lengths"]
    if int(lengths.clip(min=0).sum()) != len(flat):
        raise ValueError(f"{name} has {len(flat)} values, but its lengths add up to another number")
    ends = np.cumsum(lengths.clip(min=0))
    # Copies: rows must not keep each other's memory alive.
    return [None if n < 0 else flat[end - n : end].copy() for n, end in zip(lengths, ends, strict=True)]


def _pack(kind: str, meta: Mapping[str, Any], arrays: Arrays) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _add_member(archive, _META, canonical_json({"kind": kind, "format": FORMAT, **meta}))
        for name in sorted(arrays):
            content = io.BytesIO()
            np.save(content, arrays[name], allow_pickle=False)
            _add_member(archive, f"{name}.npy", content.getvalue())
    return target.getvalue()


def _add_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=_EPOCH)
    info.create_system, info.external_attr = 3, 0o600 << 16
    archive.writestr(info, content)


def _unpack(kind: str, data: bytes) -> tuple[dict[str, Any], Arrays]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        meta: dict[str, Any] = parse_json(archive.read(_META))
        _check_kind(meta, kind)
        arrays = {
            name.removesuffix(".npy"): np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
            if name.endswith(".npy")
        }
    return meta, arrays


def _check_kind(content: Any, kind: str) -> None:
    if not isinstance(content, dict) or content.get("kind") != kind:
        found = content.get("kind") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"found {found!r} instead of {kind}")
    if content.get("format") != FORMAT:
        raise ValueError(f"written in format {content.get('format')!r}; this version reads format {FORMAT}")
