"""KL estimators and controllers: worked out on paper, and against the divergence of known distributions."""

import math

import pytest
import torch

from skyrl_core.algorithms.kl import penalize_rewards, token_kl
from skyrl_core.algorithms.kl_control import make_kl_controller
from skyrl_core.config.algorithm import AlgorithmConfig, KLCtrlConfig
from skyrl_core.config.algorithm_rules import KL_ESTIMATORS
from skyrl_core.errors import CheckpointError, ConfigurationError

ALL = torch.ones(1, 1, dtype=torch.bool)


def one(estimator: str, difference: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """The estimate at logprobs - ref_logprobs = difference, and its derivative by logprobs."""
    reference = torch.tensor([[-30.0]], dtype=dtype)
    logprobs = (reference + difference).requires_grad_()
    value = token_kl(logprobs, reference, ALL, estimator)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return float(value.detach()), float(gradient)


@pytest.mark.parametrize(
    ("estimator", "difference", "value", "slope"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("k1", -0.5, -0.5, 1.0),
        ("abs", 0.5, 0.5, 1.0),
        ("abs", -0.5, 0.5, -1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k2", -0.5, 0.125, -0.5),
        # exp(-ln 2) + ln 2 - 1 = 0.193147; slope 1 - exp(-d) = ½.
        ("k3", math.log(2), math.log(2) - 0.5, 0.5),
        # exp(ln 2) - ln 2 - 1 = 0.306853; slope 1 - 2.
        ("k3", -math.log(2), 1 - math.log(2), -1.0),
        ("k3", 0.0, 0.0, 0.0),
    ],
)
def test_estimates_and_slopes(estimator: str, difference: float, value: float, slope: float) -> None:
    assert one(estimator, difference) == pytest.approx((value, slope), abs=1e-12)


def test_k3_is_bounded_by_ten() -> None:
    """d = -5: exp(5) - 6 = 142 is cut to 10, without slope. d = 15: 14 is cut too. d = -1e4 does not overflow."""
    assert one("k3", -5.0) == (10.0, 0.0)
    assert one("k3", 15.0) == (10.0, 0.0)
    assert one("k3", -1e4) == (10.0, 0.0)
    assert one("k3", 5.0)[0] == pytest.approx(4 + math.exp(-5))


def test_k3_keeps_its_digits_near_zero_in_single_precision() -> None:
    """At d = 2^-10 the value is d²/2 - d³/6 + … = 4.767e-7: exp(-d) + d - 1 would lose most of it."""
    difference = 2.0**-10
    value, _ = one("k3", difference, torch.float32)
    exact = difference**2 / 2 - difference**3 / 6 + difference**4 / 24
    assert value == pytest.approx(exact, rel=2e-4)


def test_estimators_average_to_the_divergence_of_two_distributions() -> None:
    """p = (0.5, 0.3, 0.2), q = (0.4, 0.4, 0.2), every outcome weighed by p: k1 and k3 are unbiased."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64)
    exact = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)
    mask = torch.ones(1, 3, dtype=torch.bool)
    for estimator in ("k1", "k3"):
        assert float((p * token_kl(p.log(), q.log(), mask, estimator)).sum()) == pytest.approx(exact, abs=1e-12)


def test_equal_policies_have_no_divergence() -> None:
    logprobs = torch.tensor([[-0.5, -3.0]])
    for estimator in KL_ESTIMATORS:
        assert token_kl(logprobs, logprobs, torch.ones(1, 2).bool(), estimator).tolist() == [[0.0, 0.0]]


def test_no_gradient_flows_into_the_reference() -> None:
    reference = torch.tensor([[-1.0]], requires_grad=True)
    value = token_kl(torch.tensor([[-2.0]], requires_grad=True), reference, ALL, "k3")
    assert torch.autograd.grad(value.sum(), reference, allow_unused=True)[0] is None


def test_unknown_estimators_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="unknown 'k4'; known: k1, k2, k3, abs"):
        one("k4", 0.0)


def test_kl_in_the_reward_is_taken_off_each_trained_token() -> None:
    """k1 = 0.5, 0, NaN (masked), coefficient 0.1: rewards 0, 1, 2 become -0.05, 1, 2."""
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    penalised = penalize_rewards(
        torch.tensor([[0.0, 1.0, 2.0]]),
        logprobs,
        torch.tensor([[-1.5, -1.0, math.nan]]),
        torch.tensor([[True, True, False]]),
        0.1,
        "k1",
    )
    assert penalised[0].tolist() == pytest.approx([-0.05, 1.0, 2.0])
    assert not penalised.requires_grad


def test_fixed_controller_keeps_the_configured_value() -> None:
    controller = make_kl_controller(AlgorithmConfig(kl_loss_coef=0.3))
    controller.update(99.0, 1000)
    assert controller.value == 0.3
    controller.load_state_dict({"value": 7.0})
    assert controller.value == 0.3
    assert controller.state_dict() == {"value": 0.3}


def test_adaptive_controller_moves_by_at_most_a_fifth_of_its_share() -> None:
    """Target 0.1, horizon 100, 10 samples. KL 0.11: error 0.1, value · (1 + 0.1 · 0.1) = 1.01.
    KL 1: error cut to 0.2: · 1.02. KL 0: cut to -0.2: · 0.98."""
    kl_ctrl = KLCtrlConfig(type="adaptive", kl_target=0.1, horizon=100)
    controller = make_kl_controller(AlgorithmConfig(kl_loss_coef=1.0, kl_ctrl=kl_ctrl))
    values = []
    for kl in (0.11, 1.0, 0.0):
        controller.update(kl, 10)
        values.append(controller.value)
    assert values == pytest.approx([1.01, 1.01 * 1.02, 1.01 * 1.02 * 0.98])


def test_adaptive_controller_goes_on_from_a_checkpoint() -> None:
    algorithm = AlgorithmConfig(kl_loss_coef=1.0, kl_ctrl=KLCtrlConfig(type="adaptive", horizon=10))
    first, second = make_kl_controller(algorithm), make_kl_controller(algorithm)
    first.update(1.0, 5)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value == pytest.approx(1.1)
    with pytest.raises(CheckpointError, match="no 'value'"):
        second.load_state_dict({})
