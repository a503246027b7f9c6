"""Rewards get one form, several functions add up, long responses pay."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.algorithms.rewards import combine_rewards, overlong_penalty, shape_overlong, token_rewards
from skyrl_core.data.carriers import Rollout
from skyrl_core.errors import RewardError


def test_a_total_stands_on_the_last_token() -> None:
    result = token_rewards(0.5, 3, "u1/0")
    assert result is not None
    assert result.dtype == np.float32
    assert result.tolist() == [0.0, 0.0, 0.5]


def test_token_rewards_stay_where_they_are() -> None:
    result = token_rewards([0.25, True, 2], 3, "u1/0")
    assert result is not None
    assert result.tolist() == [0.25, 1.0, 2.0]


def test_an_empty_response_keeps_its_reward() -> None:
    for reward in (0.5, [0.5]):
        result = token_rewards(reward, 0, "u1/0")
        assert result is not None
        assert result.tolist() == [0.5]


def test_none_is_not_zero() -> None:
    assert token_rewards(None, 3, "u1/0") is None


def test_numbers_of_every_kind_are_taken() -> None:
    for number in (1, True, 1.0, np.float32(1.0), np.int64(1), np.bool_(True)):
        result = token_rewards(number, 1, "u")
        assert result is not None
        assert result.tolist() == [1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (math.nan, "u7/3: the reward is nan; return None"),
        (math.inf, "u7/3: the reward is inf"),
        ([0.0, math.nan], "u7/3, token 1: the reward is nan"),
        ([1.0], "u7/3: 1 token rewards for a response of 2 tokens"),
        ("1.0", "u7/3: a reward must be a number, .* got str"),
        ([[1.0], [2.0]], "u7/3, token 0: .* got list"),
        (1j, "got complex"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_sample(reward: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        token_rewards(reward, 2, "u7/3")  # type: ignore[arg-type]


def test_functions_add_up_with_their_weights_and_report_themselves() -> None:
    """2 · 1 + 0.5 · 0.5 - 1 · 3 = -0.75."""
    combined = combine_rewards({"a": 1.0, "b": 0.5, "c": 3}, {"a": 2.0, "b": 0.5, "c": -1.0}, "u")
    assert combined.total == pytest.approx(-0.75)
    assert combined.metrics == {"reward/a": 1.0, "reward/b": 0.5, "reward/c": 3.0}


def test_a_function_that_cannot_score_does_not_count() -> None:
    combined = combine_rewards({"a": 1.0, "b": None}, {"a": 2.0, "b": 5.0}, "u")
    assert combined.total == 2.0
    assert combined.metrics == {"reward/a": 1.0}
    assert combine_rewards({"a": None}, {"a": 1.0}, "u").total is None


def test_a_broken_value_names_sample_and_function() -> None:
    with pytest.raises(RewardError, match="u9, format: the reward is nan"):
        combine_rewards({"format": math.nan}, {"format": 1.0}, "u9")
    with pytest.raises(RewardError, match=r"u9: reward functions \['a'\] have weights for \['b'\]"):
        combine_rewards({"a": 1.0}, {"b": 1.0}, "u9")


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_overlong_penalty_falls_in_a_line_within_the_buffer(length: int, expected: float) -> None:
    """Maximum 100, buffer 20: free up to 80, -1 from 100 on; times the factor."""
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(expected)
    assert overlong_penalty(length, 100, 20, 0.5) == pytest.approx(expected / 2)


@given(length=st.integers(0, 300), maximum=st.integers(1, 200), buffer=st.integers(1, 200))
def test_a_longer_response_never_pays_less(length: int, maximum: int, buffer: int) -> None:
    buffer = min(buffer, maximum)
    now, next_one = (overlong_penalty(n, maximum, buffer, 1.0) for n in (length, length + 1))
    assert -1.0 <= next_one <= now <= 0.0


def test_impossible_buffers_and_factors_are_refused() -> None:
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=r"within 1\.\.100 .* got"):
            overlong_penalty(1, 100, buffer, 1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        overlong_penalty(1, 100, 20, -1.0)


def rollout(length: int, error: str | None = None) -> Rollout:
    zeros = np.zeros(max(length, 1), dtype=np.float32)
    zeros[-1] = 1.0
    ids = np.zeros(length, dtype=np.int64)
    return Rollout(
        uid="u",
        sample_index=0,
        prompt_ids=np.zeros(2, dtype=np.int64),
        response_ids=ids,
        loss_mask=ids,
        rollout_logprobs=None,
        token_rewards=zeros,
        stop_reason="stop",
        policy_versions=(0,),
        error=error,
    )


def test_shaping_changes_the_last_token_of_a_copy() -> None:
    """10 tokens, maximum 10, buffer 4: 1 - 1 = 0."""
    before = rollout(10)
    after = shape_overlong(before, 10, 4, 1.0)
    assert (before.reward, after.reward) == (1.0, 0.0)
    assert after.token_rewards[:-1].tolist() == [0.0] * 9
    assert shape_overlong(rollout(8), 10, 4, 1.0).reward == pytest.approx(0.5)
    assert shape_overlong(rollout(0), 10, 4, 1.0).reward == 1.0


def test_failed_rollouts_are_left_alone() -> None:
    failed = rollout(10, error="boom")
    assert shape_overlong(failed, 10, 4, 1.0) is failed
