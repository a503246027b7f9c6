"""What holds for every policy loss: masked tokens do not exist, ratio 1 is the plain policy gradient, cuts and padding
do not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.algorithms.kl import token_kl
from skyrl_core.algorithms.reductions import token_weights
from skyrl_core.algorithms.registry import get_policy_loss, get_prepare
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    KLCovConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_core.config.algorithm_rules import KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS

LOSSES = sorted(POLICY_LOSSES)
CORRECTED = sorted(name for name, rules in POLICY_LOSSES.items() if rules.off_policy != "none")
seeds = st.integers(min_value=0, max_value=10**6)
few = settings(max_examples=20, deadline=None)


def config(loss: str, corrected: bool = False) -> AlgorithmConfig:
    correction = OffPolicyCorrectionConfig(
        sequence_mask_metric="geometric",
        geo_mask_low=0.8,
        geo_mask_high=1.2,
        token_mask_is_threshold_high=1.4,
        outlier_token_is_threshold_low=0.3,
    )
    return AlgorithmConfig(
        policy_loss_type=loss,
        cispo=CISPOConfig(cispo_eps_clip_low=0.3, cispo_eps_clip_high=0.3),
        clip_cov=ClipCovConfig(clip_ratio=0.3, clip_cov_lb=0.0, clip_cov_ub=9.0),
        kl_cov=KLCovConfig(kl_cov_frac=0.3),
        off_policy_correction=correction if corrected else OffPolicyCorrectionConfig(),
    )


def random_inputs(seed: int, gap: float = 0.4) -> PolicyLossInputs:
    """Up to 8 ragged rows with gaps; `gap` scales how far the current policy is from the old one."""
    generator = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, width, generator=generator, dtype=torch.float64)

    old = -noise(1.5).abs() - 0.01
    return PolicyLossInputs(
        logprobs=(old + noise(gap)).requires_grad_(),
        old_logprobs=old,
        advantages=noise(1.0),
        loss_mask=torch.rand(count, width, generator=generator) < 0.7,
        rollout_logprobs=old + noise(0.2),
    )


def changed(inputs: PolicyLossInputs, **fields: object) -> PolicyLossInputs:
    return PolicyLossInputs(**{**{name: getattr(inputs, name) for name in inputs.__slots__}, **fields})


def rows(inputs: PolicyLossInputs, index: torch.Tensor | slice) -> PolicyLossInputs:
    fields = {name: getattr(inputs, name) for name in inputs.__slots__}
    return PolicyLossInputs(**{name: None if x is None else x[index] for name, x in fields.items()})


def prepared(inputs: PolicyLossInputs, algorithm: AlgorithmConfig) -> PolicyLossInputs:
    prepare = get_prepare(algorithm.policy_loss_type)
    return inputs if prepare is None else changed(inputs, selection=prepare(inputs, algorithm, 5))


def run(inputs: PolicyLossInputs, algorithm: AlgorithmConfig) -> tuple[PolicyLossOutput, torch.Tensor]:
    output = get_policy_loss(algorithm.policy_loss_type)(inputs, algorithm)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    return output, gradient


def poison(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(mask, tensor.detach(), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_at_a_masked_position_reaches_loss_gradient_or_metrics(
    loss: str, corrected: bool, value: float
) -> None:
    if corrected and loss not in CORRECTED:
        corrected = False
    algorithm = config(loss, corrected)
    for seed in range(5):
        clean = random_inputs(seed)
        mask = clean.loss_mask
        assert clean.rollout_logprobs is not None
        dirty = changed(
            clean,
            logprobs=poison(clean.logprobs, mask, value).requires_grad_(),
            old_logprobs=poison(clean.old_logprobs, mask, value),
            advantages=poison(clean.advantages, mask, value),
            rollout_logprobs=poison(clean.rollout_logprobs, mask, value),
        )
        expected, expected_gradient = run(prepared(clean, algorithm), algorithm)
        output, gradient = run(prepared(dirty, algorithm), algorithm)
        assert torch.equal(output.token_loss, expected.token_loss)
        assert torch.equal(gradient, expected_gradient)
        for name, metric in output.token_metrics.items():
            assert torch.equal(metric, expected.token_metrics[name])
            assert (metric[~mask] == 0.0).all()
            assert not metric.requires_grad
        assert (output.token_loss[~mask] == 0.0).all()
        assert (gradient[~mask] == 0.0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_at_a_trained_position_is_not_hidden(loss: str) -> None:
    """A broken model must be seen by the finite check, not become a token without loss."""
    inputs = random_inputs(4)
    logprobs = inputs.logprobs.detach().clone()
    row, column = inputs.loss_mask.nonzero()[0].tolist()
    logprobs[row, column] = math.nan
    algorithm = config(loss)
    output, _ = run(prepared(changed(inputs, logprobs=logprobs.requires_grad_()), algorithm), algorithm)
    assert output.token_loss.isnan().any()


@pytest.mark.parametrize("loss", ["regular", "importance_sampling"])
def test_nan_in_old_logprobs_is_not_hidden_by_the_correction(loss: str) -> None:
    inputs = random_inputs(4)
    old = inputs.old_logprobs.clone()
    row, column = inputs.loss_mask.nonzero()[0].tolist()
    old[row, column] = math.nan
    for algorithm in (config(loss), config(loss, corrected=True)):
        assert run(changed(inputs, old_logprobs=old), algorithm)[0].token_loss.isnan().any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_trained_tokens_has_loss_and_gradient_zero(loss: str) -> None:
    inputs = changed(random_inputs(2), loss_mask=torch.zeros_like(random_inputs(2).loss_mask))
    algorithm = config(loss)
    output, gradient = run(prepared(inputs, algorithm), algorithm)
    assert (output.token_loss == 0.0).all()
    assert (gradient == 0.0).all()


@few
@given(seed=seeds)
def test_ratio_one_gives_the_plain_policy_gradient(seed: int) -> None:
    """At π = π_old = π_rollout the gradient by log π is -A, and 0 for what Clip-Cov selected."""
    inputs = random_inputs(seed, gap=0.0)
    inputs = changed(inputs, rollout_logprobs=inputs.old_logprobs)
    for loss in sorted(set(LOSSES) - {"cross_entropy"}):
        algorithm = config(loss)
        ready = prepared(inputs, algorithm)
        _, gradient = run(ready, algorithm)
        expected = torch.where(inputs.loss_mask, -inputs.advantages, 0.0)
        if loss == "clip_cov":
            assert ready.selection is not None
            expected = torch.where(ready.selection, 0.0, expected)
        torch.testing.assert_close(gradient, expected)


@few
@given(seed=seeds)
def test_on_policy_the_reported_ratio_is_one(seed: int) -> None:
    inputs = random_inputs(seed, gap=0.0)
    for loss in sorted(set(LOSSES) - {"cross_entropy", "rollout_is", "dppo"}):
        algorithm = config(loss)
        ratio = run(prepared(inputs, algorithm), algorithm)[0].token_metrics["importance_ratio"]
        assert torch.equal(ratio, inputs.loss_mask.double())


@few
@given(seed=seeds, cut=st.integers(1, 4), left=st.integers(0, 2), right=st.integers(0, 2))
def test_loss_and_gradient_do_not_depend_on_microbatches_row_order_or_padding(
    seed: int, cut: int, left: int, right: int
) -> None:
    """The minibatch is prepared and weighed once, its rows then shuffled, cut and padded: the sum stays the same."""
    inputs = random_inputs(seed)
    count, width = inputs.loss_mask.shape
    groups = torch.arange(count) // 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (left, right), value=False if tensor.dtype == torch.bool else -7.0)

    for loss in LOSSES:
        algorithm = config(loss, corrected=loss in CORRECTED)
        ready = prepared(inputs, algorithm)
        for reduction in REDUCTIONS:
            weights = token_weights(inputs.loss_mask, reduction, groups, max_seq_len=16, micro_batch_size=2).double()
            whole = get_policy_loss(loss)(ready, algorithm).token_loss
            (expected_gradient,) = torch.autograd.grad((whole * weights).sum(), inputs.logprobs)
            total, gradient = 0.0, torch.zeros(count, width, dtype=torch.float64)
            for index in order.split(cut):
                leaf = pad(ready.logprobs[index].detach()).requires_grad_()
                part = rows(ready, index)
                fields = {name: getattr(part, name) for name in part.__slots__}
                part = PolicyLossInputs(
                    **{name: None if x is None else pad(x.detach()) for name, x in fields.items()} | {"logprobs": leaf}
                )
                reduced = (get_policy_loss(loss)(part, algorithm).token_loss * pad(weights[index])).sum()
                (piece,) = torch.autograd.grad(reduced, leaf)
                total += float(reduced.detach())
                gradient[index] = piece[:, left : left + width]
            assert total == pytest.approx(float((whole * weights).sum().detach()), abs=1e-9)
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_flows_into_anything_but_the_current_logprobs(loss: str) -> None:
    inputs = random_inputs(7)
    leaves = {
        name: getattr(inputs, name).detach().clone().requires_grad_()
        for name in ("old_logprobs", "advantages", "rollout_logprobs")
    }
    algorithm = config(loss)
    output, _ = run(prepared(changed(inputs, **leaves), algorithm), algorithm)
    assert output.token_loss.requires_grad
    for leaf in leaves.values():
        assert torch.autograd.grad(output.token_loss.sum(), leaf, allow_unused=True, retain_graph=True)[0] is None


@pytest.mark.parametrize("loss", LOSSES)
def test_huge_gaps_give_finite_losses(loss: str) -> None:
    """Log-probabilities 1000 apart: exp would overflow, the clamp at ±20 does not."""
    inputs = random_inputs(3)
    for gap in (-1000.0, 1000.0):
        far = changed(inputs, logprobs=(inputs.old_logprobs - abs(gap)).requires_grad_())
        if gap > 0:
            low = inputs.old_logprobs - gap
            far = changed(inputs, old_logprobs=low, rollout_logprobs=low)
        algorithm = config(loss)
        output, gradient = run(prepared(far, algorithm), algorithm)
        assert torch.isfinite(output.token_loss).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_at_a_masked_position_reaches_the_kl(estimator: str, value: float) -> None:
    clean = random_inputs(6)
    mask = clean.loss_mask
    leaf = poison(clean.logprobs, mask, value).requires_grad_()
    dirty = token_kl(leaf, poison(clean.old_logprobs, mask, value), mask, estimator)
    expected = token_kl(clean.logprobs, clean.old_logprobs, mask, estimator)
    assert torch.equal(dirty, expected)
    (gradient,) = torch.autograd.grad(dirty.sum(), leaf)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), clean.logprobs)[0])
    assert (gradient[~mask] == 0.0).all()
