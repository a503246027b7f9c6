"""Environments by name: skyrl-gym's, ours, registered ones, and classes named in full."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import register, registry

from skyrl_core.environments.arithmetic import ArithmeticEnv
from skyrl_core.environments.registry import (
    environment_class,
    environment_names,
    make_environment,
    register_environment,
)
from skyrl_core.errors import ConfigurationError

TRUTH = {"reward_spec": {"method": "rule", "ground_truth": "46"}}


def test_skyrl_gyms_environments_and_ours_are_made_by_name() -> None:
    assert {"aime", "arithmetic", "gsm8k", "gsm8k_multi_turn", "search", "text2sql"} <= set(environment_names())
    assert type(make_environment("arithmetic", TRUTH)) is ArithmeticEnv
    gsm8k = make_environment("gsm8k", {"reward_spec": {"ground_truth": "72"}})
    assert gsm8k.step("... so #### 72")["reward"] == 1.0
    assert gsm8k.step("... so #### 71")["reward"] == 0.0


def test_a_class_may_be_named_in_full() -> None:
    named = make_environment("skyrl_core.environments.arithmetic:ArithmeticEnv", TRUTH)
    assert type(named) is ArithmeticEnv


def test_an_environment_that_users_register_with_skyrl_gym_is_found() -> None:
    register(id="mine", entry_point=ArithmeticEnv)
    try:
        assert type(make_environment("mine", TRUTH)) is ArithmeticEnv
    finally:
        del registry["mine"]


def test_registering_twice_is_fine_and_taking_a_name_is_not() -> None:
    entry_point = "skyrl_core.environments.arithmetic:ArithmeticEnv"
    try:
        register_environment("sums", entry_point)
        register_environment("sums", entry_point)
        assert environment_class("sums") is ArithmeticEnv
        with pytest.raises(ConfigurationError, match="'sums' is registered as skyrl_core"):
            register_environment("sums", "other.module:Env")
    finally:
        del registry["sums"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("arithmetics", "unknown environment 'arithmetics': did you mean arithmetic"),
        ("gms8k", "did you mean gsm8k"),
        ("zzz", "known are aime, arithmetic, gsm8k.*named as module:Class"),
        (
            "no.such.module:Env",
            "cannot import no.such.module .ModuleNotFoundError: No module named 'no'",
        ),
        ("json:Env", "environment=json:Env: json has no Env"),
        ("json:__name__", "__name__ is not callable"),
    ],
)
def test_an_unknown_name_is_a_configuration_error_with_a_hint(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_environment(name, {})


def test_an_environment_whose_imports_fail_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="No module named 'not_installed_anywhere'"):
        environment_class("needs_more:Env")


class Greedy(BaseTextEnv):
    """Changes what it was given."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        assert extras is not None
        extras["reward_spec"]["ground_truth"] = "changed"
        self.env_config = env_config


def test_samples_of_a_prompt_do_not_share_their_extras() -> None:
    register(id="greedy", entry_point=Greedy)
    try:
        extras = {"reward_spec": {"ground_truth": "46"}}
        made = make_environment("greedy", extras, env_config={"topk": 3})
        assert extras == {"reward_spec": {"ground_truth": "46"}}
        assert made.env_config == {"topk": 3}  # type: ignore[attr-defined]
    finally:
        del registry["greedy"]


def test_threads_may_make_the_first_environments_at_once() -> None:
    del registry["arithmetic"]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_environment("arithmetic", TRUTH), range(32)))
    assert all(type(env) is ArithmeticEnv for env in made)
