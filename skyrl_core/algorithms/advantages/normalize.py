"""Normalisation of per-token values over a whole batch, in float64."""

import torch
from torch import Tensor

from skyrl_core.algorithms.types import Advantages

WHITEN_EPSILON = 1e-8
"""Added to a variance under its root (SkyRL's value)."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens where `mask` [B, T] is True; 0 elsewhere. [B, T] float64.

    The variance divides by n - 1, as SkyRL's. With fewer than two tokens everything is 0.
    """
    return weighted_whiten(torch.where(mask, values.double(), 0.0), mask.double())


def weighted_whiten(values: Tensor, counts: Tensor) -> Tensor:
    """The same for values that stand for `counts` equal tokens each; a value that stands for none becomes 0."""
    tokens = counts.sum()
    if float(tokens) < 2.0:
        return torch.zeros_like(values, dtype=torch.float64)
    mean = (values * counts).sum() / tokens
    variance = ((values - mean).square() * counts).sum() / (tokens - 1.0)
    return torch.where(counts > 0, (values - mean) * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)


def normalize_batch(result: Advantages, mask: Tensor) -> Advantages:
    """`advantage_batch_normalize`: advantages minus their mean, divided by their standard deviation (dividing by n),
    over the tokens where `mask` [B, T] is True; returns are left alone.

    SkyRL subtracts the mean over masked tokens too, which shifts the result by the share of padding; ours does not.
    """
    tokens = mask.sum().clamp(min=1)
    values = torch.where(mask, result.advantages.double(), 0.0)
    mean = values.sum() / tokens
    centred = torch.where(mask, values - mean, 0.0)
    variance = centred.square().sum() / tokens
    normalized = centred * torch.rsqrt(variance.clamp(min=WHITEN_EPSILON))
    return Advantages(advantages=normalized.to(result.advantages.dtype), returns=result.returns)
