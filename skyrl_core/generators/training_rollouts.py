"""The rollouts that a training step samples, with what its advantage estimator compares them to."""

from collections.abc import Sequence
from dataclasses import replace

from skyrl_core.algorithms.registry import estimator_rules
from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.generators.protocol import Generator


async def roll_out(
    generator: Generator, prompts: Sequence[Prompt], config: SkyRLConfig, *, step: int, run_seed: int
) -> list[Rollout]:
    """`n_samples_per_prompt` trajectories per prompt; see Generator.generate for the order and the errors.

    For estimators with a greedy baseline (remax) each prompt is also answered greedily, once, and its samples carry
    that answer's reward.
    """
    sampling = config.generator.sampling_params
    rollouts = await generator.generate(
        prompts,
        step=step,
        n_samples=config.generator.n_samples_per_prompt,
        sampling=sampling,
        run_seed=run_seed,
        purpose="rollout",
    )
    if not estimator_rules(config.trainer.algorithm.advantage_estimator).needs_greedy:
        return rollouts
    greedy = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1})
    baseline = await generator.generate(
        prompts, step=step, n_samples=1, sampling=greedy, run_seed=run_seed, purpose="rollout"
    )
    return with_greedy_rewards(rollouts, baseline)


def with_greedy_rewards(rollouts: Sequence[Rollout], greedy: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with the total reward of their prompt's greedy completion (all rows of it, where a turn is a row).

    Samples of a prompt whose greedy completion failed have nothing to be compared with: they fail too.
    """
    rewards: dict[str, float] = {}
    errors: dict[str, str] = {}
    for row in greedy:
        rewards[row.uid] = rewards.get(row.uid, 0.0) + row.reward
        if row.error is not None:
            errors.setdefault(row.uid, f"the prompt's greedy completion failed: {row.error}")
    return [
        replace(row, error=row.error or errors[row.uid])
        if row.uid in errors
        else replace(row, greedy_reward=rewards[row.uid])
        for row in rollouts
    ]
