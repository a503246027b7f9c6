"""Model and optimizer state on disk: one safetensors file a rank, plus one JSON file. Nothing is pickled.

torch.distributed.checkpoint keeps its index as a pickle, which runs code when whoever can write the file wants it to;
hence a format of our own. It still reshards: every rank writes its local shards with their place in the whole tensor,
and a reader of any world size slices what it needs from the files, one tensor at a time.

    state.json                          world size, versions, counters, results of the last update
    rank_00000_of_00002.safetensors     keys model/<name>, optimizer/<slot>/<name>, rng/<device>; the header's metadata
                                        holds per key the whole tensor's shape and this shard's offset
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_core.data.local_copy import folder_to_read
from skyrl_core.errors import CheckpointError, CorruptCheckpointError

FORMAT = 1
STATE_FILE = "state.json"
_LAYOUT = "layout"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a piece within the whole tensor."""


def rank_file(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.safetensors"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer slots by `<slot>/<parameter name>`; empty before the first optimizer step."""
    return {
        f"{slot}/{name}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def place_of(tensor: torch.Tensor) -> Box:
    """Where this rank's part of `tensor` lies in the whole."""
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(offset), tuple(shape)
    return (0,) * tensor.dim(), tuple(tensor.shape)


def write_rank(
    folder: Path, tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], rank: int, world_size: int
) -> None:
    """Write this rank's file. `tensors` may be sharded (every rank keeps its shard) or whole (rank 0 keeps them);
    `local` belong to this rank alone."""
    parts: dict[str, torch.Tensor] = {}
    layout: dict[str, dict[str, list[int]]] = {}
    for key, tensor in tensors.items():
        offset, shape = place_of(tensor)
        is_sharded = isinstance(tensor, DTensor)
        if (is_sharded or rank == 0) and 0 not in shape:
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts[key] = part.detach().cpu().contiguous()
            layout[key] = {"whole": list(tensor.shape), "offset": list(offset)}
    for key, tensor in local.items():
        parts[key] = tensor.detach().cpu().contiguous()
    path = folder / rank_file(rank, world_size)
    save_file(parts, str(path), metadata={_LAYOUT: json.dumps(layout)})
    sync_to_disk(path)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    path = folder / STATE_FILE
    path.write_text(json.dumps({"format": FORMAT, **state}, indent=1, sort_keys=True) + "\n")
    sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def read_state(folder: Path) -> dict[str, Any]:
    """state.json. Raises CheckpointError when there is none, CorruptCheckpointError when it cannot be read."""
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no saved policy: {STATE_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}; use an older checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("world_size"), int):
        raise CorruptCheckpointError(f"{path} is not a state file of format {FORMAT}; use an older checkpoint")
    return state


class ShardReader:
    """Reads whole tensors or parts of them from the files that a world of `world_size` ranks wrote."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder = folder
        self._world_size = world_size
        self._stack = ExitStack()
        self._files: list[Any] = []
        self._pieces: dict[str, list[tuple[int, Box]]] = {}
        self._whole: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> "ShardReader":
        try:
            for rank in range(self._world_size):
                self._open(rank)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, rank: int) -> None:
        path = self._folder / rank_file(rank, self._world_size)
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt"))
            layout = json.loads(file.metadata()[_LAYOUT])
            for key, place in layout.items():
                shape = tuple(file.get_slice(key).get_shape())
                self._pieces.setdefault(key, []).append((rank, (tuple(place["offset"]), shape)))
                self._whole[key] = tuple(place["whole"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                f"{path} is missing, cut short or altered ({type(error).__name__}: {error}); use an older checkpoint"
            ) from error
        self._files.append(file)

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, without it, sorted."""
        return sorted(key[len(prefix) :] for key in self._whole if key.startswith(prefix))

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises CorruptCheckpointError when it was not saved."""
        if key not in self._whole:
            raise CorruptCheckpointError(f"{self._folder} has no {key}; it was saved from another model")
        return self._whole[key]

    def own(self, key: str, rank: int) -> torch.Tensor | None:
        """A tensor that rank `rank` saved for itself; None when it saved none."""
        file = self._files[rank]
        tensor = file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 - not a dict
        assert tensor is None or isinstance(tensor, torch.Tensor)
        return tensor

    def read_into(self, key: str, target: torch.Tensor) -> None:
        """Copy the part of `key` that this rank's `target` holds (all of it when `target` is not sharded).

        Raises CheckpointError when the shapes differ, CorruptCheckpointError when the files do not cover the part.
        """
        if self.shape(key) != tuple(target.shape):
            raise CheckpointError(
                f"{self._folder}: {key} has shape {self.shape(key)} and the model's has {tuple(target.shape)}; "
                "the checkpoint is of another model"
            )
        offset, shape = place_of(target)
        local = target.to_local() if isinstance(target, DTensor) else target
        filled = 0
        with torch.no_grad():
            for rank, piece in self._pieces[key]:
                overlap = _overlap((offset, shape), piece)
                if overlap is not None:
                    to, source = overlap
                    data = self._read(rank, key, source)
                    local[to] = data.to(device=local.device, dtype=local.dtype)
                    filled += data.numel()
        if filled != local.numel():
            raise CorruptCheckpointError(
                f"{self._folder}: {filled} of {local.numel()} values of {key} are there; use an older checkpoint"
            )

    def _read(self, rank: int, key: str, source: tuple[slice, ...]) -> torch.Tensor:
        file = self._files[rank]
        tensor = file.get_slice(key)[source] if source else file.get_tensor(key)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def dtype(self, key: str) -> torch.dtype:
        rank, (_, shape) = self._pieces[key][0]
        return self._read(rank, key, tuple(slice(0, 1) for _ in shape)).dtype


def _overlap(wanted: Box, piece: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Index into the wanted part and index into the piece of what they share; None when they share nothing."""
    to: list[slice] = []
    source: list[slice] = []
    for wanted_from, wanted_size, piece_from, piece_size in zip(wanted[0], wanted[1], piece[0], piece[1], strict=True):
        start = max(wanted_from, piece_from)
        stop = min(wanted_from + wanted_size, piece_from + piece_size)
        if start >= stop:
            return None
        to.append(slice(start - wanted_from, stop - wanted_from))
        source.append(slice(start - piece_from, stop - piece_from))
    return tuple(to), tuple(source)


def full_buckets(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int, rank: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors on the CPU, gathered one after the other, in buckets of about `bucket_bytes` (a larger tensor has a
    bucket of its own). A collective: every rank must exhaust it; only rank 0's buckets are filled."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if size and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        size += nbytes
        if rank == 0:
            bucket[name] = whole.to("cpu", copy=True).contiguous()
    if size:
        yield bucket


def read_policy_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """Every weight of the policy saved in the checkpoint `directory` (a local folder or an fsspec URL), whole, on the
    CPU, tied weights once.

    Needs no process group. Raises CheckpointError or CorruptCheckpointError.
    """
    address = f"{directory}/policy"
    weights: dict[str, torch.Tensor] = {}
    try:
        with folder_to_read(address) as folder, ShardReader(folder, read_state(folder)["world_size"]) as reader:
            for name in reader.keys("model/"):
                key = f"model/{name}"
                weights[name] = torch.empty(reader.shape(key), dtype=reader.dtype(key))
                reader.read_into(key, weights[name])
    except OSError as error:
        raise CheckpointError(f"{address} cannot be read: {error}") from error
    return weights
