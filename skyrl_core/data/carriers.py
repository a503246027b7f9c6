"""What flows between stages: prompts, rollouts, training batches. Frozen, checked, NumPy only.

Shapes: P prompt tokens, R response tokens, B rows, T = longest prompt + longest response of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Message = dict[str, str]
StopReason = Literal["stop", "length", "abort", "error"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset row, ready to be rolled out.

    `uid` names the row within its dataset and never changes between runs on the same data.
    `env_extras` holds every other column (`reward_spec`, `extra_info`, ...), as SkyRL passes it to environments.
    """

    uid: str
    messages: tuple[Message, ...]
    env_class: str
    env_extras: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory, to the token.

    prompt_ids[P]; response_ids[R], loss_mask[R] (1 = sampled by the policy and to be trained on),
    rollout_logprobs[R] (0 where the policy did not sample) or None, token_rewards[R].
    A trajectory whose environment failed has `error` set: it carries no reward, is left out of its group's
    statistics and of the loss, and is counted.
    `greedy_reward` is the total reward of the prompt's greedy completion, for estimators that ask for it.
    """

    uid: str
    sample_index: int
    prompt_ids: IntArray
    response_ids: IntArray
    loss_mask: IntArray
    rollout_logprobs: FloatArray | None
    token_rewards: FloatArray
    stop_reason: StopReason
    policy_versions: tuple[int, ...]
    data_source: str = "unknown"
    env_class: str = ""
    turns: int = 1
    env_metrics: Mapping[str, float] = field(default_factory=dict)
    greedy_reward: float | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        for name in ("prompt_ids", "response_ids", "loss_mask"):
            _require(getattr(self, name).dtype == np.int64, f"{name} of {self.uid} must be int64")
        _require(len(self.loss_mask) == length, f"loss_mask of {self.uid}: {len(self.loss_mask)} for {length} tokens")
        _require(
            len(self.token_rewards) == length or (length == 0 and len(self.token_rewards) == 1),
            f"token_rewards of {self.uid}: {len(self.token_rewards)} for {length} tokens",
        )
        if self.rollout_logprobs is not None:
            _require(
                len(self.rollout_logprobs) == length,
                f"rollout_logprobs of {self.uid}: {len(self.rollout_logprobs)} for {length} tokens",
            )

    @property
    def reward(self) -> float:
        """The trajectory's total reward (an empty response keeps its reward in the single entry)."""
        return float(self.token_rewards.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The trajectories of one step, prompt after prompt, samples of a prompt side by side."""

    step: int
    rollouts: Sequence[Rollout]

    def __len__(self) -> int:
        return len(self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Padded rows of one step, ready for the trainer. All arrays are [B, T] unless noted.

    Prompts are padded on the left, responses on the right, so column `prompt_width` is the first response token of
    every row. `loss_mask`, `token_rewards`, log-probabilities, values, advantages and returns stand at the column of
    the token they describe; log-probabilities at masked-out columns are 0 and never read.
    `group_ids` [B] numbers the prompts: rows with the same number answer the same prompt.
    `valid` [B] is False for rows whose environment failed (their loss mask is all zero).
    `trajectory_ids` [B] numbers the trajectories where each turn is a row, `greedy_rewards` [B] is the reward of the
    prompt's greedy completion, where the estimator asks for it.
    Absent is None.
    """

    step: int
    prompt_width: int
    input_ids: IntArray
    attention_mask: IntArray
    loss_mask: IntArray
    token_rewards: FloatArray
    group_ids: IntArray
    valid: NDArray[np.bool_]
    trajectory_ids: IntArray | None = None
    greedy_rewards: FloatArray | None = None
    rollout_logprobs: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    advantages: FloatArray | None = None
    returns: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        _require(len(shape) == 2, f"input_ids must be [B, T], got {shape}")
        _require(0 <= self.prompt_width <= shape[1], f"prompt_width {self.prompt_width} outside [0, {shape[1]}]")
        for name in ("attention_mask", "loss_mask", "token_rewards", "rollout_logprobs", "old_logprobs"):
            self._check_shape(name, shape)
        for name in ("ref_logprobs", "values", "advantages", "returns"):
            self._check_shape(name, shape)
        for name in ("group_ids", "valid", "trajectory_ids", "greedy_rewards"):
            self._check_shape(name, shape[:1])

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        array = getattr(self, name)
        _require(array is None or array.shape == shape, f"{name} must be {shape}, got {getattr(array, 'shape', None)}")

    @property
    def size(self) -> int:
        """Number of rows, B."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an update did: the policy version it produced (= step) and its averaged metrics."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]
