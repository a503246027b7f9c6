"""Rollouts become padded rows; rewards become advantages and metrics, all derived by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from skyrl_core.algorithms.kl_control import make_kl_controller
from skyrl_core.config import SkyRLConfig
from skyrl_core.config.algorithm import AlgorithmConfig, KLCtrlConfig, OffPolicyCorrectionConfig
from skyrl_core.data.carriers import Rollout, RolloutBatch
from skyrl_core.errors import RewardError, TrainingError
from skyrl_core.training.scoring import build_training_batch, score, shape_rewards


def rollout(
    uid,
    prompt,
    response,
    reward,
    *,
    mask=None,
    logprobs=None,
    error=None,
    stop="stop",
    rewards=None,
    sample=0,
    greedy=None,
):
    length = len(response)
    if rewards is None:
        rewards = [0.0] * (max(length, 1) - 1) + [reward]
    return Rollout(
        uid=uid,
        sample_index=sample,
        prompt_ids=np.array(prompt, dtype=np.int64),
        response_ids=np.array(response, dtype=np.int64),
        loss_mask=np.array(mask if mask is not None else [1] * length, dtype=np.int64),
        rollout_logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
        token_rewards=np.array(rewards, dtype=np.float32),
        stop_reason="stop",
        policy_versions=(0,),
        error=error,
        greedy_reward=greedy,
    )


def batch_of(*rollouts, **how):
    return build_training_batch(RolloutBatch(step=4, rollouts=rollouts), pad_token_id=99, **how)


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


def scored_with_engine(algorithm):
    batch = batch_of(
        rollout("a", [1], [2, 3], 1.0, mask=[1, 0], logprobs=[-1.0, -5.0]),
        rollout("a", [1], [2], 0.0, logprobs=[-2.0]),
    )
    old = np.array([[0, -1.5, 9.0], [0, -1.8, 0]], dtype=np.float32)
    return score(replace(batch, old_logprobs=old), algorithm)[1]


def test_mismatch_is_measured_over_trained_tokens_only():
    metrics = scored_with_engine(AlgorithmConfig())
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.35)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(0.5)
    # k3 with d = rollout - old: exp(-d) + d - 1 at d = 0.5 and d = -0.2.
    expected = (math.exp(-0.5) + 0.5 - 1 + math.exp(0.2) - 0.2 - 1) / 2
    assert metrics["mismatch/kl_k3"] == pytest.approx(expected, rel=1e-5)
    assert not any(name.startswith("off_policy/") for name in metrics)


def test_a_correction_reports_what_it_changes():
    """Ratios exp(old - rollout): exp(-0.5) = 0.61 and exp(0.2) = 1.22. A cap of 1.1 cuts the second, half of them."""
    correction = OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.1)
    metrics = scored_with_engine(AlgorithmConfig(off_policy_correction=correction))
    assert metrics["off_policy/tis_token_clip_high_ratio"] == 0.5
    assert metrics["off_policy/is_ratio_mean"] == pytest.approx((math.exp(-0.5) + math.exp(0.2)) / 2)


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


def kl_in_reward(**changes):
    values = {"use_kl_in_reward": True, "use_kl_loss": False, "kl_loss_coef": 0.5, "kl_estimator_type": "k1"}
    return AlgorithmConfig(**{**values, **changes})


def with_kl(rows, difference):
    """The batch with old log-probabilities `difference` above the reference's at every column."""
    batch = batch_of(*rows)
    old = np.full(batch.input_ids.shape, -1.0, dtype=np.float32)
    return replace(batch, old_logprobs=old, ref_logprobs=old - np.float32(difference))


def test_kl_in_the_reward_is_taken_off_each_trained_token():
    """Coefficient 0.5, KL 0.2 a token: 0.1 off for each of 2 and 1 trained tokens, so scores 0.8 and -0.1."""
    rows = [rollout("a", [1], [2, 3, 4], 1.0, mask=[1, 0, 1]), rollout("a", [1], [2], 0.0)]
    scored, metrics = score(with_kl(rows, 0.2), kl_in_reward(grpo_norm_by_std=False))
    assert scored.advantages[0].tolist() == pytest.approx([0, 0.45, 0, 0.45])
    assert scored.advantages[1].tolist() == pytest.approx([0, -0.45, 0, 0])
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/mean_after_kl"] == pytest.approx(0.35)
    assert metrics["reward/kl"] == pytest.approx(0.2)
    assert metrics["reward/kl_coefficient"] == 0.5


def test_the_adaptive_coefficient_moves_by_the_steps_kl_and_goes_on_from_its_state():
    """KL 0.2 against a target of 0.1: the error is cut to 0.2; two trajectories at horizon 4: 0.5 · (1 + 0.2 · 2/4)."""
    rows = [rollout("a", [1], [2, 3], 1.0), rollout("a", [1], [2], 0.0), rollout("a", [1], [2], 5.0, error="broke")]
    algorithm = kl_in_reward(kl_ctrl=KLCtrlConfig(type="adaptive", kl_target=0.1, horizon=4))
    controller = make_kl_controller(algorithm)
    _, metrics = score(with_kl(rows, 0.2), algorithm, controller)
    assert metrics["reward/kl_coefficient"] == 0.5
    assert controller.value == pytest.approx(0.55)
    again = make_kl_controller(algorithm)
    again.load_state_dict(controller.state_dict())
    _, metrics = score(with_kl(rows, 0.0), algorithm, again)
    assert metrics["reward/kl_coefficient"] == controller.value
    assert again.value == pytest.approx(0.55 * (1 - 0.2 * 2 / 4))


def test_kl_in_the_reward_does_not_hide_that_a_prompts_rewards_are_equal():
    """After KL the scores 1 - 0.2 and 1 - 0.1 differ; the filter looks at the rewards themselves."""
    rows = [rollout("a", [1], [2, 3], 1.0), rollout("a", [1], [2], 1.0)]
    scored, metrics = score(with_kl(rows, 0.2), kl_in_reward(zero_variance_filter=True))
    assert not scored.loss_mask.any()
    assert metrics["reward/kl"] == pytest.approx(0.2)
    kept, _ = score(with_kl(rows, 0.2), kl_in_reward())
    assert kept.loss_mask.sum() == 3


def test_kl_in_the_reward_needs_log_probabilities():
    with pytest.raises(TrainingError, match="needs log-probabilities of policy and reference"):
        score(batch_of(rollout("a", [1], [2], 1.0)), kl_in_reward())


def test_remax_compares_with_the_greedy_completion():
    rows = [rollout("a", [1], [2], 1.0, greedy=0.25), rollout("b", [1], [2, 3], 0.0, greedy=1.0)]
    scored, metrics = score(batch_of(*rows), AlgorithmConfig(advantage_estimator="remax"))
    assert scored.advantages.tolist() == [[0, 0.75, 0], [0, -1, -1]]
    assert metrics["reward/greedy_mean"] == 0.625


def test_a_sample_without_a_greedy_reward_among_others_with_one_is_refused():
    with pytest.raises(TrainingError, match="1 trajectories have no greedy reward, among them b's"):
        batch_of(rollout("a", [1], [2], 1.0, greedy=0.5), rollout("b", [1], [2], 1.0))
    failed = rollout("b", [1], [2], 0.0, error="broke")
    assert batch_of(rollout("a", [1], [2], 1.0, greedy=0.5), failed).greedy_rewards.tolist() == [0.5, 0.0]


def test_turns_of_one_sample_are_one_trajectory_and_share_its_advantage():
    """Sample 0: 0.5 + 1 over two turns, sample 1: 0.5 in one. Mean 1, so ±0.5 on every token."""
    rows = [
        rollout("a", [1], [2], 0.5),
        rollout("a", [1, 2], [3], 1.0),
        rollout("a", [1], [4, 5], 0.5, sample=1),
    ]
    batch = batch_of(*rows, step_wise=True)
    assert batch.trajectory_ids.tolist() == [0, 0, 1]
    scored, metrics = score(batch, AlgorithmConfig(grpo_norm_by_std=False))
    assert scored.advantages.tolist() == [[0, 0, 0.5, 0], [0, 0, 0.5, 0], [0, 0, -0.5, -0.5]]
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/failed_share"] == 0.0


def test_turns_of_equal_trajectories_have_zero_variance_although_their_rows_differ():
    """1 + 0 and 0 + 1."""
    rows = [
        rollout("a", [1], [2], reward, sample=sample) for sample, reward in ((0, 1.0), (0, 0.0), (1, 0.0), (1, 1.0))
    ]
    scored, metrics = score(batch_of(*rows, step_wise=True), AlgorithmConfig(zero_variance_filter=True))
    assert metrics["reward/zero_variance_share"] == 1.0
    assert not scored.loss_mask.any()


def test_groups_may_be_numbered_apart_from_their_prompts():
    rows = [rollout("a", [1], [2], reward) for reward in (1.0, 0.0, 4.0, 2.0)]
    batch = batch_of(*rows, group_ids=(0, 0, 1, 1))
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    scored, _ = score(batch, AlgorithmConfig(grpo_norm_by_std=False))
    assert scored.advantages[:, 1].tolist() == [0.5, -0.5, 1.0, -1.0]


def test_long_responses_are_punished_over_the_buffer():
    """At most 4 tokens, buffer 2, factor 0.5: lengths 2, 3 and 4 lose 0, 0.25 and 0.5. The failed one is left alone."""
    config = SkyRLConfig.model_validate(
        {
            "trainer": {"algorithm": {"overlong_buffer": {"len": 2, "penalty_factor": 0.5}}},
            "generator": {"sampling_params": {"max_generate_length": 4}},
        }
    )
    lengths = (2, 3, 4)
    rows = [rollout("a", [1], [2] * length, 1.0) for length in lengths]
    failed = rollout("a", [1], [2] * 4, 0.0, error="broke")
    shaped, metrics = shape_rewards(RolloutBatch(step=4, rollouts=[*rows, failed]), config)
    assert [row.reward for row in shaped.rollouts] == [1.0, 0.75, 0.5, 0.0]
    assert metrics == {"reward/overlong_mean": -0.25, "reward/overlong_share": pytest.approx(2 / 3)}
    untouched = RolloutBatch(step=4, rollouts=rows)
    assert shape_rewards(untouched, SkyRLConfig()) == (untouched, {})
