"""Save and load everything a policy needs to go on: weights, optimizer, counters, random state, last update."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from skyrl_core.data.local_copy import folder_to_read, folder_to_write
from skyrl_core.errors import CheckpointError, CorruptCheckpointError
from skyrl_core.training.distributed import RankContext
from skyrl_core.training.models import ModelOptions
from skyrl_core.training.sharded_state import (
    ShardReader,
    model_tensors,
    optimizer_tensors,
    read_state,
    write_rank,
    write_state,
)

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCounters:
    """Where the policy stands: its version (= the last step it was updated on), how many optimizer steps it took, and
    the digest and metrics of its last update (for answering a repeated call)."""

    version: int
    optimizer_steps: int = 0
    last_digest: str | None = None
    last_metrics: Mapping[str, float] | None = None


def save_policy(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: PolicyCounters,
    context: RankContext,
    source: tuple[str, ModelOptions],
) -> None:
    """Write the policy into `folder`, a local folder or an fsspec URL. Called by every rank; `source` is the model's
    path and options.

    Not atomic: the caller writes into a folder aside and publishes it when every rank has returned.
    Raises CheckpointError on every rank when any rank could not write.
    """
    failure: Exception | None = None
    try:
        with folder_to_write(folder) as local:
            tensors = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
            tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()}
            write_rank(local, tensors, _random_state(context.device), context.rank, context.world_size)
            if context.rank == 0:
                _write_huggingface(local / "huggingface", *source)
                state = {
                    "world_size": context.world_size,
                    "version": counters.version,
                    "optimizer_steps": counters.optimizer_steps,
                    "last_digest": counters.last_digest,
                    "last_metrics": None if counters.last_metrics is None else dict(counters.last_metrics),
                }
                write_state(local, state)
    except Exception as error:  # whatever one rank met, the others must learn of it instead of waiting
        failure = error
    _raise_together(failure, folder, "write", context)


def load_policy(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    context: RankContext,
) -> PolicyCounters:
    """Read the policy saved in `folder` into `model` and, unless it is None, `optimizer`. Called by every rank.

    Any world size may read what any other wrote. Random state is restored when the world size is the same; otherwise
    the ranks keep the one they started with. Without an optimizer its slots and step count begin anew.
    Raises CheckpointError or CorruptCheckpointError on every rank when any rank could not read; model and optimizer
    may then be half overwritten.
    """
    failure: Exception | None = None
    counters = PolicyCounters(version=0)
    try:
        with folder_to_read(folder) as local:
            state = read_state(local)
            with ShardReader(local, state["world_size"]) as reader:
                _read_model(reader, local, model)
                if optimizer is not None:
                    _read_optimizer(reader, model, optimizer)
                if state["world_size"] == context.world_size:
                    _restore_random_state(reader, context)
        counters = _counters(state, folder, keep_optimizer=optimizer is not None)
    except Exception as error:  # whatever one rank met, the others must learn of it instead of going on
        failure = error
    _raise_together(failure, folder, "read", context)
    return counters


def _raise_together(failure: Exception | None, folder: str | Path, verb: str, context: RankContext) -> None:
    """Raise on every rank what went wrong on any: a rank's own CheckpointError, else one with the first rank's reason.

    A collective that all ranks reach whether or not they failed, so none is left waiting.
    """
    messages = torch.zeros(context.world_size, _MESSAGE_BYTES, dtype=torch.uint8, device=context.device)
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE_BYTES]
        messages[context.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # Each rank fills its own row, so the sum is all messages.
    dist.all_reduce(messages)
    reasons = {
        rank: bytes(row).rstrip(b"\0").decode(errors="replace")
        for rank, row in enumerate(messages.tolist())
        if any(row)
    }
    if isinstance(failure, CheckpointError):
        raise failure
    if reasons:
        first = next(iter(reasons.values()))
        kind = CorruptCheckpointError if first.startswith(CorruptCheckpointError.__name__) else CheckpointError
        raise kind(f"{folder}: rank(s) {list(reasons)} could not {verb} the policy ({first})") from failure


def _read_model(reader: ShardReader, folder: Path, model: nn.Module) -> None:
    wanted = model_tensors(model)
    unknown = sorted(set(reader.keys("model/")) - set(wanted))
    if unknown:
        raise CheckpointError(
            f"{folder} holds {unknown[0]} and {len(unknown) - 1} more tensors that the model lacks; "
            "it is of another model"
        )
    for name, tensor in wanted.items():
        reader.read_into(f"model/{name}", tensor)


def _read_optimizer(reader: ShardReader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name in reader.keys("optimizer/"):
        slot, _, parameter_name = name.partition("/")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"the checkpoint has optimizer state for {parameter_name}, which the model lacks")
        key = f"optimizer/{name}"
        # A scalar is AdamW's step count, which lives on the CPU; everything else has its parameter's shape and shards.
        value = torch.zeros((), dtype=torch.float32) if reader.shape(key) == () else torch.zeros_like(parameter)
        reader.read_into(key, value)
        optimizer.state[parameter][slot] = value


def _counters(state: dict[str, Any], folder: str | Path, keep_optimizer: bool) -> PolicyCounters:
    try:
        metrics = state["last_metrics"]
        return PolicyCounters(
            version=int(state["version"]),
            optimizer_steps=int(state["optimizer_steps"]) if keep_optimizer else 0,
            last_digest=state["last_digest"],
            last_metrics=None if metrics is None else {str(name): float(value) for name, value in metrics.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{folder}/state.json lacks or garbles {error}; use an older checkpoint"
        ) from error


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(reader: ShardReader, context: RankContext) -> None:
    cpu = reader.own("rng/cpu", context.rank)
    if cpu is not None:
        torch.set_rng_state(cpu)
    cuda = reader.own("rng/cuda", context.rank)
    if cuda is not None and context.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, context.device)


def _write_huggingface(folder: Path, path: str, options: ModelOptions) -> None:
    """Model configuration and tokenizer of the start model, so that weights read from the checkpoint can be used."""
    trust = options.trust_remote_code
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **options.config_overrides)
    config.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(path, trust_remote_code=trust).save_pretrained(folder)
    except (OSError, ValueError) as error:
        logger.warning("%s: the model at %s has no tokenizer to save with it (%s)", folder, path, error)
    try:
        GenerationConfig.from_pretrained(path).save_pretrained(folder)
    except OSError:
        logger.debug("%s has no generation settings to save", path)
