"""Losses with a clipped per-token importance ratio."""

import torch

from skyrl_core.algorithms.losses.common import bounded_exp, finish
from skyrl_core.algorithms.registry import register_policy_loss
from skyrl_core.algorithms.rules import POLICY_LOSSES
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import AlgorithmConfig


@register_policy_loss("regular", POLICY_LOSSES["regular"])
def regular(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with a bound of its own on each side (DAPO's clip-higher).

    loss = -min(r·A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high)·A) with r = exp(logprobs - old_logprobs).
    Metrics: clip_ratio (share of tokens where the clipped term is the smaller), importance_ratio.
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    plain = ratio * inputs.advantages
    clipped = ratio.clamp(1.0 - config.eps_clip_low, 1.0 + config.eps_clip_high) * inputs.advantages
    return finish(inputs, config, -torch.minimum(plain, clipped), clip_ratio=clipped < plain, importance_ratio=ratio)
