"""Every policy loss and its gradient against plain Python loops in double precision, written from the formulas, on
random ragged batches; and in single precision against double."""

import math

import pytest
import torch

from skyrl_core.algorithms.registry import get_policy_loss, get_prepare, list_policy_losses
from skyrl_core.algorithms.types import PolicyLossInputs
from skyrl_core.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DPPOConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl_core.config.algorithm_rules import POLICY_LOSSES

Token = tuple[float, float]
"""Loss of a token, and its derivative by the token's log-probability."""

VARIANTS: dict[str, AlgorithmConfig] = {
    **{name: AlgorithmConfig(policy_loss_type=name) for name in POLICY_LOSSES},
    "regular, clip higher": AlgorithmConfig(policy_loss_type="regular", eps_clip_low=0.1, eps_clip_high=0.5),
    "dual_clip, tight": AlgorithmConfig(policy_loss_type="dual_clip", clip_ratio_c=1.1),
    "cispo, bounded": AlgorithmConfig(
        policy_loss_type="cispo", cispo=CISPOConfig(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.3)
    ),
    "cispo, rollout": AlgorithmConfig(policy_loss_type="cispo", cispo=CISPOConfig(cispo_anchor="rollout")),
    "sapo, sharp": AlgorithmConfig(policy_loss_type="sapo", sapo=SAPOConfig(tau_pos=3.0, tau_neg=5.0)),
    "dppo, kl": AlgorithmConfig(
        policy_loss_type="dppo", dppo=DPPOConfig(dppo_type="binary_kl", delta_low=0.01, delta_high=0.02)
    ),
    "dppo, tight": AlgorithmConfig(policy_loss_type="dppo", dppo=DPPOConfig(delta_low=0.02, delta_high=0.05)),
    "kl_cov, most": AlgorithmConfig(policy_loss_type="kl_cov", kl_cov=KLCovConfig(kl_cov_frac=0.6, ppo_kl_coef=0.3)),
    "clip_cov, many": AlgorithmConfig(
        policy_loss_type="clip_cov", clip_cov=ClipCovConfig(clip_ratio=0.4, clip_cov_lb=0.1, clip_cov_ub=9.0)
    ),
}


def random_inputs(seed: int, dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
    """Ragged rows with gaps, some fully masked; NaN and infinity wherever masked; ratios from about e^-2 to e^2."""
    generator = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(1, high, (), generator=generator)) for high in (7, 9))
    mask = torch.rand(count, width, generator=generator) < 0.7
    mask[torch.rand(count, generator=generator) < 0.15] = False

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, width, generator=generator, dtype=torch.float64)

    old = -noise(1.5).abs()
    now = (old + noise(0.7)).clamp(max=-1e-3)
    rollout = (old + noise(0.2)).clamp(max=-1e-3)
    advantages = torch.where(torch.rand(count, width, generator=generator) < 0.1, 0.0, noise(1.0))
    poison = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(0, 3, (count, width), generator=generator)]
    now, old, rollout, advantages = (
        torch.where(mask, x, poison.double()).to(dtype) for x in (now, old, rollout, advantages)
    )
    return PolicyLossInputs(
        logprobs=now.requires_grad_(),
        old_logprobs=old,
        advantages=advantages,
        loss_mask=mask,
        rollout_logprobs=rollout,
    )


def with_selection(inputs: PolicyLossInputs, config: AlgorithmConfig, seed: int = 3) -> PolicyLossInputs:
    prepare = get_prepare(config.policy_loss_type)
    if prepare is None:
        return inputs
    return PolicyLossInputs(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        rollout_logprobs=inputs.rollout_logprobs,
        selection=prepare(inputs, config, seed),
    )


# ---- The reference.


def clipped(ratio: float, gain: float, slope: float, config: AlgorithmConfig) -> Token:
    """-min(r·A, clip(r)·A); `slope` is dr / dlogπ."""
    bound = min(max(ratio, 1 - config.eps_clip_low), 1 + config.eps_clip_high)
    if bound * gain < ratio * gain:
        return -bound * gain, 0.0
    return -ratio * gain, -slope * gain


def token_reference(
    now: float, old: float, rollout: float, gain: float, selected: bool, config: AlgorithmConfig
) -> Token:
    """One token's loss, for the losses that look at one token at a time."""
    name = config.policy_loss_type
    ratio = math.exp(now - old)
    if name in ("regular", "bnpo"):
        return clipped(ratio, gain, ratio, config)
    if name == "dual_clip":
        loss, slope = clipped(ratio, gain, ratio, config)
        limit = -config.clip_ratio_c * gain
        return (limit, 0.0) if gain < 0 and loss > limit else (loss, slope)
    if name == "sapo":
        tau = config.sapo.tau_pos if gain > 0 else config.sapo.tau_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * gain, -4 * gate * (1 - gate) * ratio * gain
    if name == "cispo":
        ratio = math.exp(now - rollout) if config.cispo.cispo_anchor == "rollout" else ratio
        weight = min(max(ratio, 1 - config.cispo.cispo_eps_clip_low), 1 + config.cispo.cispo_eps_clip_high)
        return -weight * gain * now, -weight * gain
    if name == "rollout_is":
        ratio = math.exp(now - rollout)
        weight = ratio if 1 - config.eps_clip_low < ratio < 1 + config.eps_clip_high else 0.0
        return -weight * gain * now, -weight * gain
    if name == "importance_sampling":
        return -ratio * gain, -ratio * gain
    if name == "cross_entropy":
        return -now, -1.0
    if name == "dppo":
        return dppo_reference(now, rollout, gain, config)
    if name == "clip_cov":
        return (0.0, 0.0) if selected else clipped(ratio, gain, ratio, config)
    assert name == "kl_cov"
    coefficient = config.kl_cov.ppo_kl_coef if selected else 0.0
    sign = (now > old) - (now < old)
    return -ratio * gain + coefficient * abs(now - old), -ratio * gain + coefficient * sign


def dppo_reference(now: float, rollout: float, gain: float, config: AlgorithmConfig) -> Token:
    p, mu = math.exp(now), math.exp(rollout)
    if config.dppo.dppo_type == "binary_tv":
        divergence = abs(p - mu)
    else:
        divergence = mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu + 1e-8) / (1 - p + 1e-8))
    leaves = (gain > 0 and p > mu and divergence > config.dppo.delta_high) or (
        gain < 0 and p < mu and divergence > config.dppo.delta_low
    )
    return (0.0, 0.0) if leaves else (-p / mu * gain, -p / mu * gain)


def reference(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of every token, 0 where masked."""
    loss, gradient = torch.zeros(inputs.logprobs.shape).double(), torch.zeros(inputs.logprobs.shape).double()
    assert inputs.rollout_logprobs is not None
    for row in range(len(loss)):
        trained = [t for t in range(loss.shape[1]) if inputs.loss_mask[row, t]]
        now, old, rollout, gain = (
            {t: float(x[row, t].detach()) for t in trained}
            for x in (inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs, inputs.advantages)
        )
        for t in trained:
            if config.policy_loss_type == "gspo":
                ratio = math.exp(sum(now[s] - old[s] for s in trained) / len(trained))
                loss[row, t], gradient[row, t] = clipped(ratio, gain[t], ratio, config)
            else:
                selected = inputs.selection is not None and bool(inputs.selection[row, t])
                loss[row, t], gradient[row, t] = token_reference(now[t], old[t], rollout[t], gain[t], selected, config)
    return loss, gradient


def loss_and_gradient(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    output = get_policy_loss(config.policy_loss_type)(inputs, config)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    return output.token_loss.detach(), gradient


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_agrees_with_the_plain_loops(variant: str) -> None:
    config = VARIANTS[variant]
    for seed in range(40):
        inputs = with_selection(random_inputs(seed), config)
        loss, gradient = loss_and_gradient(inputs, config)
        expected_loss, expected_gradient = reference(inputs, config)
        torch.testing.assert_close(loss, expected_loss, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_single_precision_agrees_with_double(variant: str) -> None:
    """Random ratios do not come close enough to a bound for the precision to decide on which side they are."""
    config = VARIANTS[variant]
    for seed in range(40):
        inputs = with_selection(random_inputs(seed, torch.float32), config)
        loss, gradient = loss_and_gradient(inputs, config)
        expected_loss, expected_gradient = reference(inputs, config)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected_loss, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=2e-5, rtol=2e-5)


def test_half_precision_inputs_are_computed_in_single() -> None:
    inputs = random_inputs(1, torch.bfloat16)
    output = get_policy_loss("regular")(inputs, AlgorithmConfig())
    assert output.token_loss.dtype == torch.float32


def test_there_is_a_reference_for_every_registered_loss() -> None:
    assert {config.policy_loss_type for config in VARIANTS.values()} == set(POLICY_LOSSES)
    assert set(POLICY_LOSSES) <= set(list_policy_losses())


def covariance_reference(inputs: PolicyLossInputs) -> dict[tuple[int, int], float]:
    where = [(int(row), int(t)) for row, t in inputs.loss_mask.nonzero()]
    now = {at: float(inputs.logprobs[at].detach()) for at in where}
    gain = {at: float(inputs.advantages[at]) for at in where}
    mean_now, mean_gain = (sum(x.values()) / max(len(where), 1) for x in (now, gain))
    return {at: (now[at] - mean_now) * (gain[at] - mean_gain) for at in where}


def test_kl_cov_selects_as_the_plain_loops() -> None:
    config = VARIANTS["kl_cov, most"]
    for seed in range(40):
        inputs = random_inputs(seed)
        covariance = covariance_reference(inputs)
        wanted = max(1, int(0.6 * len(covariance))) if covariance else 0
        expected = set(sorted(covariance, key=lambda at: -covariance[at])[:wanted])
        selection = with_selection(inputs, config).selection
        assert selection is not None
        assert {(int(row), int(t)) for row, t in selection.nonzero()} == expected


def test_clip_cov_selects_as_many_as_the_plain_loops_from_the_same_candidates() -> None:
    config = VARIANTS["clip_cov, many"]
    for seed in range(40):
        inputs = random_inputs(seed)
        covariance = covariance_reference(inputs)
        candidates = set()
        for at, value in covariance.items():
            ratio = math.exp(float(inputs.logprobs[at].detach() - inputs.old_logprobs[at]))
            stopped = clipped(ratio, float(inputs.advantages[at]), ratio, config)[1] == 0.0 and ratio != 0.0
            if 0.1 < value < 9.0 and not (stopped and float(inputs.advantages[at]) != 0.0):
                candidates.add(at)
        wanted = min(max(1, int(0.4 * len(covariance))), len(candidates)) if covariance else 0
        selection = with_selection(inputs, config).selection
        assert selection is not None
        chosen = {(int(row), int(t)) for row, t in selection.nonzero()}
        assert len(chosen) == wanted
        assert chosen <= candidates


CORRECTIONS = {
    "token weights": OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.1),
    "sequence weights": OffPolicyCorrectionConfig(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.2),
    "product mask": OffPolicyCorrectionConfig(sequence_mask_metric="product"),
    "geometric mask": OffPolicyCorrectionConfig(sequence_mask_metric="geometric", geo_mask_low=0.9, geo_mask_high=1.1),
    "outliers": OffPolicyCorrectionConfig(outlier_token_is_threshold_low=0.7, outlier_token_is_threshold_high=1.5),
    "tokens": OffPolicyCorrectionConfig(token_mask_is_threshold_low=0.9, token_mask_is_threshold_high=1.1),
    "all": OffPolicyCorrectionConfig(
        tis_ratio_type="token",
        sequence_mask_metric="product",
        outlier_token_is_threshold_high=1.6,
        token_mask_is_threshold_low=0.8,
    ),
}


def correction_reference(ratios: list[float], correction: OffPolicyCorrectionConfig) -> list[float]:
    """Weights of one row's trained tokens; `ratios` are π_old / π_rollout."""

    def inside(x: float, low: float | None, high: float | None) -> bool:
        return (low is None or x >= low) and (high is None or x <= high)

    product = math.prod(ratios)
    keep = all(
        inside(r, correction.outlier_token_is_threshold_low, correction.outlier_token_is_threshold_high) for r in ratios
    )
    if correction.sequence_mask_metric == "product":
        keep = keep and inside(product, correction.product_mask_low, correction.product_mask_high)
    if correction.sequence_mask_metric == "geometric":
        keep = keep and inside(product ** (1 / len(ratios)), correction.geo_mask_low, correction.geo_mask_high)
    weights = []
    for ratio in ratios:
        weight = 1.0
        if correction.tis_ratio_type == "token":
            weight = min(ratio, correction.token_tis_ratio_clip_high)
        if correction.tis_ratio_type == "sequence":
            weight = min(product, correction.sequence_tis_ratio_clip_high)
        low, high = correction.token_mask_is_threshold_low, correction.token_mask_is_threshold_high
        weights.append(weight if keep and inside(ratio, low, high) else 0.0)
    return weights


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("loss", ["regular", "gspo", "importance_sampling", "kl_cov"])
def test_off_policy_correction_weighs_loss_and_gradient(loss: str, correction: str) -> None:
    config = AlgorithmConfig(policy_loss_type=loss, off_policy_correction=CORRECTIONS[correction])
    for seed in range(25):
        inputs = with_selection(random_inputs(seed), config)
        assert inputs.rollout_logprobs is not None
        weights = torch.zeros(inputs.logprobs.shape, dtype=torch.float64)
        for row in range(len(weights)):
            trained = [t for t in range(weights.shape[1]) if inputs.loss_mask[row, t]]
            if trained:
                gaps = [float(inputs.old_logprobs[row, t] - inputs.rollout_logprobs[row, t]) for t in trained]
                row_weights = correction_reference([math.exp(gap) for gap in gaps], CORRECTIONS[correction])
                weights[row, trained] = torch.tensor(row_weights, dtype=torch.float64)
        loss_now, gradient = loss_and_gradient(inputs, config)
        plain_loss, plain_gradient = reference(inputs, config)
        torch.testing.assert_close(loss_now, weights * plain_loss, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(gradient, weights * plain_gradient, atol=1e-10, rtol=1e-10)
