"""What every policy loss starts and ends with."""

import torch
from torch import Tensor

from skyrl_core.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput, zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with log_ratio clamped to ±20; NaN stays NaN. The gradient beyond the clamp is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def finish(
    inputs: PolicyLossInputs, config: AlgorithmConfig, token_loss: Tensor, **token_metrics: Tensor
) -> PolicyLossOutput:
    """The output of a loss: `token_loss` and `token_metrics`, all [B, T], selected by the loss mask."""
    del config
    metrics = {name: zero_masked(metric.detach(), inputs.loss_mask) for name, metric in token_metrics.items()}
    loss = torch.where(inputs.loss_mask, token_loss, torch.zeros((), dtype=token_loss.dtype, device=token_loss.device))
    return PolicyLossOutput(token_loss=loss, token_metrics=metrics)
