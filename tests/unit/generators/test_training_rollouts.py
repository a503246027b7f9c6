"""What a training step samples: as many answers as configured, and a greedy one where advantages compare with it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.generators.training_rollouts import roll_out, with_greedy_rewards


def rollout(uid: str, reward: float, *, sample: int = 0, error: str | None = None) -> Rollout:
    one = np.ones(1, dtype=np.int64)
    return Rollout(
        uid=uid,
        sample_index=sample,
        prompt_ids=one,
        response_ids=one,
        loss_mask=one,
        rollout_logprobs=None,
        token_rewards=np.array([reward], dtype=np.float32),
        stop_reason="stop",
        policy_versions=(3,),
        error=error,
    )


class Recorder:
    """A generator that notes what it was asked and rewards greedy answers with 2, sampled ones with 1."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def generate(self, prompts: Sequence[Prompt], *, n_samples: int, **how: Any) -> list[Rollout]:
        self.calls.append({"n_samples": n_samples, **how})
        reward = 2.0 if how["sampling"].temperature == 0 else 1.0
        return [rollout(prompt.uid, reward, sample=n) for prompt in prompts for n in range(n_samples)]


def roll(estimator: str) -> tuple[Recorder, list[Rollout]]:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_generate_length": 6}
    config = SkyRLConfig.model_validate(
        {
            "trainer": {"algorithm": {"advantage_estimator": estimator}},
            "generator": {"n_samples_per_prompt": 2, "sampling_params": sampling},
        }
    )
    prompts = [Prompt(uid=uid, messages=(), env_class="e") for uid in ("a", "b")]
    generator = Recorder()
    return generator, asyncio.run(roll_out(generator, prompts, config, step=4, run_seed=9))


def test_estimators_without_a_greedy_baseline_sample_once() -> None:
    generator, rows = roll("grpo")
    assert [call["n_samples"] for call in generator.calls] == [2]
    assert [(row.uid, row.sample_index, row.greedy_reward) for row in rows] == [
        ("a", 0, None),
        ("a", 1, None),
        ("b", 0, None),
        ("b", 1, None),
    ]


def test_remax_answers_every_prompt_greedily_as_well() -> None:
    generator, rows = roll("remax")
    assert [call["n_samples"] for call in generator.calls] == [2, 1]
    assert generator.calls[0]["sampling"].temperature == 0.7
    assert generator.calls[1]["sampling"] == SamplingParams(temperature=0.0, max_generate_length=6)
    assert {call["step"] for call in generator.calls} == {4}
    assert [row.greedy_reward for row in rows] == [2.0] * 4
    assert [row.reward for row in rows] == [1.0] * 4


def test_samples_whose_greedy_answer_failed_fail_with_its_reason() -> None:
    rows = with_greedy_rewards(
        [rollout("a", 1.0), rollout("a", 0.0, error="own"), rollout("b", 1.0)],
        [rollout("a", 0.0, error="boom"), rollout("b", 0.5)],
    )
    assert [row.error for row in rows] == ["the prompt's greedy completion failed: boom", "own", None]
    assert [row.greedy_reward for row in rows] == [None, None, 0.5]


def test_a_greedy_answer_of_several_turns_has_the_reward_of_all_of_them() -> None:
    greedy = [rollout("a", 0.25), rollout("a", 0.5)]
    assert with_greedy_rewards([rollout("a", 1.0)], greedy)[0].greedy_reward == pytest.approx(0.75)
