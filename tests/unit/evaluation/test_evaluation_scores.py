"""Evaluation scores, worked out by hand and by brute force."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.data.carriers import Rollout, StopReason
from skyrl_core.errors import RolloutError
from skyrl_core.evaluation.metrics import (
    EvalReport,
    build_report,
    clustered_standard_error,
    pass_at_k,
)


def _rollout(
    uid: str,
    reward: float,
    *,
    source: str = "gsm8k",
    error: str | None = None,
    length: int = 2,
    stop: StopReason = "stop",
    per_token: list[float] | None = None,
) -> Rollout:
    rewards = [0.0] * (length - 1) + [reward] if per_token is None else per_token
    return Rollout(
        uid=uid,
        sample_index=0,
        prompt_ids=np.array([1], dtype=np.int64),
        response_ids=np.zeros(len(rewards), dtype=np.int64),
        loss_mask=np.ones(len(rewards), dtype=np.int64),
        rollout_logprobs=None,
        token_rewards=np.array(rewards, dtype=np.float32),
        stop_reason=stop,
        policy_versions=(4,),
        data_source=source,
        env_class="arithmetic",
        env_metrics={"format": float(reward > 0)},
        error=error,
    )


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 1, 4, 1.0),
        (10, 3, 5, 11 / 12),
    ],
)
def test_pass_at_k_by_hand(samples: int, passed: int, k: int, expected: float):
    assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(outcomes: list[bool], data: Any):
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_extrapolates_nothing(samples: int, passed: int, k: int):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, passed, k)


def test_standard_error_of_single_samples_is_the_ordinary_one():
    # Values 0, 1, 1, 1: mean .75, sample variance .25, over four.
    assert clustered_standard_error([[0.0], [1.0], [1.0], [1.0]]) == pytest.approx(math.sqrt(0.25 / 4))


def test_samples_that_agree_within_a_prompt_add_no_certainty():
    once = clustered_standard_error([[0.0], [1.0], [1.0]])
    assert clustered_standard_error([[0.0] * 5, [1.0] * 5, [1.0] * 5]) == pytest.approx(once)


def test_standard_error_with_unequal_groups_by_hand():
    # Mean 2/4; sums of deviations per group: (0-.5)+(1-.5) = 0, (1-.5) = .5, (0-.5) = -.5; G = 3.
    expected = math.sqrt((0 + 0.25 + 0.25) * 3 / 2) / 4
    assert clustered_standard_error([[0.0, 1.0], [1.0], [0.0]]) == pytest.approx(expected)


def test_one_prompt_has_no_standard_error():
    assert clustered_standard_error([[0.0, 1.0]]) is None


def test_scores_per_source_and_overall_by_hand():
    report = build_report(
        [
            _rollout("a", 1.0),
            _rollout("a", 0.0, stop="length", length=4),
            _rollout("b", 0.0),
            _rollout("b", 0.0),
            _rollout("c", -2.0, source="org/math"),
            _rollout("c", 0.5, source="org/math"),
        ],
        [_rollout("a", 1.0), _rollout("b", 1.0), _rollout("c", 0.0, source="org/math")],
    )
    metrics = report.metrics()
    gsm8k = {name.removeprefix("eval/gsm8k/"): value for name, value in metrics.items() if "/gsm8k/" in name}
    assert gsm8k == pytest.approx(
        {
            "avg_score": 0.25,
            "standard_error": 0.25,
            "pass_at_1": 0.25,
            "pass_at_2": 0.5,
            "mean_positive_reward": 0.25,
            "avg_num_tokens": 2.5,
            "truncated_share": 0.25,
            "trajectories": 4.0,
            "failed_trajectories": 0.0,
            "environment/format": 0.25,
            "greedy_score": 1.0,
        }
    )
    assert metrics["eval/org_math/avg_score"] == -0.75
    assert metrics["eval/org_math/pass_at_1"] == 0.5
    assert metrics["eval/org_math/mean_positive_reward"] == 0.25
    assert "eval/org_math/standard_error" not in metrics
    assert metrics["eval/all/avg_score"] == pytest.approx(-0.5 / 6)
    assert metrics["eval/all/pass_at_2"] == pytest.approx(2 / 3)
    assert metrics["eval/all/greedy_score"] == pytest.approx(2 / 3)
    assert report.policy_versions == (4,)


def test_a_score_is_the_trajectorys_total_reward_not_its_last_tokens():
    report = build_report([_rollout("a", 0.0, per_token=[0.5, 0.5, -0.25])])
    assert report.overall.avg_score == 0.75
    assert report.overall.pass_at == {1: 1.0}


def test_failed_trajectories_are_counted_and_scored_nowhere():
    report = build_report(
        [_rollout("a", 1.0), _rollout("a", 0.0, error="OSError: x"), _rollout("b", 0.0), _rollout("b", 1.0)]
    )
    assert report.overall.failed == 1
    assert report.overall.avg_score == pytest.approx(2 / 3)
    # Prompt a has one trajectory left: it takes part in pass@1 and not in pass@2.
    assert report.overall.pass_at == {1: pytest.approx(0.75), 2: 1.0}


def test_a_source_of_failures_only_has_no_scores():
    report = build_report([_rollout("a", 1.0), _rollout("z", 0.0, source="broken", error="x")])
    assert set(report.sources) == {"gsm8k"}
    assert report.overall.failed == 1


@pytest.mark.parametrize("rollouts", [[], [_rollout("a", 0.0, error="x")]])
def test_nothing_to_score_is_an_error(rollouts: list[Rollout]):
    with pytest.raises(RolloutError, match=f"none of {len(rollouts)} evaluation trajectories"):
        build_report(rollouts)


def test_a_report_survives_json():
    report = build_report([_rollout("a", 1.0), _rollout("b", 0.0, source="other")], [_rollout("a", 1.0)])
    assert EvalReport.from_json(report.to_json()) == report
