"""What a batch of rollouts looked like, under SkyRL's names where it has them."""

from collections.abc import Sequence

import numpy as np

from skyrl_core.data.carriers import Rollout
from skyrl_core.environments.metrics import aggregate_env_metrics


def rollout_metrics(rollouts: Sequence[Rollout], n_samples: int) -> dict[str, float]:
    """Token counts, rewards, endings and environment metrics over trajectories whose environment did not fail.

    `reward/avg_pass_at_{n}` is the share of prompts with any positive reward among their samples, as in SkyRL.
    """
    sound = [rollout for rollout in rollouts if rollout.error is None]
    metrics = {"generate/failed_trajectories": float(len(rollouts) - len(sound))}
    if not sound:
        return metrics
    lengths = np.array([len(rollout.response_ids) for rollout in sound], dtype=np.float64)
    rewards = np.array([rollout.reward for rollout in sound], dtype=np.float64)
    metrics |= {
        "generate/min_num_tokens": float(lengths.min()),
        "generate/max_num_tokens": float(lengths.max()),
        "generate/avg_num_tokens": float(lengths.mean()),
        "generate/std_num_tokens": float(lengths.std()),
        "generate/avg_tokens_non_zero_rewards": _mean(lengths[rewards > 0]),
        "generate/avg_tokens_zero_rewards": _mean(lengths[rewards <= 0]),
        "generate/empty_responses": float((lengths == 0).sum()),
        "generate/truncated_share": float(np.mean([rollout.stop_reason == "length" for rollout in sound])),
        "reward/avg_raw_reward": float(rewards.mean()),
        f"reward/avg_pass_at_{n_samples}": _pass_share(sound),
    }
    return metrics | aggregate_env_metrics(
        [rollout.env_class for rollout in sound], [rollout.env_metrics for rollout in sound]
    )


def _mean(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    return float(values.mean()) if len(values) else 0.0


def _pass_share(rollouts: Sequence[Rollout]) -> float:
    passed: dict[str, bool] = {}
    for rollout in rollouts:
        passed[rollout.uid] = passed.get(rollout.uid, False) or rollout.reward > 0
    return sum(passed.values()) / len(passed)
