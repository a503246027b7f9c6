"""The critic's loss."""

import torch
from torch import Tensor

from skyrl_core.algorithms.types import PolicyLossOutput, zero_masked


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, value_clip: float | None
) -> PolicyLossOutput:
    """PPO's value loss with clipping, per token: ½·max((V - R)², (V_old + clip(V - V_old, ±value_clip) - R)²), [B, T].

    Not reduced, 0 where `loss_mask` [B, T] bool is False; None for `value_clip` leaves the second term out. SkyRL
    averages it by row, then over rows: token_weights(..., "sequence_mean", ...). Metrics: value_clip_ratio, the share
    of tokens where the clipped term is the larger; value_error, (V - R)²; value_mean; return_mean. Source: the
    implementation notes of arXiv:2005.12729 on arXiv:1707.06347.
    """
    values = zero_masked(values, loss_mask)
    old_values, returns = zero_masked(old_values, loss_mask).detach(), zero_masked(returns, loss_mask).detach()
    error = (values - returns).square()
    loss, clipped = error, torch.zeros_like(loss_mask)
    if value_clip is not None:
        bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
        bounded_error = (bounded - returns).square()
        loss, clipped = torch.maximum(error, bounded_error), bounded_error > error
    metrics = {"value_clip_ratio": clipped, "value_error": error, "value_mean": values, "return_mean": returns}
    return PolicyLossOutput(
        token_loss=0.5 * loss,
        token_metrics={name: zero_masked(metric.detach(), loss_mask) for name, metric in metrics.items()},
    )
