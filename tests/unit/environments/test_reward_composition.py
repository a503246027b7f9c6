"""Rewards from several weighted functions, and what happens when one of them cannot score or breaks."""

import math
from pathlib import Path

import pytest

from skyrl_core.config import load_config
from skyrl_core.config.environment import RewardConfig
from skyrl_core.data.carriers import Prompt
from skyrl_core.environments.composition import RewardComposer
from skyrl_core.environments.metrics import aggregate_env_metrics
from skyrl_core.errors import ConfigurationError, RewardError

PROMPT = Prompt(uid="q", messages=(), env_class="e", env_extras={"longest": 4})
OWN = """
def brevity(response, prompt):
    return 1.0 - len(response) / prompt.env_extras["longest"]

def unsure(response, prompt):
    return None

def broken(response, prompt):
    return float("nan")

def wrong(response, prompt):
    return "good"
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outside") / "own_rewards.py"
    path.write_text(OWN)
    return path


def compose(**rewards: tuple[str, float]) -> RewardComposer:
    return RewardComposer({name: RewardConfig(function=f, weight=w) for name, (f, w) in rewards.items()})


def test_without_functions_the_reward_is_the_environments() -> None:
    combined = RewardComposer({})(0.5, "abc", PROMPT, "q/0")
    assert (combined.total, combined.metrics) == (0.5, {})
    with pytest.raises(ValueError, match="the environment gave no reward"):
        RewardComposer({})(None, "abc", PROMPT, "q/0")


def test_weighted_values_add_up_and_each_is_a_metric(own: Path) -> None:
    """1 · 1 + (-0.5) · (1 - 3/4) = 0.875."""
    composer = compose(correct=("environment", 1.0), short=(f"{own}:brevity", -0.5))
    combined = composer(1.0, "abc", PROMPT, "q/0")
    assert combined.total == 0.875
    assert combined.metrics == {"reward/correct": 1.0, "reward/short": 0.25}


def test_a_function_that_cannot_score_does_not_count(own: Path) -> None:
    composer = compose(correct=("environment", 2.0), judge=(f"{own}:unsure", 5.0))
    assert composer(0.5, "a", PROMPT, "q/0").total == 1.0
    assert composer(0.5, "a", PROMPT, "q/0").metrics == {"reward/correct": 0.5}
    only = compose(judge=(f"{own}:unsure", 1.0))
    with pytest.raises(ValueError, match="judge could not score it"):
        only(1.0, "a", PROMPT, "q/0")


def test_a_value_that_is_no_number_names_sample_and_function(own: Path) -> None:
    for function, said in (("broken", "the reward is nan"), ("wrong", "got str")):
        with pytest.raises(RewardError, match=f"q/0, odd: .*{said}"):
            compose(odd=(f"{own}:{function}", 1.0))(1.0, "a", PROMPT, "q/0")
    with pytest.raises(RewardError, match="the environment of q/0 returned nan"):
        RewardComposer({})(math.nan, "a", PROMPT, "q/0")


def test_a_function_that_is_not_there_is_a_configuration_error(own: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"environment\.rewards\.odd\.function=.*has no missing"):
        compose(odd=(f"{own}:missing", 1.0))


def test_functions_are_named_by_words(own: Path) -> None:
    words = [
        "environment.rewards.correct.function=environment",
        f"environment.rewards.short.function={own}:brevity",
        "environment.rewards.short.weight=0.25",
    ]
    rewards = load_config(None, words).environment.rewards
    assert rewards["correct"] == RewardConfig(function="environment", weight=1.0)
    assert rewards["short"] == RewardConfig(function=f"{own}:brevity", weight=0.25)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "environment.rewards.odd.function=nowhere",
            r"odd\.function: must be written module:function or path",
        ),
        ("environment.rewards.odd.weight=much", r"environment\.rewards\.odd\.weight: input should be a valid number"),
        ("environment.rewards.odd.wieght=1", r"environment\.rewards\.odd\.wieght: extra inputs are not permitted"),
        ("environment.rewards.odd=5", r"environment\.rewards\.odd: input should be"),
    ],
)
def test_what_is_wrong_inside_an_entry_is_named(word: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_config(None, ["environment.rewards.odd.function=environment", word])
    with pytest.raises(ConfigurationError, match=r"environment\.rewards\.odd\.function is needed"):
        load_config(None, ["environment.rewards.odd.weight=2"])


def test_metrics_of_rewards_are_means_over_those_that_have_them() -> None:
    """Two environments, three trajectories: short is 1 and 0.5, or not scored."""
    reports = [{"reward/short": 1.0, "format": 1.0}, {"reward/short": 0.5}, {"format": 0.0}]
    arithmetic = "skyrl_core.environments.arithmetic:ArithmeticEnv"
    assert aggregate_env_metrics(["arithmetic", arithmetic, "arithmetic"], reports) == {
        "format": 0.5,
        "reward/short": 0.75,
    }
