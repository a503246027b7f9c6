"""Rollout metrics, worked out by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from skyrl_core.data.carriers import Rollout, StopReason
from skyrl_core.generators.metrics import rollout_metrics


def _rollout(
    uid: str,
    length: int,
    reward: float,
    *,
    stop: StopReason = "stop",
    error: str | None = None,
    metrics: Mapping[str, float] | None = None,
    token: int = 9,
) -> Rollout:
    rewards = np.zeros(max(length, 1), dtype=np.float32)
    rewards[-1] = reward
    return Rollout(
        uid=uid,
        sample_index=0,
        prompt_ids=np.array([1], dtype=np.int64),
        response_ids=np.full(length, token, dtype=np.int64),
        loss_mask=np.ones(length, dtype=np.int64),
        rollout_logprobs=None,
        token_rewards=rewards,
        stop_reason=stop,
        policy_versions=(0,),
        env_class="arithmetic",
        env_metrics=metrics or {},
        error=error,
    )


def test_counts_rewards_and_endings_by_hand():
    metrics = rollout_metrics(
        [
            _rollout("a", 2, 1.0, metrics={"format": 1.0}),
            _rollout("a", 4, 0.0, stop="length", metrics={"format": 0.0}),
            _rollout("b", 6, -0.5, metrics={"format": 1.0}),
            _rollout("b", 8, 0.0, metrics={"format": 1.0}),
        ],
        2,
    )
    assert metrics == pytest.approx(
        {
            "generate/failed_trajectories": 0.0,
            "generate/min_num_tokens": 2.0,
            "generate/max_num_tokens": 8.0,
            "generate/avg_num_tokens": 5.0,
            "generate/std_num_tokens": 5.0**0.5,
            "generate/avg_tokens_non_zero_rewards": 2.0,
            "generate/avg_tokens_zero_rewards": 6.0,
            "generate/empty_responses": 0.0,
            "generate/truncated_share": 0.25,
            "reward/avg_raw_reward": 0.125,
            "reward/mean_positive_reward": 0.25,
            "reward/avg_pass_at_2": 0.5,
            "environment/format": 0.75,
        }
    )


def test_failed_trajectories_are_counted_and_in_no_average():
    metrics = rollout_metrics([_rollout("a", 2, 1.0), _rollout("b", 50, 0.0, error="OSError: x")], 1)
    assert metrics["generate/failed_trajectories"] == 1.0
    assert metrics["generate/max_num_tokens"] == 2.0
    assert metrics["reward/avg_raw_reward"] == 1.0
    assert metrics["reward/avg_pass_at_1"] == 1.0


def test_responses_without_text_are_counted_as_empty():
    rows: list[Any] = [_rollout("a", 0, 0.0), _rollout("b", 1, 0.0, token=2), _rollout("c", 1, 0.0)]
    assert rollout_metrics(rows, 1, eos_token_ids=(2,))["generate/empty_responses"] == 2.0
    assert rollout_metrics(rows, 1)["generate/empty_responses"] == 1.0


def test_nothing_but_failures_leaves_no_average_to_report():
    assert rollout_metrics([_rollout("a", 1, 0.0, error="x")], 1) == {"generate/failed_trajectories": 1.0}


def test_what_an_environment_aggregates_to_nan_is_left_out_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def aggregate(reports: Any) -> dict[str, float]:
        return {"calls_per_error": float("nan"), "calls": float(len(reports))}

    monkeypatch.setattr("skyrl_core.environments.arithmetic.ArithmeticEnv.aggregate_metrics", staticmethod(aggregate))
    metrics = rollout_metrics([_rollout("a", 1, 0.0), _rollout("b", 1, 0.0)], 1)
    named = {name: value for name, value in metrics.items() if name.startswith("environment/")}
    assert named == {"environment/calls": 2.0}
    assert "environment arithmetic aggregates its metric calls_per_error to nan; left out" in caplog.text
