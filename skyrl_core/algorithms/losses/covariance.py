"""Clip-Cov and KL-Cov (arXiv:2505.22617): hold back the tokens that drive the policy's entropy down.

Both look at a token's covariance over a minibatch, Cov_t = (log π_t - mean log π)·(A_t - mean A), and treat a small
share of its tokens apart. Which tokens is chosen once, over the whole minibatch, before its first microbatch
(`prepare`), so that microbatches and ranks cannot change it. For log π the caller passes what it has: with
`old_logprobs` for `logprobs` no additional forward pass is needed, and for a step's first minibatch they are equal
(SkyRL chooses in every microbatch, with the log-probabilities of its forward pass).
"""

import torch
from torch import Tensor

from skyrl_core.algorithms.losses.common import bounded_exp, finish
from skyrl_core.algorithms.registry import register_policy_loss
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import POLICY_LOSSES
from skyrl_core.errors import TrainingError


def _covariance(inputs: PolicyLossInputs) -> Tensor:
    """[B, T] float64; meaningful where the loss mask is True."""
    tokens = inputs.loss_mask.sum().clamp(min=1)
    logprobs, advantages = inputs.logprobs.detach().double(), inputs.advantages.double()
    return (logprobs - logprobs.sum() / tokens) * (advantages - advantages.sum() / tokens)


def _how_many(share: float, tokens: int) -> int:
    """`share` of the tokens, rounded down, at least one (as the reference code) unless the share is 0."""
    return max(1, int(share * tokens)) if share > 0 else 0


def _select(positions: Tensor, like: Tensor) -> Tensor:
    selection = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    selection[positions] = True
    return selection.view_as(like)


def _selection(inputs: PolicyLossInputs, loss: str) -> Tensor:
    if inputs.selection is None:
        raise TrainingError(f"policy_loss_type={loss} was called without the selection that its prepare step makes")
    return inputs.selection & inputs.loss_mask


def _clipped_away(inputs: PolicyLossInputs, config: AlgorithmConfig) -> Tensor:
    """Where PPO's clip changes the loss."""
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    bounded = ratio.clamp(1.0 - config.eps_clip_low, 1.0 + config.eps_clip_high)
    return bounded * inputs.advantages < ratio * inputs.advantages


def prepare_clip_cov(inputs: PolicyLossInputs, config: AlgorithmConfig, seed: int) -> Tensor:
    """The tokens that Clip-Cov detaches: [B, T] bool, over a whole minibatch.

    max(1, ⌊clip_cov.clip_ratio · N⌋) of N trained tokens, drawn at random (`seed`) among those with
    clip_cov_lb < Cov < clip_cov_ub that PPO's clip has not stopped already.
    """
    inputs = inputs.masked()
    covariance = _covariance(inputs)
    inside = (covariance > config.clip_cov.clip_cov_lb) & (covariance < config.clip_cov.clip_cov_ub)
    candidates = (inside & inputs.loss_mask & ~_clipped_away(inputs, config)).flatten().nonzero()[:, 0]
    wanted = _how_many(config.clip_cov.clip_ratio, int(inputs.loss_mask.sum()))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed % 2**63))
    return _select(candidates[order[:wanted].to(candidates.device)], inputs.loss_mask)


def prepare_kl_cov(inputs: PolicyLossInputs, config: AlgorithmConfig, seed: int) -> Tensor:
    """The tokens that KL-Cov penalises: [B, T] bool, over a whole minibatch.

    The max(1, ⌊kl_cov.kl_cov_frac · N⌋) of N trained tokens with the largest Cov; among equals the earlier ones.
    """
    inputs = inputs.masked()
    covariance = torch.where(inputs.loss_mask, _covariance(inputs), -torch.inf).flatten()
    tokens = int(inputs.loss_mask.sum())
    wanted = min(tokens, _how_many(config.kl_cov.kl_cov_frac, tokens))
    order = torch.sort(covariance, descending=True, stable=True).indices
    return _select(order[:wanted], inputs.loss_mask)


@register_policy_loss("clip_cov", POLICY_LOSSES["clip_cov"], prepare=prepare_clip_cov)
def clip_cov(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """Clip-Cov (arXiv:2505.22617): the clipped surrogate, 0 for the selected tokens.

    clip_ratio is the share of tokens that the selection stopped. Raises TrainingError without a selection.
    """
    inputs = inputs.masked()
    selected = _selection(inputs, "clip_cov")
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    bounded = ratio.clamp(1.0 - config.eps_clip_low, 1.0 + config.eps_clip_high)
    loss = -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    return finish(inputs, config, torch.where(selected, 0.0, loss), clip_ratio=selected, importance_ratio=ratio)


@register_policy_loss("kl_cov", POLICY_LOSSES["kl_cov"], prepare=prepare_kl_cov)
def kl_cov(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """KL-Cov (arXiv:2505.22617): -r·A, plus kl_cov.ppo_kl_coef·|log r| for the selected tokens. No clipping.

    |log r| stands for the KL to the policy before the update, as in the authors' code. kl_cov_ratio is the share of
    selected tokens. Raises TrainingError without a selection.
    """
    inputs = inputs.masked()
    selected = _selection(inputs, "kl_cov")
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = bounded_exp(log_ratio)
    penalty = torch.where(selected, config.kl_cov.ppo_kl_coef * log_ratio.abs(), 0.0)
    loss = -ratio * inputs.advantages + penalty
    return finish(inputs, config, loss, kl_cov_ratio=selected, importance_ratio=ratio)
