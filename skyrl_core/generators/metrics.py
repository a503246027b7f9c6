"""What a batch of rollouts looked like, under SkyRL's names where it has them."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_core.data.carriers import Rollout
from skyrl_core.environments.metrics import aggregate_env_metrics


def rollout_metrics(
    rollouts: Sequence[Rollout], n_samples: int, eos_token_ids: Collection[int] = ()
) -> dict[str, float]:
    """Token counts, rewards, endings and environment metrics over the trajectories whose environment did not fail.

    `reward/avg_pass_at_{n}` is the share of prompts with any positive reward among their samples (SkyRL's; with n
    samples a prompt this is also the unbiased pass@n). Responses of nothing but an end-of-sequence token of
    `eos_token_ids` count as empty. Averages over no trajectory are left out, except `avg_tokens_(non_)zero_rewards`,
    which are 0 then, as in SkyRL. Environment metrics stand under `environment/`.
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
        "generate/avg_tokens_non_zero_rewards": _mean_or_zero(lengths[rewards > 0]),
        "generate/avg_tokens_zero_rewards": _mean_or_zero(lengths[rewards == 0]),
        "generate/empty_responses": float(sum(_is_empty(rollout, eos_token_ids) for rollout in sound)),
        "generate/truncated_share": float(np.mean([rollout.stop_reason == "length" for rollout in sound])),
        "reward/avg_raw_reward": float(rewards.mean()),
        "reward/mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
        f"reward/avg_pass_at_{n_samples}": _pass_share(sound),
    }
    reported = aggregate_env_metrics([row.env_class for row in sound], [row.env_metrics for row in sound])
    return metrics | {f"environment/{name}": value for name, value in reported.items()}


def _is_empty(rollout: Rollout, eos_token_ids: Collection[int]) -> bool:
    return all(int(token) in eos_token_ids for token in rollout.response_ids)


def _mean_or_zero(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _pass_share(rollouts: Sequence[Rollout]) -> float:
    passed: dict[str, bool] = {}
    for rollout in rollouts:
        passed[rollout.uid] = passed.get(rollout.uid, False) or rollout.reward > 0
    return sum(passed.values()) / len(passed)
