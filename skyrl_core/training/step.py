"""One training step on one minibatch: forward, loss, backward, finite check, clip, optimizer step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from skyrl_core.algorithms.kl import token_kl
from skyrl_core.algorithms.losses.common import bounded_exp
from skyrl_core.algorithms.reductions import token_weights
from skyrl_core.algorithms.registry import get_policy_loss, get_prepare
from skyrl_core.algorithms.types import PolicyLossInputs, zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.data.carriers import IntArray, TrainingBatch
from skyrl_core.errors import NonFiniteLossError, TrainingError
from skyrl_core.training.batching import Microbatch, Minibatch
from skyrl_core.training.distributed import max_over_ranks, sum_over_ranks
from skyrl_core.training.models import token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one optimizer step measured, over all ranks.

    `loss`, `grad_norm` (before clipping) and `losses` (the loss's terms, reduced as it is) describe the minibatch.
    `token_sums` are sums over its `tokens` trained tokens, ratio_min and ratio_max the extremes of the probability
    ratio over them: all of it combines exactly.
    """

    loss: float
    grad_norm: float
    tokens: int
    losses: Mapping[str, float]
    token_sums: Mapping[str, float]
    ratio_min: float
    ratio_max: float


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Microbatch],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    chunk_size: int | None,
    max_grad_norm: float,
    where: str,
) -> StepOutcome:
    """Take one optimizer step on the minibatch that the ranks' `microbatches` make up together. Called by every rank.

    loss = Σ token_loss·w + kl_loss_coef · Σ kl·w - entropy_loss_coef · Σ entropy·w, where w are the tokens' weights
    over the whole minibatch. Microbatches accumulate and ranks add up (see models.shard_model), so the gradient is that
    of the whole minibatch for every cut. Gradients are scaled to `max_grad_norm` when their norm exceeds it (0: never).

    `where` names step and minibatch in messages. Raises NonFiniteLossError before the optimizer step when loss or
    gradient is NaN or infinite, on every rank; the weights are then as before.
    """
    policy_loss = get_policy_loss(algorithm.policy_loss_type)
    sums = _Sums()
    optimizer.zero_grad(set_to_none=True)

    for micro in microbatches:
        # Forward.
        logprobs, entropy = token_logprobs(
            model,
            micro.input_ids,
            micro.attention_mask,
            micro.prompt_width,
            temperature,
            chunk_size,
            with_entropy=True,
            entropy_gradient=algorithm.use_entropy_loss,
        )
        assert entropy is not None
        entropy = zero_masked(entropy, micro.loss_mask)

        # Loss.
        inputs = loss_inputs(micro, logprobs)
        output = policy_loss(inputs, algorithm)
        terms = {"policy_loss": (output.token_loss * micro.weights).sum()}
        loss = terms["policy_loss"]
        if algorithm.use_kl_loss:
            terms["kl_loss"] = (_kl(micro, logprobs, algorithm) * micro.weights).sum()
            loss = loss + algorithm.kl_loss_coef * terms["kl_loss"]
        if algorithm.use_entropy_loss:
            terms["entropy_loss"] = (entropy * micro.weights).sum()
            loss = loss - algorithm.entropy_loss_coef * terms["entropy_loss"]

        # Backward: gradients add up over microbatches, and over ranks as they are reduced.
        loss.backward()
        sums.add_losses(loss, terms)
        sums.add_tokens(micro, inputs, output.token_metrics, entropy, algorithm)

    # Finite check: on values of all ranks, so that all ranks decide alike.
    totals = sums.over_ranks()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    loss_value, grad_norm = totals.losses["loss"], float(norm)
    if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLossError(
            f"{where}: loss {loss_value}, gradient norm {grad_norm}; the optimizer step was not taken. Look at the "
            "step's rewards and log-probabilities, lower the learning rate, or clip harder"
        )

    # Clip, then the optimizer step.
    if max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(
        loss=loss_value,
        grad_norm=grad_norm,
        tokens=totals.tokens,
        losses={name: value for name, value in totals.losses.items() if name != "loss"},
        token_sums=totals.token_sums,
        ratio_min=totals.ratio_min,
        ratio_max=totals.ratio_max,
    )


def plan_minibatch(
    batch: TrainingBatch, rows: IntArray, algorithm: AlgorithmConfig, micro_batch_size: int, seed: int
) -> Minibatch:
    """Decide over the whole minibatch `rows` what its cuts must not change: token weights, and the tokens that the
    policy loss treats apart (drawn with `seed` where it draws). Every rank decides alike, from the whole batch."""
    mask = torch.from_numpy(batch.loss_mask[rows] != 0)
    weights = token_weights(
        mask,
        algorithm.loss_reduction,
        torch.from_numpy(batch.group_ids[rows]),
        algorithm.max_seq_len,
        micro_batch_size,
    )
    prepare = get_prepare(algorithm.policy_loss_type)
    if prepare is None or batch.old_logprobs is None or batch.advantages is None:
        return Minibatch(rows=rows, weights=weights)
    old = torch.from_numpy(batch.old_logprobs[rows])
    inputs = PolicyLossInputs(
        # Equal to the present policy's in a step's first minibatch, and no further forward pass is needed.
        logprobs=old,
        old_logprobs=old,
        advantages=torch.from_numpy(batch.advantages[rows]),
        loss_mask=mask,
        rollout_logprobs=None if batch.rollout_logprobs is None else torch.from_numpy(batch.rollout_logprobs[rows]),
    )
    return Minibatch(rows=rows, weights=weights, selection=prepare(inputs, algorithm, seed))


def loss_inputs(micro: Microbatch, logprobs: torch.Tensor) -> PolicyLossInputs:
    """What the policy loss reads. Raises TrainingError when the batch was not scored."""
    if micro.old_logprobs is None or micro.advantages is None:
        raise TrainingError("the batch has no old_logprobs or advantages: it must be scored before the update")
    return PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=micro.old_logprobs,
        advantages=micro.advantages,
        loss_mask=micro.loss_mask,
        rollout_logprobs=micro.rollout_logprobs,
        selection=micro.selection,
    )


def _kl(micro: Microbatch, logprobs: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor:
    if micro.ref_logprobs is None:
        raise TrainingError(
            "the batch has no ref_logprobs, which trainer.algorithm.use_kl_loss=true needs: score it with the "
            "reference model"
        )
    return token_kl(logprobs, micro.ref_logprobs, micro.loss_mask, algorithm.kl_estimator_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    losses: dict[str, float]
    token_sums: dict[str, float]
    tokens: int
    ratio_min: float
    ratio_max: float


@dataclass(slots=True)
class _Sums:
    """Running sums of one rank. Every rank runs the same microbatches' code, so the names agree between ranks."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    token_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[torch.Tensor] = field(default_factory=list)

    def add_losses(self, loss: torch.Tensor, terms: Mapping[str, torch.Tensor]) -> None:
        for name, value in {"loss": loss, **terms}.items():
            _accumulate(self.losses, name, value)

    def add_tokens(
        self,
        micro: Microbatch,
        inputs: PolicyLossInputs,
        token_metrics: Mapping[str, torch.Tensor],
        entropy: torch.Tensor,
        algorithm: AlgorithmConfig,
    ) -> None:
        mask = micro.loss_mask
        clean = inputs.masked()
        log_ratio = clean.logprobs.detach() - clean.old_logprobs
        ratio = bounded_exp(log_ratio)
        measured = {"entropy": entropy, "ratio": zero_masked(ratio, mask), **token_metrics}
        if micro.ref_logprobs is not None:
            measured["kl"] = _kl(micro, inputs.logprobs.detach(), algorithm)
        _accumulate(self.token_sums, "tokens", mask)
        for name, values in measured.items():
            _accumulate(self.token_sums, name, values)
        # Both extremes as maxima, so that one reduction serves them.
        self.ratios.append(torch.stack([torch.where(mask, sign * ratio, -torch.inf).amax() for sign in (1.0, -1.0)]))

    def over_ranks(self) -> _Totals:
        added = sum_over_ranks(torch.stack([*self.losses.values(), *self.token_sums.values()])).tolist()
        highest, lowest = max_over_ranks(torch.stack(self.ratios).amax(dim=0)).tolist()
        token_sums = dict(zip(self.token_sums, added[len(self.losses) :], strict=True))
        return _Totals(
            losses=dict(zip(self.losses, added[: len(self.losses)], strict=True)),
            tokens=int(token_sums.pop("tokens")),
            token_sums=token_sums,
            ratio_min=-lowest,
            ratio_max=highest,
        )


def _accumulate(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    total = values.detach().sum(dtype=torch.float64)
    sums[name] = sums[name] + total if name in sums else total
