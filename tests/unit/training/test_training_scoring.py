"""Rollouts become padded rows; rewards become advantages and metrics, all derived by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.data.carriers import Rollout, RolloutBatch
from skyrl_core.errors import RewardError, TrainingError
from skyrl_core.training.scoring import build_training_batch, rollout_metrics, score


def rollout(uid, prompt, response, reward, *, mask=None, logprobs=None, error=None, stop="stop", rewards=None):
    length = len(response)
    if rewards is None:
        rewards = [0.0] * (max(length, 1) - 1) + [reward]
    return Rollout(
        uid=uid,
        sample_index=0,
        prompt_ids=np.array(prompt, dtype=np.int64),
        response_ids=np.array(response, dtype=np.int64),
        loss_mask=np.array(mask if mask is not None else [1] * length, dtype=np.int64),
        rollout_logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
        token_rewards=np.array(rewards, dtype=np.float32),
        stop_reason=stop,
        policy_versions=(0,),
        error=error,
    )


def batch_of(*rollouts):
    return build_training_batch(RolloutBatch(step=4, rollouts=rollouts), pad_token_id=99)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    batch = batch_of(
        rollout("a", [1, 2], [3, 4, 5], 1.0, mask=[1, 0, 1], logprobs=[-0.1, -7.0, -0.3]),
        rollout("b", [6], [7], 2.0, logprobs=[-0.4]),
    )
    assert (batch.step, batch.prompt_width) == (4, 2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [99, 6, 7, 99, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]
    assert batch.token_rewards.tolist() == [[0, 0, 0, 0, 1], [0, 0, 2, 0, 0]]
    # The observation's log-probability is not the policy's: it is left out.
    np.testing.assert_allclose(batch.rollout_logprobs, [[0, 0, -0.1, 0, -0.3], [0, 0, -0.4, 0, 0]], rtol=1e-6)


def test_groups_are_numbered_by_first_appearance_of_the_prompt():
    uids = ["x", "x", "k", "x", "a"]
    assert batch_of(*(rollout(uid, [1], [2], 0.0) for uid in uids)).group_ids.tolist() == [0, 0, 1, 0, 2]


def test_failed_trajectory_is_no_valid_row_and_carries_no_reward():
    failed = rollout("a", [1], [2, 3], math.nan, logprobs=[-1, -1], error="environment broke")
    batch = batch_of(rollout("a", [1], [2, 3], 1.0, logprobs=[-1, -1]), failed)
    assert batch.valid.tolist() == [True, False]
    assert batch.loss_mask[1].sum() == 0
    assert batch.token_rewards[1].tolist() == [0, 0, 0]
    assert batch.rollout_logprobs[1].tolist() == [0, 0, 0]


def test_empty_response_keeps_its_reward_and_trains_nothing():
    batch = batch_of(rollout("a", [1, 2], [], 0.5), rollout("a", [1, 2], [], 0.0))
    assert batch.input_ids.tolist() == [[1, 2, 99], [1, 2, 99]]
    assert batch.token_rewards[0].tolist() == [0, 0, 0.5]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 0]]
    scored, metrics = score(batch, AlgorithmConfig())
    assert metrics["reward/mean"] == 0.25
    assert metrics["response/empty_share"] == 1.0
    assert not scored.advantages.any()


def test_a_step_without_usable_rows_is_refused_with_the_reason():
    with pytest.raises(TrainingError, match="step 4 has no trajectory"):
        batch_of()
    with pytest.raises(TrainingError, match="prompt of q is empty"):
        batch_of(rollout("q", [], [1], 0.0))
    with pytest.raises(
        TrainingError, match="1 of 2 trajectories have no rollout log-probabilities, among them one of b"
    ):
        batch_of(rollout("a", [1], [2], 0.0, logprobs=[-1]), rollout("b", [1], [2], 0.0))


def test_failed_trajectory_may_lack_logprobs_that_the_others_have():
    failed = rollout("b", [1], [], 0.0, error="broke")
    batch = batch_of(rollout("a", [1], [2], 0.0, logprobs=[-1]), failed)
    assert batch.rollout_logprobs.tolist() == [[0, -1], [0, 0]]
    assert batch_of(rollout("a", [1], [2], 0.0), failed).rollout_logprobs is None


def test_grpo_advantages_and_reward_metrics_by_hand():
    failed = rollout("a", [1], [2], 100.0, error="broke")
    batch = batch_of(
        rollout("a", [1], [2, 3], 1.0, mask=[1, 0]),
        rollout("a", [1], [2], 0.0),
        failed,
        rollout("b", [1], [2, 3, 4, 5], 1.0),
        rollout("b", [1], [2], 1.0),
    )
    scored, metrics = score(batch, AlgorithmConfig())
    # Group a: rewards 1 and 0 (the failed one left out), mean 0.5, standard deviation √0.5. Group b does not vary.
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert scored.advantages[0].tolist() == pytest.approx([0, expected, 0, 0, 0])
    assert scored.advantages[1].tolist() == pytest.approx([0, -expected, 0, 0, 0])
    assert not scored.advantages[2:].any()
    assert scored.returns[3].tolist() == [0, 1, 1, 1, 1]
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": math.sqrt(3) / 4,
            "reward/zero_variance_share": 0.5,
            "reward/failed_share": 0.2,
            "response/length_mean": 2.0,
            "response/length_min": 1.0,
            "response/length_max": 4.0,
            "response/empty_share": 0.0,
            "batch/trained_tokens": 7.0,
        }
    )


def test_zero_variance_filter_takes_groups_without_signal_out_of_the_loss():
    rows = [rollout("a", [1], [2], reward) for reward in (1.0, 0.0)] + [rollout("b", [1], [2], 1.0) for _ in range(2)]
    scored, metrics = score(batch_of(*rows), AlgorithmConfig(zero_variance_filter=True))
    assert scored.loss_mask.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]
    assert metrics["batch/trained_tokens"] == 2


def test_mismatch_is_measured_over_trained_tokens_only():
    batch = batch_of(
        rollout("a", [1], [2, 3], 1.0, mask=[1, 0], logprobs=[-1.0, -5.0]),
        rollout("a", [1], [2], 0.0, logprobs=[-2.0]),
    )
    old = np.array([[0, -1.5, 9.0], [0, -1.8, 0]], dtype=np.float32)
    _, metrics = score(replace(batch, old_logprobs=old), AlgorithmConfig())
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.35)
    assert metrics["mismatch/abs_max"] == pytest.approx(0.5)
    # k3 with d = rollout - old: exp(-d) + d - 1 at d = 0.5 and d = -0.2.
    expected = (math.exp(-0.5) + 0.5 - 1 + math.exp(0.2) - 0.2 - 1) / 2
    assert metrics["mismatch/kl"] == pytest.approx(expected, rel=1e-5)


def test_mismatch_is_absent_without_both_sides():
    _, metrics = score(batch_of(rollout("a", [1], [2], 1.0)), AlgorithmConfig())
    assert not any(name.startswith("mismatch/") for name in metrics)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_reward_that_is_no_number_is_an_error_naming_the_sample(reward):
    with pytest.raises(RewardError, match=f"step 4: sample 0 of b has reward {reward}"):
        batch_of(rollout("a", [1], [2], 0.0), rollout("b", [1], [2], reward))


def test_all_rows_failed_gives_zero_advantages_and_says_so():
    scored, metrics = score(batch_of(rollout("a", [1], [2], 0.0, error="broke")), AlgorithmConfig())
    assert not scored.advantages.any()
    assert metrics == {"reward/failed_share": 1.0, "batch/trained_tokens": 0.0}


def test_truncated_share_counts_trajectories_that_did_not_fail():
    rows = [
        rollout("a", [1], [2], 0.0, stop="length"),
        rollout("a", [1], [2], 0.0),
        rollout("a", [1], [2], 0.0),
        rollout("a", [1], [2], 0.0, stop="length", error="broke"),
    ]
    assert rollout_metrics(RolloutBatch(step=1, rollouts=rows)) == {"response/truncated_share": pytest.approx(1 / 3)}
    assert rollout_metrics(RolloutBatch(step=1, rollouts=rows[3:])) == {}
