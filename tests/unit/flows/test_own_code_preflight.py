"""Functions of the user's own are loaded and checked before any server starts or model loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.preflight import check_own_code
from skyrl_core.algorithms import registry
from skyrl_core.config import load_config
from skyrl_core.errors import ConfigurationError

OWN = """
from skyrl_core.algorithms.registry import register_advantage_estimator, register_policy_loss
from skyrl_core.config.algorithm_rules import EstimatorRules, LossRules


def plain(inputs, config): ...


@register_advantage_estimator("own_for_preflight", EstimatorRules(needs_critic=True))
def with_critic(inputs, config): ...


@register_policy_loss("own_loss_for_preflight", rules=LossRules(needs_rollout_logprobs=True))
def on_rollouts(inputs, config): ...
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("outside") / "own.py"
    path.write_text(OWN)
    yield path
    registry._estimators.entries.pop("own_for_preflight")
    registry._losses.entries.pop("own_loss_for_preflight")


def check(*words: str) -> None:
    check_own_code(load_config(None, list(words)))


def test_what_can_be_loaded_and_works_passes(own: Path) -> None:
    check()
    check(f"trainer.algorithm.advantage_estimator={own}:plain", f"trainer.algorithm.policy_loss_type={own}:on_rollouts")
    check(f"hooks.tracker={own}:plain")


@pytest.mark.parametrize("key", ["trainer.algorithm.advantage_estimator", "trainer.algorithm.policy_loss_type"])
def test_a_function_that_is_not_there_is_named_with_its_key(own: Path, key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}={own}:missing: {own} has no missing"):
        check(f"{key}={own}:missing")
    with pytest.raises(ConfigurationError, match=r"no such file: /no/such\.py"):
        check(f"{key}=/no/such.py:f")


def test_a_hook_that_is_not_there_is_named_before_anything_starts(own: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"hooks.trainer={own}:missing"):
        check(f"hooks.trainer={own}:missing")


def test_the_rules_a_function_is_registered_with_are_held(own: Path) -> None:
    with pytest.raises(ConfigurationError, match="with_critic needs a critic"):
        check(f"trainer.algorithm.advantage_estimator={own}:with_critic")
    with pytest.raises(ConfigurationError, match="on_rollouts takes its ratio to the rollout policy"):
        check(f"trainer.algorithm.policy_loss_type={own}:on_rollouts", "generator.sampling_params.logprobs=null")
