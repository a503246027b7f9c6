"""Rewards are finite numbers, and environment metrics are averaged by count."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import register, registry

from skyrl_core.environments.metrics import aggregate_env_metrics
from skyrl_core.environments.rewards import check_reward
from skyrl_core.errors import ConfigurationError, RewardError


@pytest.mark.parametrize(
    ("reward", "number"),
    [(1, 1.0), (-0.5, -0.5), (True, 1.0), (np.float32(0.25), 0.25), (np.array(2), 2.0), (np.int64(3), 3.0)],
)
def test_numbers_pass_as_floats(reward: object, number: float) -> None:
    checked = check_reward(reward, "train:3")
    assert checked == number
    assert type(checked) is float


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (None, "returned None as reward; it must be a number"),
        (float("nan"), "returned nan as reward; it must be finite"),
        (float("-inf"), "returned -inf as reward"),
        (np.float32("nan"), "returned nan as reward"),
        ("1", r"returned a str \('1'\) as reward"),
        ([0.0, 1.0], "returned a list"),
        (np.array([1.0]), "returned a ndarray"),
        (1j, "returned a complex"),
    ],
)
def test_anything_else_is_an_error_that_names_the_sample(reward: object, said: str) -> None:
    with pytest.raises(RewardError, match=f"^the environment of train:3 {said}"):
        check_reward(reward, "train:3")


class Turns(BaseTextEnv):
    """Forms a metric of its own."""

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"avg_turns": sum(report["turns"] for report in metrics) / len(metrics), "format": "not a number"}


def test_metrics_are_averaged_by_count_not_summed() -> None:
    metrics = [{"format": 1.0}, {"format": 0.0}, {"format": 1.0}, {}, {"format": True, "note": "x"}]
    assert aggregate_env_metrics(["arithmetic"] * 5, metrics) == {"format": 0.75}
    assert aggregate_env_metrics([], []) == {}


def test_classes_are_weighted_by_the_trajectories_that_report_a_metric() -> None:
    register(id="turns", entry_point=Turns)
    try:
        classes = ["turns", "gsm8k", "turns", "arithmetic", "gsm8k"]
        metrics: list[dict[str, Any]] = [{"turns": 1}, {"format": 0.0}, {"turns": 4}, {"format": 1.0}, {"format": 1.0}]
        assert aggregate_env_metrics(classes, metrics) == {"avg_turns": 2.5, "format": pytest.approx(2 / 3)}
    finally:
        del registry["turns"]


def test_an_unknown_class_and_unequal_lengths_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown environment"):
        aggregate_env_metrics(["zzz"], [{"format": 1.0}])
    with pytest.raises(ValueError):
        aggregate_env_metrics(["arithmetic"], [])


@given(st.lists(st.tuples(st.sampled_from(["arithmetic", "gsm8k"]), st.floats(-5, 5)), min_size=2), st.data())
def test_cutting_into_batches_and_weighting_by_count_gives_the_same(
    reports: list[tuple[str, float]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(reports) - 1))

    def mean(part: list[tuple[str, float]]) -> float:
        return aggregate_env_metrics([name for name, _ in part], [{"m": value} for _, value in part])["m"]

    weighted = (mean(reports[:cut]) * cut + mean(reports[cut:]) * (len(reports) - cut)) / len(reports)
    assert mean(reports) == pytest.approx(weighted)
