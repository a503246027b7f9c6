"""Policy losses and the value loss on few tokens, worked out on paper in each test."""

import math
from collections.abc import Sequence

import pytest
import torch

from skyrl_core.algorithms.losses import value_loss
from skyrl_core.algorithms.registry import get_policy_loss, get_prepare
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DPPOConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl_core.errors import ConfigurationError, TrainingError


def tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[float] | None = None,
    rollout: Sequence[float] | None = None,
    selection: Sequence[bool] | None = None,
) -> PolicyLossInputs:
    """One row, every token trained: π/π_old = ratios, with π_old = `old` as probabilities (½ each by default)."""
    before = torch.tensor([old or [0.5] * len(ratios)], dtype=torch.float64).log()
    now = (before + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    return PolicyLossInputs(
        logprobs=now,
        old_logprobs=before,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(ratios), dtype=torch.bool),
        rollout_logprobs=None if rollout is None else torch.tensor([rollout], dtype=torch.float64).log(),
        selection=None if selection is None else torch.tensor([selection]),
    )


def run(loss: str, inputs: PolicyLossInputs, **settings: object) -> tuple[PolicyLossOutput, list[float], list[float]]:
    """The output, its token losses, and the gradient of their sum by the log-probabilities."""
    output = get_policy_loss(loss)(inputs, AlgorithmConfig(policy_loss_type=loss, **settings))
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    return output, output.token_loss[0].tolist(), gradient[0].tolist()


def test_regular_clips_only_where_clipping_lowers_the_gain() -> None:
    """Bounds 0.8 and 1.3. A = 1: r = 1.5 gains min(1.5, 1.3) = 1.3, clipped; r = 0.5 gains 0.5, not clipped.
    A = -1: r = 1.5 gives min(-1.5, -1.3) = -1.5, not clipped; r = 0.5 gives min(-0.5, -0.8) = -0.8, clipped.
    The gradient is -A·r where not clipped."""
    inputs = tokens([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0])
    output, loss, gradient = run("regular", inputs, eps_clip_low=0.2, eps_clip_high=0.3)
    assert loss == pytest.approx([-1.3, -0.5, 1.5, 0.8])
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert output.token_metrics["clip_ratio"].tolist() == [[1.0, 0.0, 0.0, 1.0]]
    assert output.token_metrics["importance_ratio"][0].tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5])


def test_bnpo_is_the_clipped_surrogate() -> None:
    inputs = tokens([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0])
    assert run("bnpo", inputs, eps_clip_low=0.2, eps_clip_high=0.3)[1] == pytest.approx([-1.3, -0.5, 1.5, 0.8])


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    """c = 3, A = -1: r = 5 would lose 5, is stopped at 3 and has no gradient; r = 2 loses 2. A = 1: as regular."""
    output, loss, gradient = run("dual_clip", tokens([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0]), clip_ratio_c=3.0)
    assert loss == pytest.approx([3.0, 2.0, -1.2])
    assert gradient == pytest.approx([0.0, 2.0, 0.0])
    assert output.token_metrics["dual_clip_ratio"].tolist() == [[1.0, 0.0, 0.0]]


def test_gspo_clips_by_the_rows_geometric_mean_ratio() -> None:
    """Ratios 4 and 1: s = √4 = 2 for both tokens. A = 1, bound 1.2: both clipped at 1.2, though the second's own ratio
    is 1. A = -1: the loss is 2 each, the gradient s·1 = 2 each."""
    _, loss, gradient = run("gspo", tokens([4.0, 1.0], [1.0, 1.0]))
    assert loss == pytest.approx([-1.2, -1.2])
    assert gradient == [0.0, 0.0]
    output, loss, gradient = run("gspo", tokens([4.0, 1.0], [-1.0, -1.0]))
    assert loss == pytest.approx([2.0, 2.0])
    assert gradient == pytest.approx([2.0, 2.0])
    assert output.token_metrics["importance_ratio"][0].tolist() == pytest.approx([2.0, 2.0])


def test_gspo_averages_over_trained_tokens_only() -> None:
    """Ratios 4, 9 (masked), 1: s = √4 = 2, not the cube root of 36."""
    inputs = tokens([4.0, 9.0, 1.0], [-1.0, -1.0, -1.0])
    masked = PolicyLossInputs(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        loss_mask=torch.tensor([[True, False, True]]),
    )
    assert run("gspo", masked)[1] == pytest.approx([2.0, 0.0, 2.0])


def test_sapo_gates_softly_with_a_temperature_for_each_sign() -> None:
    """τ = 1, A = 1: at r = 1 the loss is -4·σ(0) = -2, the gradient -4·¼·r = -1. At r = 1 + ln 3: σ = ¾,
    loss -3, gradient -4·¾·¼·r = -0.75·(1 + ln 3). τ = 2, A = -1 at r = 1: 2·½ = 1, gradient 4·¼ = 1."""
    high = 1 + math.log(3)
    output, loss, gradient = run(
        "sapo", tokens([1.0, high, 1.0], [1.0, 1.0, -1.0]), sapo=SAPOConfig(tau_pos=1.0, tau_neg=2.0)
    )
    assert loss == pytest.approx([-2.0, -3.0, 1.0])
    assert gradient == pytest.approx([-1.0, -0.75 * high, 1.0])
    assert output.token_metrics["clip_ratio"][0].tolist() == pytest.approx([0.0, 0.25, 0.0])


def test_sapo_takes_the_negative_temperature_at_advantage_zero() -> None:
    """At r = 1 + ln 3 and τ = 2: σ = 9/10, so 1 - 4·0.9·0.1 = 0.64 of the gradient is gated away."""
    output, loss, _ = run("sapo", tokens([1 + math.log(3)], [0.0]), sapo=SAPOConfig(tau_pos=1.0, tau_neg=2.0))
    assert loss == [0.0]
    assert output.token_metrics["clip_ratio"][0].tolist() == pytest.approx([0.64])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    """Weights within [0.5, 2]: r = 4 weighs 2, r = 0.1 weighs 0.5, r = 1 weighs 1. π_old = 0.1, so log π is
    log 0.4, log 0.01, log 0.1. loss = -w·A·log π, gradient -w·A."""
    cispo = CISPOConfig(cispo_eps_clip_low=0.5, cispo_eps_clip_high=1.0)
    inputs = tokens([4.0, 0.1, 1.0], [1.0, 1.0, -2.0], old=[0.1, 0.1, 0.1])
    output, loss, gradient = run("cispo", inputs, cispo=cispo)
    assert loss == pytest.approx([-2 * math.log(0.4), -0.5 * math.log(0.01), 2 * math.log(0.1)])
    assert gradient == pytest.approx([-2.0, -0.5, 2.0])
    assert output.token_metrics["clip_ratio"].tolist() == [[1.0, 1.0, 0.0]]
    assert output.token_metrics["clipped_ratio"][0].tolist() == pytest.approx([2.0, 0.5, 1.0])


def test_cispo_can_take_the_rollout_policy_for_its_anchor() -> None:
    """π = ½, π_old = ½, rollout ¼: r = 2, not 1. A = 1: gradient -2."""
    cispo = CISPOConfig(cispo_anchor="rollout")
    assert run("cispo", tokens([1.0], [1.0], rollout=[0.25]), cispo=cispo)[2] == pytest.approx([-2.0])


def test_rollout_is_drops_tokens_outside_the_bounds() -> None:
    """π = 0.5 each; rollout 0.5, 0.3, 0.9: r = 1, 1.667, 0.556. Bounds 0.8, 1.2: only the first keeps its gradient."""
    inputs = tokens([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], rollout=[0.5, 0.3, 0.9])
    output, loss, gradient = run("rollout_is", inputs)
    assert loss == pytest.approx([-2 * math.log(0.5), 0.0, 0.0])
    assert gradient == pytest.approx([-2.0, 0.0, 0.0])
    assert output.token_metrics["clip_ratio"].tolist() == [[0.0, 1.0, 1.0]]


def test_rollout_is_excludes_its_bounds_themselves() -> None:
    """r = 1 exactly, once at the upper bound 1 + 0, once at the lower bound 1 - 0."""
    inputs = tokens([1.0], [1.0], rollout=[0.5])
    assert run("rollout_is", inputs, eps_clip_low=0.5, eps_clip_high=0.0)[2] == [0.0]
    assert run("rollout_is", inputs, eps_clip_low=0.0, eps_clip_high=0.5)[2] == [0.0]


def test_importance_sampling_weighs_without_bound() -> None:
    _, loss, gradient = run("importance_sampling", tokens([3.0, 0.5], [1.0, -2.0]))
    assert loss == pytest.approx([-3.0, 1.0])
    assert gradient == pytest.approx([-3.0, 1.0])


def test_dppo_tv_stops_tokens_that_leave_the_trust_region() -> None:
    """μ = 0.5; π = 0.9, 0.6, 0.1, 0.9, 0.1. δ_high = 0.3, δ_low = 0.2.
    A = 1: 0.9 is 0.4 above: stopped; 0.6 is 0.1 above: kept; 0.1 is below: coming back: kept.
    A = -1: 0.9 is above: kept; 0.1 is 0.4 below: stopped. Ratios 1.8, 1.2, 0.2, 1.8, 0.2."""
    inputs = tokens([1.8, 1.2, 0.2, 1.8, 0.2], [1.0, 1.0, 1.0, -1.0, -1.0], rollout=[0.5] * 5)
    output, loss, gradient = run("dppo", inputs, dppo=DPPOConfig(delta_low=0.2, delta_high=0.3))
    assert loss == pytest.approx([0.0, -1.2, -0.2, 1.8, 0.0])
    assert gradient == pytest.approx([0.0, -1.2, -0.2, 1.8, 0.0])
    assert output.token_metrics["clip_ratio"].tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]]
    assert output.token_metrics["divergence"][0].tolist() == pytest.approx([0.4, 0.1, 0.4, 0.4, 0.4])


def test_dppo_counts_no_token_without_advantage_as_stopped() -> None:
    inputs = tokens([1.8, 0.2], [0.0, 0.0], rollout=[0.5, 0.5])
    assert run("dppo", inputs)[0].token_metrics["clip_ratio"].tolist() == [[0.0, 0.0]]


def test_dppo_kl_measures_the_binary_divergence() -> None:
    """μ = 0.5, π = 0.9: ½·ln(0.5/0.9) + ½·ln(0.5/0.1) = ½·(-0.587787 + 1.609438) = 0.510826.
    A = 1: stopped below that, kept above."""
    for delta, expected in [(0.5, 0.0), (0.52, -1.8)]:
        dppo = DPPOConfig(dppo_type="binary_kl", delta_low=0.0, delta_high=delta)
        output, loss, _ = run("dppo", tokens([1.8], [1.0], rollout=[0.5]), dppo=dppo)
        assert loss == pytest.approx([expected])
        assert output.token_metrics["divergence"][0].tolist() == pytest.approx([0.510826], abs=1e-6)


def test_dppo_kl_stays_finite_at_probability_one() -> None:
    dppo = DPPOConfig(dppo_type="binary_kl")
    output, _, gradient = run("dppo", tokens([1.0, 1.0], [1.0, -1.0], old=[1.0, 1.0], rollout=[1.0, 0.5]), dppo=dppo)
    assert torch.isfinite(output.token_metrics["divergence"]).all()
    assert all(math.isfinite(x) for x in gradient)


def test_cross_entropy_reads_neither_advantages_nor_old_logprobs() -> None:
    _, loss, gradient = run("cross_entropy", tokens([0.5, 2.0], [7.0, -7.0], old=[0.2, 0.2]))
    assert loss == pytest.approx([-math.log(0.1), -math.log(0.4)])
    assert gradient == [-1.0, -1.0]


def covariances() -> PolicyLossInputs:
    """log π = -4, -3, -2, -1 (mean -2.5), A = -3, -1, 1, 3 (mean 0): Cov = 4.5, 0.5, 0.5, 4.5; a fifth token, masked,
    would have the largest."""
    logprobs = torch.tensor([[-4.0, -3.0, -2.0, -1.0, -100.0]], dtype=torch.float64)
    return PolicyLossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor([[-3.0, -1.0, 1.0, 3.0, -90.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[True, True, True, True, False]]),
    )


def prepared(loss: str, inputs: PolicyLossInputs, seed: int = 0, **settings: object) -> list[bool]:
    prepare = get_prepare(loss)
    assert prepare is not None
    selection: list[bool] = prepare(inputs, AlgorithmConfig(policy_loss_type=loss, **settings), seed)[0].tolist()
    return selection


def test_kl_cov_selects_the_largest_covariances() -> None:
    """Half of four tokens: the two with 4.5. A quarter: one of them, the earlier. 0.1: at least one. 0: none."""
    inputs = covariances()
    for share, expected in [
        (0.5, [True, False, False, True, False]),
        (0.25, [True, False, False, False, False]),
        (0.1, [True, False, False, False, False]),
        (0.0, [False] * 5),
        (1.0, [True, True, True, True, False]),
    ]:
        assert prepared("kl_cov", inputs, kl_cov=KLCovConfig(kl_cov_frac=share)) == expected


def test_clip_cov_selects_at_random_within_its_bounds() -> None:
    """Bounds (1, 5): candidates are tokens 0 and 3. One of them is drawn, by the seed; with 0.5 both are. Within
    (0.1, 1) the candidates are 1 and 2, within (5, 6) there is none."""
    inputs = covariances()
    draws = [prepared("clip_cov", inputs, seed, clip_cov=ClipCovConfig(clip_ratio=0.25)) for seed in range(20)]
    assert {tuple(draw) for draw in draws} == {
        (True, False, False, False, False),
        (False, False, False, True, False),
    }
    assert draws == [prepared("clip_cov", inputs, seed, clip_cov=ClipCovConfig(clip_ratio=0.25)) for seed in range(20)]
    half = ClipCovConfig(clip_ratio=0.5)
    assert prepared("clip_cov", inputs, clip_cov=half) == [True, False, False, True, False]
    low = ClipCovConfig(clip_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0)
    assert prepared("clip_cov", inputs, clip_cov=low) == [False, True, True, False, False]
    none = ClipCovConfig(clip_ratio=1.0, clip_cov_lb=5.0, clip_cov_ub=6.0)
    assert prepared("clip_cov", inputs, clip_cov=none) == [False] * 5


def test_clip_cov_does_not_select_what_the_clip_stopped_already() -> None:
    """Token 3 has A > 0 and r = e: its gradient is gone anyway, so token 0 is the only candidate."""
    inputs = covariances()
    old = inputs.old_logprobs.clone()
    old[0, 3] -= 1.0
    moved = PolicyLossInputs(
        logprobs=inputs.logprobs, old_logprobs=old, advantages=inputs.advantages, loss_mask=inputs.loss_mask
    )
    selection = prepared("clip_cov", moved, clip_cov=ClipCovConfig(clip_ratio=1.0))
    assert selection == [True, False, False, False, False]


def test_clip_cov_takes_the_selected_tokens_out() -> None:
    """r = 1.5, 0.5 with A = 1 as in regular: -1.2 and -0.5; the second is selected: 0, without gradient."""
    output, loss, gradient = run("clip_cov", tokens([1.5, 0.5], [1.0, 1.0], selection=[False, True]))
    assert loss == pytest.approx([-1.2, 0.0])
    assert gradient == [0.0, 0.0]
    assert output.token_metrics["clip_ratio"].tolist() == [[0.0, 1.0]]


def test_kl_cov_penalises_the_selected_tokens_and_clips_none() -> None:
    """r = 2, A = 1: -2; selected: -2 + 0.5·ln 2. Gradients -2 and -2 + 0.5."""
    inputs = tokens([2.0, 2.0], [1.0, 1.0], selection=[False, True])
    output, loss, gradient = run("kl_cov", inputs, kl_cov=KLCovConfig(ppo_kl_coef=0.5))
    assert loss == pytest.approx([-2.0, -2.0 + 0.5 * math.log(2)])
    assert gradient == pytest.approx([-2.0, -1.5])
    assert output.token_metrics["kl_cov_ratio"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_with_a_selection_refuses_to_run_without(loss: str) -> None:
    with pytest.raises(TrainingError, match="without the selection"):
        run(loss, tokens([1.0], [1.0]))


@pytest.mark.parametrize("loss", ["rollout_is", "dppo", "cispo"])
def test_losses_on_the_rollout_policy_name_the_key_that_brings_it(loss: str) -> None:
    cispo = CISPOConfig(cispo_anchor="rollout")
    with pytest.raises(ConfigurationError, match=r"set generator\.sampling_params\.logprobs=1"):
        run(loss, tokens([1.0], [1.0]), cispo=cispo)
    with pytest.raises(ConfigurationError, match="tis_ratio_type=token would count the gap"):
        run(
            loss,
            tokens([1.0], [1.0], rollout=[0.5]),
            cispo=cispo,
            off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token"),
        )


def test_cross_entropy_refuses_an_off_policy_correction() -> None:
    with pytest.raises(ConfigurationError, match="cross_entropy does not take off_policy_correction"):
        run(
            "cross_entropy",
            tokens([1.0], [1.0], rollout=[0.5]),
            off_policy_correction=OffPolicyCorrectionConfig(sequence_mask_metric="product"),
        )


def test_value_loss_takes_the_larger_of_plain_and_clipped_error() -> None:
    """V_old = 0, clip 0.2. V = 1, R = 1: plain 0, clipped (0.2 - 1)² = 0.64: loss 0.32, no gradient (clipped).
    V = 1, R = 0: plain 1, clipped 0.04: loss ½, gradient V - R = 1. V = 0.1, R = 1: inside: ½·0.81, gradient -0.9.
    The last token is masked."""
    values = torch.tensor([[1.0, 1.0, 0.1, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 0.0, 1.0, float("inf")]])
    output = value_loss(values, torch.zeros(1, 4), returns, mask, 0.2)
    assert output.token_loss[0].tolist() == pytest.approx([0.32, 0.5, 0.405, 0.0])
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), values)
    assert gradient[0].tolist() == pytest.approx([0.0, 1.0, -0.9, 0.0])
    assert output.token_metrics["value_clip_ratio"].tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert output.token_metrics["value_error"][0].tolist() == pytest.approx([0.0, 1.0, 0.81, 0.0])


def test_value_loss_without_clipping_is_half_the_squared_error() -> None:
    values = torch.tensor([[3.0]])
    mask = torch.tensor([[True]])
    output = value_loss(values, torch.zeros(1, 1), torch.ones(1, 1), mask, None)
    assert output.token_loss.tolist() == [[2.0]]
    assert output.token_metrics["value_clip_ratio"].tolist() == [[0.0]]


def test_wrong_shapes_and_types_are_named() -> None:
    row, flags = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"PolicyLossInputs\.logprobs must be \[B, T\], got \(2,\)"):
        PolicyLossInputs(logprobs=row[0], old_logprobs=row, advantages=row, loss_mask=flags)
    with pytest.raises(ValueError, match=r"advantages must have shape \(1, 2\), got \(1, 1\)"):
        PolicyLossInputs(logprobs=row, old_logprobs=row, advantages=row[:, :1], loss_mask=flags)
    with pytest.raises(ValueError, match=r"selection must be a bool tensor, got torch\.float32"):
        PolicyLossInputs(logprobs=row, old_logprobs=row, advantages=row, loss_mask=flags, selection=row)
