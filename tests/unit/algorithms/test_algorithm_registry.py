"""Names resolve to functions: ours, registered ones, and user code from modules and files."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skyrl_core.algorithms import registry
from skyrl_core.algorithms.advantages import compute_advantages
from skyrl_core.algorithms.advantages.outcome import Outcomes, outcome_estimator
from skyrl_core.algorithms.losses.common import finish
from skyrl_core.algorithms.types import AdvantageInputs, Advantages, PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES, EstimatorRules, LossRules
from skyrl_core.errors import ConfigurationError
from skyrl_core.user_code import load_callable

USER_FILE = """
from skyrl_core.algorithms.types import Advantages
from skyrl_core.algorithms.registry import register_policy_loss
from skyrl_core.config.algorithm_rules import LossRules

def twice_the_score(inputs, config):
    rewards = 2 * inputs.scores()
    return Advantages(advantages=inputs.on_tokens(rewards), returns=inputs.on_tokens(rewards))

@register_policy_loss("from_a_file", LossRules(needs_rollout_logprobs=True))
def loss(inputs, config):
    raise NameError("never called here")

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    """Registered names do not outlive their test."""
    registry.list_advantage_estimators(), registry.list_policy_losses()
    kept = [(kind, dict(kind.entries)) for kind in (registry._estimators, registry._losses)]
    yield
    for kind, entries in kept:
        kind.entries.clear()
        kind.entries.update(entries)


def batch() -> AdvantageInputs:
    return AdvantageInputs(
        token_rewards=torch.tensor([[1.0, 0.0], [0.0, 3.0]]),
        loss_mask=torch.tensor([[True, False], [True, True]]),
        group_ids=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
    )


def zeros(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    return finish(inputs, config, 0.0 * inputs.masked().logprobs)


def test_names_and_rules_are_those_of_the_table() -> None:
    assert registry.list_advantage_estimators() == sorted(ESTIMATORS)
    assert registry.list_policy_losses() == sorted(POLICY_LOSSES)
    for name, rules in ESTIMATORS.items():
        assert registry.estimator_rules(name) == rules
    for name, loss in POLICY_LOSSES.items():
        assert registry.loss_rules(name) == loss
        assert (registry.get_prepare(name) is not None) == (name in ("clip_cov", "kl_cov"))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"advantage_estimator: unknown advantage estimator 'gpro'; known: dr"):
        registry.get_advantage_estimator("gpro")
    with pytest.raises(ConfigurationError, match=r"policy_loss_type: unknown policy loss 'ppo'; known: bnpo, cispo"):
        registry.get_policy_loss("ppo")


def test_a_registered_loss_is_found_by_its_name_with_its_rules() -> None:
    rules = LossRules(off_policy="none")
    registry.register_policy_loss("zeros", rules)(zeros)
    assert registry.get_policy_loss("zeros") is zeros
    assert registry.loss_rules("zeros") == rules
    assert "zeros" in registry.list_policy_losses()


def test_a_name_is_not_given_twice_but_a_function_may_register_again() -> None:
    registry.register_policy_loss("zeros")(zeros)
    registry.register_policy_loss("zeros")(zeros)
    with pytest.raises(ConfigurationError, match="'zeros' is registered already"):
        registry.register_policy_loss("zeros")(registry.get_policy_loss("regular"))


@pytest.fixture
def user_code(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AlgorithmConfig]:
    """Makes a function importable and returns a configuration that names it."""

    def place(estimator: Callable[..., object]) -> AlgorithmConfig:
        module = ModuleType("user_code_of_a_test")
        module.estimator = estimator  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "user_code_of_a_test", module)
        return AlgorithmConfig(advantage_estimator="user_code_of_a_test:estimator")

    return place


def test_a_registered_estimator_gets_what_ours_get(user_code: Callable[..., AlgorithmConfig]) -> None:
    @outcome_estimator("half_score")
    def half_score(outcomes: Outcomes, config: AlgorithmConfig) -> torch.Tensor:
        return outcomes.scores / 2

    config = user_code(half_score)
    assert compute_advantages(batch(), config).advantages.tolist() == [[0.5, 0.0], [1.5, 1.5]]
    rules = EstimatorRules(needs_group=True, step_wise=True)
    assert registry.estimator_rules("half_score") == registry.estimator_rules(config.advantage_estimator) == rules


def test_an_estimator_cannot_put_anything_on_masked_tokens(user_code: Callable[..., AlgorithmConfig]) -> None:
    def everywhere(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
        return Advantages(advantages=torch.full((2, 2), torch.nan), returns=torch.ones(2, 2))

    result = compute_advantages(batch(), user_code(everywhere))
    assert result.returns.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert result.advantages.isnan().tolist() == [[True, False], [True, True]]


def test_an_estimator_that_returns_another_shape_is_named(user_code: Callable[..., AlgorithmConfig]) -> None:
    def flat(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
        return Advantages(advantages=torch.ones(2), returns=torch.ones(2, 2))

    with pytest.raises(ConfigurationError, match=r"returned advantages of shape \(2,\), expected \(2, 2\)"):
        compute_advantages(batch(), user_code(flat))


def test_a_function_of_an_importable_module_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_a_test.py").write_text(USER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    config = AlgorithmConfig(advantage_estimator="my_rewards_for_a_test:twice_the_score")
    assert compute_advantages(batch(), config).advantages.tolist() == [[2.0, 0.0], [6.0, 6.0]]
    assert registry.estimator_rules(config.advantage_estimator) == EstimatorRules()
    assert registry.loss_rules("my_rewards_for_a_test:loss") == LossRules(needs_rollout_logprobs=True)


def test_a_function_of_a_file_is_used_and_the_file_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(USER_FILE)
    first = registry.get_advantage_estimator(f"{path}:twice_the_score")
    assert registry.get_advantage_estimator(f"{path}:twice_the_score") is first
    assert first(batch(), AlgorithmConfig()).advantages.tolist() == [[2.0, 0.0], [6.0, 6.0]]


def test_two_files_of_the_same_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(inputs, config):\n    return {folder!r}\n")
    found = [load_callable(f"{tmp_path}/{folder}/mine.py:f", "key")(None, None) for folder in ("a", "b")]
    assert found == ["a", "b"]


def test_threads_that_load_a_file_at_once_all_find_what_it_defines(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import threading\nthreading.Event().wait(0.2)\ndef f(): return 1\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_callable(f"{path}:f", "key"), range(4)))
    assert {function() for function in found} == {1}
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":f", "must be written module:function"),
        ("module:", "must be written module:function"),
        ("no_such_module_here:f", "cannot import no_such_module_here .ModuleNotFoundError"),
        ("math:no_such_function", "math has no no_such_function"),
        ("math:pi", "pi is not callable"),
        ("/no/such/file.py:f", "FileNotFoundError: no such file"),
    ],
)
def test_what_cannot_be_loaded_is_said(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        registry.get_policy_loss(name)


def test_a_file_that_raises_is_named_and_not_half_loaded(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('boom')\n")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"broken\.py.*RuntimeError: boom"):
            registry.get_policy_loss(f"{path}:f")


def test_rules_and_checks_import_no_torch() -> None:
    code = "import sys, skyrl_core.config.algorithm_checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
