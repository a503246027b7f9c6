"""The tensors that estimators and losses take and return. B rows (trajectories or steps), T token columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.errors import RewardError


def _check_tensor(owner: str, name: str, tensor: Tensor, shape: tuple[int, ...], *, boolean: bool) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{owner}.{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if boolean and tensor.dtype != torch.bool:
        raise ValueError(f"{owner}.{name} must be a bool tensor, got {tensor.dtype}")


def zero_masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` [B, T] in at least float32, with exact zeros where `mask` [B, T] is False.

    Selects instead of multiplying, so that NaN or infinity at a masked position reaches neither value nor gradient.
    """
    full = tensor if tensor.dtype == torch.float64 else tensor.float()
    return torch.where(mask, full, torch.zeros((), dtype=full.dtype, device=full.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything an advantage estimator may read, over all rows of one step.

    token_rewards [B, T]: the reward of each token; a row's sum is its total reward, whatever the mask (the reward may
    stand on an observation token). loss_mask [B, T] bool: tokens sampled by the policy and trained on.
    group_ids [B]: rows with the same number answer the same prompt. valid [B] bool: False where the environment failed
    or gave no reward: such rows count in no statistic and get advantage 0; what stands in them is never read.
    values [B, T]: the critic's, for estimators that need them. greedy_rewards [B]: total reward of the prompt's greedy
    completion (remax). trajectory_ids [B]: in step-wise training, where each turn is a row, rows with the same number
    are one trajectory; None otherwise.

    Raises ValueError for wrong shapes or dtypes, RewardError for a reward of a valid row that is not finite.
    """

    token_rewards: Tensor
    loss_mask: Tensor
    group_ids: Tensor
    valid: Tensor
    values: Tensor | None = None
    greedy_rewards: Tensor | None = None
    trajectory_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if self.token_rewards.ndim != 2:
            raise ValueError(f"AdvantageInputs.token_rewards must be [B, T], got {tuple(self.token_rewards.shape)}")
        shape = tuple(self.token_rewards.shape)
        for item in fields(self):
            tensor = getattr(self, item.name)
            if tensor is not None:
                expected = shape if item.name in ("token_rewards", "loss_mask", "values") else shape[:1]
                boolean = item.name in ("loss_mask", "valid")
                _check_tensor("AdvantageInputs", item.name, tensor, expected, boolean=boolean)
        self._check_finite("reward", torch.isfinite(self.token_rewards).all(dim=1))
        if self.greedy_rewards is not None:
            self._check_finite("greedy reward", torch.isfinite(self.greedy_rewards))

    def _check_finite(self, what: str, finite: Tensor) -> None:
        broken = (self.valid & ~finite).nonzero()
        if len(broken):
            row = int(broken[0])
            raise RewardError(
                f"the {what} of row {row} (prompt group {int(self.group_ids[row])}) is not a finite number; "
                "an environment that cannot score must return no reward instead"
            )

    def scores(self) -> Tensor:
        """[B] float64: each row's total reward, 0 for rows that are not valid."""
        clean = torch.where(self.valid[:, None], self.token_rewards.double(), 0.0)
        return clean.sum(dim=1)

    def on_tokens(self, row_values: Tensor) -> Tensor:
        """`row_values` [B] on every trained token of valid rows, 0 elsewhere: [B, T] in the rewards' dtype."""
        where = self.loss_mask & self.valid[:, None]
        dtype = self.token_rewards.dtype
        return torch.where(where, row_values.to(dtype)[:, None], torch.zeros((), dtype=dtype, device=where.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """advantages [B, T] and returns [B, T] (what a critic should learn), both 0 outside the loss mask."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """Log-probabilities of the sampled tokens and their advantages, over any set of whole rows.

    logprobs [B, T]: trainer, now, with gradient. old_logprobs [B, T]: trainer, before the update. advantages [B, T].
    loss_mask [B, T] bool. rollout_logprobs [B, T] or None: the engine's while sampling. selection [B, T] bool or None:
    what the loss's `prepare` chose over the whole minibatch, cut to these rows (only some losses have one).

    Raises ValueError for wrong shapes or dtypes.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor | None = None
    selection: Tensor | None = None

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 2:
            raise ValueError(f"PolicyLossInputs.logprobs must be [B, T], got {tuple(self.logprobs.shape)}")
        shape = tuple(self.logprobs.shape)
        for item in fields(self):
            tensor = getattr(self, item.name)
            if tensor is not None:
                boolean = item.name in ("loss_mask", "selection")
                _check_tensor("PolicyLossInputs", item.name, tensor, shape, boolean=boolean)

    def masked(self) -> "PolicyLossInputs":
        """The same with zeros at masked positions, so that nothing computed from it can be tainted by them."""
        rollout = self.rollout_logprobs
        return replace(
            self,
            logprobs=zero_masked(self.logprobs, self.loss_mask),
            old_logprobs=zero_masked(self.old_logprobs, self.loss_mask).detach(),
            advantages=zero_masked(self.advantages, self.loss_mask).detach(),
            rollout_logprobs=None if rollout is None else zero_masked(rollout, self.loss_mask).detach(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutput:
    """token_loss [B, T], not reduced, exactly 0 at masked positions; token_metrics: detached [B, T] tensors, 0 there
    too, whose mean over the trained tokens is the metric."""

    token_loss: Tensor
    token_metrics: Mapping[str, Tensor] = field(default_factory=dict)


AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
PolicyLoss = Callable[[PolicyLossInputs, AlgorithmConfig], PolicyLossOutput]
PrepareSelection = Callable[[PolicyLossInputs, AlgorithmConfig, int], Tensor]
