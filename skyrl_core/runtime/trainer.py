"""The training side as stages see it: policy and reference groups behind one picklable handle."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import FloatArray, IntArray, TrainingBatch, UpdateResult
from skyrl_core.runtime.actor_host import start_actor
from skyrl_core.runtime.placement import Placement, Slot
from skyrl_core.runtime.worker_group import WorkerGroup

_WEIGHT_BUCKET_BYTES = 1 << 30
_POLICY_WORKER = "skyrl_core.runtime.actors:PolicyActor"
_REFERENCE_WORKER = "skyrl_core.training.worker:ReferenceWorker"
_incarnations = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What the policy group holds: the version all ranks agree on and the lineage that made it, or None."""

    version: int | None
    lineage: str | None


class Trainer:
    """Policy and reference groups of a run. Every method is a blocking call to all ranks."""

    __slots__ = ("policy", "ref")

    def __init__(self, policy: WorkerGroup, ref: WorkerGroup | None) -> None:
        self.policy = policy
        self.ref = ref

    def status(self, timeout: float | None = None) -> TrainerStatus:
        """Version and lineage the ranks agree on; None for both while an update is half done."""
        states = set(self.policy.call("status", timeout=timeout))
        version, lineage = states.pop() if len(states) == 1 else (None, None)
        return TrainerStatus(version=version, lineage=lineage)

    def with_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with `old_logprobs` and, where there is a reference, `ref_logprobs`."""
        old = join_logprobs(batch, self.policy.call("logprobs", batch))
        ref = join_logprobs(batch, self.ref.call("logprobs", batch)) if self.ref is not None else None
        return replace(batch, old_logprobs=old, ref_logprobs=ref)

    def update(self, batch: TrainingBatch, step: int, lineage: str) -> UpdateResult:
        """Train on the batch; see PolicyWorker.update."""
        result: UpdateResult = self.policy.call("update", batch, step, lineage)[0]
        return result

    def save(self, directory: str, step: int) -> None:
        """Write the policy's full state into `directory`."""
        self.policy.call("save", directory, step)

    def load(self, directory: str, *, optimizer: bool = True) -> None:
        """Restore the policy's full state from `directory`."""
        self.policy.call("load", directory, optimizer=optimizer)

    def export_weights(self) -> list[Any]:
        """Object references of the current weights, in buckets."""
        references: list[Any] = self.policy.call("export_references", _WEIGHT_BUCKET_BYTES)[0]
        return references

    def kill(self) -> None:
        """End every rank at once."""
        self.policy.kill()
        if self.ref is not None:
            self.ref.kill()


def start_trainer(config: SkyRLConfig, placement: Placement, total_steps: int) -> Trainer:
    """Start policy and reference ranks together and wait until their models are loaded.

    `total_steps` is the last step of the run, for learning-rate schedules that depend on it.
    """
    if not needs_reference(config):
        return Trainer(start_policy(config, placement, total_steps), None)
    with ThreadPoolExecutor(2) as pool:
        policy = pool.submit(start_policy, config, placement, total_steps)
        reference = pool.submit(start_reference, config, placement)
        return Trainer(policy.result(), reference.result())


def needs_reference(config: SkyRLConfig) -> bool:
    """The reference model is only loaded when a KL term uses it."""
    return config.trainer.algorithm.use_kl_loss or config.trainer.algorithm.use_kl_in_reward


def start_policy(config: SkyRLConfig, placement: Placement, total_steps: int) -> WorkerGroup:
    """Policy ranks with the start model, at version 0."""
    return _start(
        "policy",
        _POLICY_WORKER,
        config,
        placement.policy,
        placement.device,
        total_steps=total_steps,
    )


def start_reference(config: SkyRLConfig, placement: Placement) -> WorkerGroup:
    """Reference ranks with the reference model."""
    return _start("ref", _REFERENCE_WORKER, config, placement.ref, placement.device)


def _start(role: str, worker: str, config: SkyRLConfig, slots: list[Slot], device: str, **setup: Any) -> WorkerGroup:
    incarnation = next(_incarnations)
    ranks = [
        start_actor(worker, config, rank, len(slots), name=f"{role}-{rank}-{incarnation}", **slot.actor_options(device))
        for rank, slot in enumerate(slots)
    ]
    group = WorkerGroup(role, ranks, incarnation)
    try:
        host, port = WorkerGroup(role, ranks[:1], incarnation).call("rendezvous")[0]
        group.call("setup", host, port, device, **setup)
    except BaseException:
        group.kill()
        raise
    return group


def join_logprobs(batch: TrainingBatch, shares: list[tuple[IntArray, FloatArray]]) -> FloatArray:
    """One [B, T] array from every rank's (row numbers [n], rows [n, T]); rows in nobody's share stay 0."""
    joined = np.zeros(batch.input_ids.shape, dtype=np.float32)
    for rows, values in shares:
        joined[rows] = values
    return joined
