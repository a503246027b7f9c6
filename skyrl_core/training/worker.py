"""One training rank: holds its share of a model and answers the trainer's calls. Plain classes; Ray wraps them.

Every method that computes is a collective: all ranks of a group must be called with the same arguments.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch.distributed import TCPStore
from transformers import PreTrainedModel

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import FloatArray, IntArray, TrainingBatch, UpdateResult
from skyrl_core.data.seeds import derive_seed
from skyrl_core.errors import ConfigurationError, StateMismatchError, TrainingError
from skyrl_core.testing import faults
from skyrl_core.training import distributed
from skyrl_core.training.batching import Microbatch, make_microbatch, share_rows, split_minibatches, trained_rows
from skyrl_core.training.metrics import summarise
from skyrl_core.training.models import ModelOptions, load_sharded_model, token_logprobs
from skyrl_core.training.offload import move_model, move_optimizer
from skyrl_core.training.optimizer import LearningRate, make_learning_rate, make_optimizer
from skyrl_core.training.policy_checkpoint import PolicyCounters, load_policy, save_policy
from skyrl_core.training.sharded_state import full_buckets, model_tensors
from skyrl_core.training.step import plan_minibatch, train_step


class ModelWorker(ABC):
    """What every rank does, whatever its model: join the others, load the model, compute log-probabilities."""

    def __init__(self, config: SkyRLConfig, rank: int, world_size: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._store: TCPStore | None = None
        self._context: distributed.RankContext | None = None
        self._model: PreTrainedModel | None = None
        self._source: tuple[str, ModelOptions] | None = None

    @property
    @abstractmethod
    def nodes(self) -> int:
        """How many nodes the group spans."""

    @abstractmethod
    def model_source(self) -> tuple[str | None, ModelOptions]:
        """The path that the configuration gives the model, and how to load it."""

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0: open the group's meeting point; the host and port that every rank's setup() needs."""
        host = distributed.own_address(single_node=self.nodes == 1)
        if self._store is None:
            self._store = distributed.open_rendezvous(host, self.world_size)
        return host, self._store.port

    def setup(
        self,
        master_addr: str,
        master_port: int,
        device: distributed.DeviceKind,
        model_path: str | None = None,
    ) -> None:
        """Join the group and load the model: the configured one, or that at `model_path`.

        Raises ConfigurationError when there is no such model or device.
        """
        distributed.make_deterministic(self.config.trainer.seed, self.rank, device)
        configured, options = self.model_source()
        path = model_path or configured
        if path is None:
            raise ConfigurationError(f"{options.key} is not set")
        self._source = (path, options)
        self._context = distributed.init_process_group(
            self.rank, self.world_size, master_addr, master_port, device, store=self._store
        )
        self._model = load_sharded_model(path, options, self._context.mesh, self._context.device)

    def logprobs(self, batch: TrainingBatch) -> tuple[IntArray, FloatArray]:
        """Log-probabilities of this rank's share of the batch's trained tokens, under the model as it is now.

        Returns row numbers [n] and log-probabilities [n, T] float32, 0 outside the loss mask. The ranks' shares cover
        every row once; rows without a trained token cost no forward pass and are rank 0's.
        """
        trainer, model, context = self.config.trainer, self.model, self.context
        rows = trained_rows(batch, np.arange(batch.size, dtype=np.int64))
        parts = self.share(batch, rows, trainer.micro_forward_batch_size_per_gpu)
        untrained = np.setdiff1d(np.arange(batch.size, dtype=np.int64), rows)
        mine = np.concatenate([*parts, untrained if self.rank == 0 else untrained[:0]])
        result = np.zeros((len(mine), batch.input_ids.shape[1]), dtype=np.float32)
        done = 0
        with torch.no_grad():
            for part in parts:
                micro = make_microbatch(batch, part, int(rows[-1]), context.device)
                values, _ = token_logprobs(
                    model, micro.input_ids, micro.attention_mask, micro.prompt_width, self.temperature, self.chunk_size
                )
                values = torch.where(micro.loss_mask, values, 0.0)[: len(part)]
                columns = slice(micro.first_column, micro.first_column + values.shape[1])
                result[done : done + len(part), columns] = values.cpu().numpy()
                done += len(part)
        return mine, result

    def share(self, batch: TrainingBatch, rows: IntArray, size: int) -> list[IntArray]:
        """This rank's microbatches of `rows`; see share_rows."""
        max_tokens = self.config.trainer.max_tokens_per_microbatch
        return share_rows(batch, rows, self.rank, self.world_size, size, max_tokens)

    def health(self) -> dict[str, str | int]:
        """Who answers: rank, process id and device. Answers while nothing else runs; raises nothing."""
        device = "none" if self._context is None else str(self._context.device)
        return {"rank": self.rank, "world_size": self.world_size, "pid": os.getpid(), "device": device}

    def offload(self) -> None:
        """Colocated on CUDA: move the model to host memory and give the device's memory back. Nothing on the CPU."""
        move_model(self.model, self.context.device, to_device=False)

    def backload(self) -> None:
        """Undo offload()."""
        move_model(self.model, self.context.device, to_device=True)

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            raise StateMismatchError(f"training rank {self.rank} has no model yet: setup() was not called")
        return self._model

    @property
    def context(self) -> distributed.RankContext:
        if self._context is None:
            raise StateMismatchError(f"training rank {self.rank} has not joined its group yet: setup() was not called")
        return self._context

    @property
    def temperature(self) -> float:
        """Divides the logits, as the engines do while sampling."""
        temperature = self.config.trainer.algorithm.temperature
        if temperature is None:
            raise ConfigurationError(
                "trainer.algorithm.temperature is null and generator.sampling_params.temperature is 0, which only "
                "greedy decoding can use; set trainer.algorithm.temperature to the temperature of training samples"
            )
        return temperature

    @property
    def chunk_size(self) -> int | None:
        return self.config.trainer.logprobs_chunk_size


class ReferenceWorker(ModelWorker):
    """A rank of the frozen model that KL is measured against."""

    @property
    def nodes(self) -> int:
        return self.config.trainer.placement.ref_num_nodes

    def model_source(self) -> tuple[str | None, ModelOptions]:
        trainer = self.config.trainer
        options = ModelOptions(
            key="trainer.ref.model.path",
            trainable=False,
            bf16=trainer.bf16,
            flash_attention=trainer.flash_attn,
            trust_remote_code=trainer.trust_remote_code,
            reshard_after_forward=trainer.ref.fsdp_config.reshard_after_forward,
            config_overrides=trainer.ref.model_config_kwargs,
        )
        return trainer.ref.model.path or trainer.policy.model.path, options


class PolicyWorker(ModelWorker):
    """A rank of the model that learns.

    `version()` is the step of the last update, 0 for the start model, None while the weights are no version at all: an
    update has begun and not ended, or failed. A half-done update is therefore never taken for a finished or an absent
    one; load() gives the worker a version again.
    """

    def __init__(self, config: SkyRLConfig, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self._counters: PolicyCounters | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._learning_rate: LearningRate | None = None

    @property
    def nodes(self) -> int:
        return self.config.trainer.placement.policy_num_nodes

    def model_source(self) -> tuple[str | None, ModelOptions]:
        trainer = self.config.trainer
        options = ModelOptions(
            key="trainer.policy.model.path",
            trainable=True,
            bf16=trainer.bf16,
            flash_attention=trainer.flash_attn,
            gradient_checkpointing=trainer.gradient_checkpointing,
            use_reentrant=trainer.gradient_checkpointing_use_reentrant,
            trust_remote_code=trainer.trust_remote_code,
            reshard_after_forward=trainer.policy.fsdp_config.reshard_after_forward,
            config_overrides=trainer.policy.model_config_kwargs,
        )
        return trainer.policy.model.path, options

    def setup(
        self,
        master_addr: str,
        master_port: int,
        device: distributed.DeviceKind,
        model_path: str | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Join the group, load the start model and make the optimizer; the version is 0 then.

        `total_steps` is the number of training steps of the whole run, for schedules that depend on it.
        """
        trainer = self.config.trainer
        per_step = trainer.update_epochs_per_batch * math.ceil(
            trainer.train_batch_size / trainer.policy_mini_batch_size
        )
        optimizer_config = trainer.policy.optimizer_config
        self._learning_rate = make_learning_rate(
            optimizer_config,
            None if total_steps is None else total_steps * per_step,
            "trainer.policy.optimizer_config",
        )
        super().setup(master_addr, master_port, device, model_path)
        self._optimizer = make_optimizer(self.model, optimizer_config)
        self._counters = PolicyCounters(version=0)

    def version(self) -> int | None:
        """The version of the weights; None when they are none (before setup, in or after a broken update)."""
        return None if self._counters is None else self._counters.version

    def status(self) -> tuple[int | None, str | None]:
        """The version and the digest of the update that made it (None for the start model)."""
        return (None, None) if self._counters is None else (self._counters.version, self._counters.last_digest)

    def update(self, batch: TrainingBatch, step: int, digest: str) -> UpdateResult:
        """Learn from the scored batch of step `step`: from version step - 1 to version step. Called by every rank.

        `digest` names the batch. A repeated call for the update that made the present version returns its result again.
        Raises StateMismatchError when the worker has another version; NonFiniteLossError and whatever else goes wrong
        leave it without a version.
        """
        counters = self._counters
        if counters is not None and counters.version == step and counters.last_digest == digest:
            return UpdateResult(step=step, policy_version=step, metrics=counters.last_metrics or {})
        if counters is None or counters.version != step - 1:
            raise StateMismatchError(
                f"update of step {step} needs policy version {step - 1}, and rank {self.rank} has {self.version()}; "
                "restore a checkpoint and replay up to there"
            )
        if batch.step != step:
            raise TrainingError(f"update of step {step} was given the batch of step {batch.step}")
        self._counters = None
        metrics, optimizer_steps = self._take_steps(batch, step, counters.optimizer_steps)
        self._counters = PolicyCounters(
            version=step, optimizer_steps=optimizer_steps, last_digest=digest, last_metrics=metrics
        )
        return UpdateResult(step=step, policy_version=step, metrics=metrics)

    def _take_steps(self, batch: TrainingBatch, step: int, optimizer_steps: int) -> tuple[dict[str, float], int]:
        """All optimizer steps of an update: every minibatch, `update_epochs_per_batch` times over."""
        trainer = self.config.trainer
        minibatches = split_minibatches(batch.group_ids, trainer.policy_mini_batch_size)
        outcomes, rates, empty = [], [], 0
        for epoch in range(trainer.update_epochs_per_batch):
            for number, rows in enumerate(minibatches):
                if not len(trained_rows(batch, rows)):
                    empty += 1
                    continue
                rates.append(self.learning_rate.apply(self.optimizer, optimizer_steps))
                outcome = train_step(
                    self.model,
                    self.optimizer,
                    self._microbatches(batch, rows, step, epoch, number),
                    trainer.algorithm,
                    temperature=self.temperature,
                    chunk_size=self.chunk_size,
                    max_grad_norm=trainer.policy.optimizer_config.max_grad_norm,
                    where=f"step {step}, pass {epoch + 1}, minibatch {number + 1} of {len(minibatches)}",
                )
                outcomes.append(outcome)
                optimizer_steps += 1
                faults.point("update.between_minibatches", step=step, minibatch=number, rank=self.rank)
        return summarise(outcomes, rates, empty), optimizer_steps

    def _microbatches(self, batch: TrainingBatch, rows: IntArray, *place: int) -> list[Microbatch]:
        """This rank's microbatches of the minibatch `rows`; `place` (step, pass, minibatch) seeds what is drawn."""
        trainer = self.config.trainer
        size = trainer.micro_train_batch_size_per_gpu
        seed = derive_seed(trainer.seed, "update", *place)
        minibatch = plan_minibatch(batch, rows, trainer.algorithm, size, seed)
        trained = trained_rows(batch, rows)
        parts = self.share(batch, trained, size)
        return [make_microbatch(batch, part, int(trained[-1]), self.context.device, minibatch) for part in parts]

    def save(self, directory: str, step: int) -> None:
        """Write everything the policy needs to go on into `directory`/policy. Called by every rank.

        Raises StateMismatchError when the worker's version is not `step`, CheckpointError on every rank when any rank
        could not write. The caller publishes the folder after every rank has returned.
        """
        if self._counters is None or self._counters.version != step or self._source is None:
            raise StateMismatchError(
                f"a checkpoint of step {step} needs policy version {step}, and rank {self.rank} has {self.version()}"
            )
        save_policy(f"{directory}/policy", self.model, self.optimizer, self._counters, self.context, self._source)

    def load(self, directory: str, *, optimizer: bool = True) -> None:
        """Go back to what save() wrote into `directory`, whatever the world size then was. Called by every rank.

        Without `optimizer` the weights and the version are taken and the optimizer begins anew.
        Raises CheckpointError or CorruptCheckpointError; the worker has no version then.
        """
        self._counters = None
        self.optimizer.state.clear()
        self._counters = load_policy(
            f"{directory}/policy", self.model, self.optimizer if optimizer else None, self.context
        )

    def export_weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """All weights, whole, on the CPU, under Hugging Face's names, tied ones once, in buckets of about
        `bucket_bytes`. Every rank must exhaust the iterator; rank 0 gets the tensors, the others empty buckets."""
        return full_buckets(model_tensors(self.model), bucket_bytes, self.rank)

    def offload(self) -> None:
        super().offload()
        move_optimizer(self.optimizer, self.context.device, to_device=False)

    def backload(self) -> None:
        super().backload()
        move_optimizer(self.optimizer, self.context.device, to_device=True)

    def health(self) -> dict[str, str | int]:
        version = self.version()
        return {**super().health(), "version": "none" if version is None else version}

    @property
    def optimizer(self) -> torch.optim.AdamW:
        if self._optimizer is None:
            raise StateMismatchError(f"training rank {self.rank} has no optimizer yet: setup() was not called")
        return self._optimizer

    @property
    def learning_rate(self) -> LearningRate:
        if self._learning_rate is None:
            raise StateMismatchError(f"training rank {self.rank} has no schedule yet: setup() was not called")
        return self._learning_rate
