"""Rewards before they become advantages: one form, several weighted functions, DAPO's penalty on length."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skyrl_core.data.carriers import FloatArray, Rollout
from skyrl_core.errors import RewardError

Reward = float | Sequence[float] | None
"""What an environment may return: a total, a reward for each response token, or None where it cannot score."""


def token_rewards(reward: Reward, response_length: int, sample: str) -> FloatArray | None:
    """The reward of each of `response_length` tokens, float32; None for None: the sample is left out of its group.

    A total stands on the last token. An empty response has one entry, which keeps its total. `sample` names the sample
    in messages. Raises RewardError for NaN and infinity, a wrong number of token rewards, or anything else.
    """
    if reward is None:
        return None
    entries = max(response_length, 1)
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        if len(reward) != entries:
            raise RewardError(f"{sample}: {len(reward)} token rewards for a response of {response_length} tokens")
        return np.array([_number(value, f"{sample}, token {t}") for t, value in enumerate(reward)], dtype=np.float32)
    rewards = np.zeros(entries, dtype=np.float32)
    rewards[-1] = _number(reward, sample)
    return rewards


def _number(value: object, sample: str) -> float:
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        number = float(value)
        if math.isfinite(number):
            return number
        raise RewardError(f"{sample}: the reward is {number}; return None where it cannot be scored")
    raise RewardError(
        f"{sample}: a reward must be a number, a number for each token, or None, got {type(value).__name__}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedReward:
    """total: the weighted sum, None when no function scored the sample. metrics: `reward/{name}` of each function that
    scored it, unweighted."""

    total: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def combine_rewards(values: Mapping[str, float | None], weights: Mapping[str, float], sample: str) -> CombinedReward:
    """Σ weight · value over reward functions by name. A function that returned None does not count for this sample.

    Raises RewardError for a value that is NaN, infinite or no number (it names sample and function), or when values
    and weights are not of the same functions.
    """
    if values.keys() != weights.keys():
        raise RewardError(f"{sample}: reward functions {sorted(values)} have weights for {sorted(weights)}")
    scored = {name: _number(value, f"{sample}, {name}") for name, value in values.items() if value is not None}
    return CombinedReward(
        total=math.fsum(weights[name] * value for name, value in scored.items()) if scored else None,
        metrics={f"reward/{name}": value for name, value in scored.items()},
    )


def overlong_penalty(response_length: int, max_response_length: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `factor`: 0 or below, to be added to a reward.

    0 up to max_response_length - buffer tokens, then falling in a line to -1 at max_response_length, -1 beyond. SkyRL
    sets the whole reward of a response beyond the maximum to 0 instead. Raises ValueError unless
    0 < buffer <= max_response_length and factor >= 0.
    """
    if not 0 < buffer <= max_response_length:
        raise ValueError(f"buffer must be within 1..{max_response_length} (max_response_length), got {buffer}")
    if factor < 0:
        raise ValueError(f"factor must not be negative, got {factor}")
    over = response_length - (max_response_length - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def shape_overlong(rollout: Rollout, max_response_length: int, buffer: int, factor: float) -> Rollout:
    """The rollout with `overlong_penalty` of its response's length added on its last token.

    Rollouts that failed stay as they are.
    """
    if rollout.error is not None:
        return rollout
    rewards = rollout.token_rewards.copy()
    rewards[-1] += np.float32(overlong_penalty(len(rollout.response_ids), max_response_length, buffer, factor))
    return replace(rollout, token_rewards=rewards)
