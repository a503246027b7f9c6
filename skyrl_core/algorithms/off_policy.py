"""Corrections for rollouts that another policy sampled than the trainer's, and how far the two are apart.

The engine's log-probabilities differ from the trainer's before the update by numerics, and by staleness where rollouts
are older. r_t = exp(old_logprobs - rollout_logprobs). Source: the derivations behind SkyRL's keys,
https://fengyao.notion.site/off-policy-rl and verl's notes on rollout correction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_core.algorithms.kl import LOG_RATIO_LIMIT, token_kl
from skyrl_core.algorithms.types import zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_core.config.algorithm_checks import masks_anything
from skyrl_core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class _Ratios:
    """token [B, T], and a number a row [B, 1]: product and geometric mean over the row's trained tokens."""

    token: Tensor
    product: Tensor
    geometric: Tensor

    @classmethod
    def of(cls, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> "_Ratios":
        gap = zero_masked(old_logprobs, loss_mask).detach() - zero_masked(rollout_logprobs, loss_mask).detach()
        total = gap.sum(dim=1, keepdim=True, dtype=torch.float64)
        tokens = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
        return cls(*(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() for x in (gap, total, total / tokens)))


@dataclass(frozen=True, slots=True)
class _Mask:
    """One of the masks: the ratios it looks at, its bounds (None: open), and whether one bad token costs the row."""

    name: str
    ratio: Tensor
    low: float | None
    high: float | None
    whole_row: bool

    def outside(self, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1] or [B, T] bool each: under the lower bound, over the upper one (trained tokens only)."""
        under = torch.zeros_like(loss_mask) if self.low is None else (self.ratio < self.low) & loss_mask
        over = torch.zeros_like(loss_mask) if self.high is None else (self.ratio > self.high) & loss_mask
        if self.whole_row:
            return under.any(dim=1, keepdim=True), over.any(dim=1, keepdim=True)
        return under, over


def corrects_anything(correction: OffPolicyCorrectionConfig) -> bool:
    """Whether a truncated importance weight or one of the masks is switched on."""
    return correction.tis_ratio_type is not None or masks_anything(correction)


def _masks(ratios: _Ratios, correction: OffPolicyCorrectionConfig) -> list[_Mask]:
    masks = []
    if correction.sequence_mask_metric == "product":
        bounds = correction.product_mask_low, correction.product_mask_high
        masks.append(_Mask("product_sequence_mask", ratios.product, *bounds, whole_row=True))
    if correction.sequence_mask_metric == "geometric":
        bounds = correction.geo_mask_low, correction.geo_mask_high
        masks.append(_Mask("geo_sequence_mask", ratios.geometric, *bounds, whole_row=True))
    outlier = correction.outlier_token_is_threshold_low, correction.outlier_token_is_threshold_high
    if outlier != (None, None):
        masks.append(_Mask("outlier_seq", ratios.token, *outlier, whole_row=True))
    token = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
    if token != (None, None):
        masks.append(_Mask("token_mask", ratios.token, *token, whole_row=False))
    return masks


def _truncated(ratios: _Ratios, correction: OffPolicyCorrectionConfig) -> tuple[Tensor, float]:
    """The importance weights [B, T] or [B, 1] before truncation, and their cap."""
    if correction.tis_ratio_type == "token":
        return ratios.token, correction.token_tis_ratio_clip_high
    return ratios.product, correction.sequence_tis_ratio_clip_high


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor | None, loss_mask: Tensor, correction: OffPolicyCorrectionConfig
) -> Tensor | None:
    """What each token's loss is multiplied by: [B, T], or None when no correction is switched on.

    min(r, cap) for `tis_ratio_type` token (r = r_t) or sequence (r = Π_t r_t), 0 for tokens and rows that a mask leaves
    out, and 0 where `loss_mask` [B, T] bool is False. Rows must be whole. No gradient flows through it. Denominators
    of the loss reduction keep counting tokens that are left out, as SkyRL's do.

    Each mask works by itself, and a sequence's ratio is over all its trained tokens. In SkyRL outlier and token masks
    do nothing unless another correction is on, and take their tokens out of the sequence's ratio first.

    Raises ConfigurationError when a correction is on and there are no rollout log-probabilities.
    """
    if not corrects_anything(correction):
        return None
    if rollout_logprobs is None:
        raise ConfigurationError(
            "trainer.algorithm.off_policy_correction needs the engine's log-probabilities, but the rollouts have none: "
            "set generator.sampling_params.logprobs=1"
        )
    ratios = _Ratios.of(old_logprobs, rollout_logprobs, loss_mask)
    weights = torch.ones_like(ratios.token)
    if correction.tis_ratio_type is not None:
        ratio, cap = _truncated(ratios, correction)
        weights = ratio.clamp(max=cap).to(weights.dtype).expand_as(weights)
    keep = loss_mask
    for mask in _masks(ratios, correction):
        under, over = mask.outside(loss_mask)
        keep = keep & ~under & ~over
    return zero_masked(weights, keep)


def correction_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, correction: OffPolicyCorrectionConfig
) -> dict[str, float]:
    """How much the correction changes a batch, under SkyRL's names; empty when none is switched on.

    Shares of tokens are over trained tokens, shares of sequences over rows that have some. Every mask reports
    `{name}_masked_ratio`, `{name}_over_high_ratio` and `{name}_under_low_ratio`.
    """
    rows = loss_mask.any(dim=1, keepdim=True)
    if not corrects_anything(correction) or not bool(rows.any()):
        return {}
    ratios = _Ratios.of(old_logprobs, rollout_logprobs, loss_mask)
    used = ratios.token[loss_mask].double()
    metrics = {
        "is_ratio_mean": float(used.mean()),
        "is_ratio_std": float(used.std(correction=0)),
        "is_ratio_max": float(used.max()),
        "is_ratio_min": float(used.min()),
    }
    if correction.tis_ratio_type is not None:
        ratio, cap = _truncated(ratios, correction)
        name = "tis_token_clip_high_ratio" if correction.tis_ratio_type == "token" else "tis_seq_clip_high_ratio"
        metrics[name] = _share(ratio > cap, loss_mask if correction.tis_ratio_type == "token" else rows)
    for mask in _masks(ratios, correction):
        under, over = mask.outside(loss_mask)
        counted = rows if mask.whole_row else loss_mask
        metrics[f"{mask.name}_masked_ratio"] = _share(under | over, counted)
        metrics[f"{mask.name}_over_high_ratio"] = _share(over, counted)
        metrics[f"{mask.name}_under_low_ratio"] = _share(under, counted)
    return metrics


def _share(what: Tensor, counted: Tensor) -> float:
    return float((what & counted).sum() / counted.sum())


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """How far trainer and engine are apart on the trained tokens of a batch; empty when there are none.

    logprob_diff_mean, logprob_diff_max: of |old - rollout|. prob_diff_mean, prob_diff_max: of |exp old - exp rollout|.
    kl_k1, kl_k3: KL(rollout ‖ old), estimated on tokens that the rollout policy sampled.
    """
    if not bool(loss_mask.any()):
        return {}
    old, rollout = (zero_masked(x.detach(), loss_mask).double() for x in (old_logprobs, rollout_logprobs))
    gap = (old - rollout).abs()[loss_mask]
    prob_gap = (old.exp() - rollout.exp()).abs()[loss_mask]
    return {
        "logprob_diff_mean": float(gap.mean()),
        "logprob_diff_max": float(gap.max()),
        "prob_diff_mean": float(prob_gap.mean()),
        "prob_diff_max": float(prob_gap.max()),
        "kl_k1": float(token_kl(rollout, old, loss_mask, "k1")[loss_mask].mean()),
        "kl_k3": float(token_kl(rollout, old, loss_mask, "k3")[loss_mask].mean()),
    }


def require_no_tis(config: AlgorithmConfig, why: str) -> None:
    """Raise ConfigurationError when a truncated importance weight is switched on where it would count twice."""
    kind = config.off_policy_correction.tis_ratio_type
    if kind is not None:
        raise ConfigurationError(
            f"trainer.algorithm.off_policy_correction.tis_ratio_type={kind} would count the gap between trainer and "
            f"rollout policy twice: {why}. Set it to null"
        )
