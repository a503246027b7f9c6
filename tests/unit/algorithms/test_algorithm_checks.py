"""Pairs that cannot work are refused before anything is loaded, with a reason and a way out."""

from typing import Any

import pytest

from skyrl_core.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    DynamicSamplingConfig,
    OffPolicyCorrectionConfig,
    OverlongBufferConfig,
)
from skyrl_core.config.algorithm_checks import algorithm_advice, check_algorithm
from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES, EstimatorRules, LossRules
from skyrl_core.errors import ConfigurationError


def check(config: AlgorithmConfig, **facts: object) -> None:
    usual = {"samples_per_prompt": 4, "has_critic": False, "step_wise": False, "rollout_logprobs": True}
    check_algorithm(config, **{**usual, **facts})


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"gae"}))
def test_every_estimator_goes_with_the_regular_loss_from_two_samples_on(estimator: str) -> None:
    check(AlgorithmConfig(advantage_estimator=estimator), samples_per_prompt=2)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_loss_goes_with_grpo_and_advice_is_given_where_a_paper_used_another_reduction(loss: str) -> None:
    check(AlgorithmConfig(policy_loss_type=loss))
    advice = algorithm_advice(AlgorithmConfig(policy_loss_type=loss))
    expected = [f"policy_loss_type={loss} was studied with loss_reduction=sequence_mean"]
    assert advice == (expected if loss in ("gspo", "sapo") else [])
    if loss != "bnpo":
        other = AlgorithmConfig(policy_loss_type=loss, loss_reduction="sequence_mean")
        check(other)
        assert algorithm_advice(other) == []


def test_gae_needs_a_critic() -> None:
    config = AlgorithmConfig(advantage_estimator="gae")
    check(config, has_critic=True)
    with pytest.raises(ConfigurationError, match=r"^trainer\.algorithm\.advantage_estimator=gae needs a critic"):
        check(config)


@pytest.mark.parametrize("estimator", sorted(name for name, rules in ESTIMATORS.items() if rules.needs_group))
def test_estimators_that_compare_samples_need_two(estimator: str) -> None:
    with pytest.raises(ConfigurationError, match="n_samples_per_prompt=1 every advantage would be 0"):
        check(AlgorithmConfig(advantage_estimator=estimator), samples_per_prompt=1)


@pytest.mark.parametrize("estimator", ["remax", "reinforce++"])
def test_the_others_work_with_one_sample(estimator: str) -> None:
    check(AlgorithmConfig(advantage_estimator=estimator), samples_per_prompt=1)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_step_wise_rows_go_with_outcome_estimators_only(estimator: str) -> None:
    config = AlgorithmConfig(advantage_estimator=estimator)
    if estimator not in ("gae", "reinforce++"):
        check(config, step_wise=True)
        return
    with pytest.raises(ConfigurationError, match=r"step_wise_trajectories=true.*Estimators that can: dr_grpo, gpg"):
        check(config, step_wise=True, has_critic=True)


@pytest.mark.parametrize("loss", ["rollout_is", "dppo", "cispo"])
def test_losses_on_the_rollout_policy_need_its_logprobs_and_no_second_weight(loss: str) -> None:
    cispo = CISPOConfig(cispo_anchor="rollout")
    config = AlgorithmConfig(policy_loss_type=loss, cispo=cispo)
    check(config)
    with pytest.raises(ConfigurationError, match=r"set generator\.sampling_params\.logprobs=1"):
        check(config, rollout_logprobs=False)
    twice = OffPolicyCorrectionConfig(tis_ratio_type="sequence")
    with pytest.raises(ConfigurationError, match="would count the same gap twice"):
        check(AlgorithmConfig(policy_loss_type=loss, cispo=cispo, off_policy_correction=twice))
    masks = OffPolicyCorrectionConfig(sequence_mask_metric="product")
    check(AlgorithmConfig(policy_loss_type=loss, cispo=cispo, off_policy_correction=masks))


def test_cispo_on_the_old_policy_takes_every_correction_and_needs_no_rollout_logprobs() -> None:
    check(AlgorithmConfig(policy_loss_type="cispo"), rollout_logprobs=False)
    correction = OffPolicyCorrectionConfig(tis_ratio_type="token")
    check(AlgorithmConfig(policy_loss_type="cispo", off_policy_correction=correction))


@pytest.mark.parametrize(
    "correction",
    [
        OffPolicyCorrectionConfig(tis_ratio_type="token"),
        OffPolicyCorrectionConfig(sequence_mask_metric="geometric"),
        OffPolicyCorrectionConfig(outlier_token_is_threshold_low=1e-4),
        OffPolicyCorrectionConfig(token_mask_is_threshold_high=2.0),
    ],
)
def test_corrections_need_rollout_logprobs_and_a_loss_that_takes_them(correction: OffPolicyCorrectionConfig) -> None:
    check(AlgorithmConfig(off_policy_correction=correction))
    with pytest.raises(ConfigurationError, match="off_policy_correction compares trainer and engine"):
        check(AlgorithmConfig(off_policy_correction=correction), rollout_logprobs=False)
    with pytest.raises(ConfigurationError, match="has no meaning for policy_loss_type=cross_entropy"):
        check(AlgorithmConfig(policy_loss_type="cross_entropy", off_policy_correction=correction))


@pytest.mark.parametrize(
    "correction",
    [
        OffPolicyCorrectionConfig(sequence_mask_metric="geometric", geo_mask_low=2.0),
        OffPolicyCorrectionConfig(sequence_mask_metric="product", product_mask_low=2.0),
        OffPolicyCorrectionConfig(outlier_token_is_threshold_low=2.0, outlier_token_is_threshold_high=2.0),
        OffPolicyCorrectionConfig(token_mask_is_threshold_low=2.0, token_mask_is_threshold_high=1.0),
    ],
)
def test_bounds_that_keep_nothing_are_refused(correction: OffPolicyCorrectionConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"must be below .*: nothing would be kept"):
        check(AlgorithmConfig(off_policy_correction=correction))


def test_bounds_of_a_mask_that_is_off_are_not_looked_at() -> None:
    check(AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(geo_mask_low=2.0)))


def test_bnpo_has_its_own_reduction() -> None:
    with pytest.raises(ConfigurationError, match="bnpo is defined with loss_reduction=token_mean, not prompt_mean"):
        check(AlgorithmConfig(policy_loss_type="bnpo", loss_reduction="prompt_mean"))


def test_the_constant_divisor_must_be_set() -> None:
    check(AlgorithmConfig(loss_reduction="seq_mean_token_sum_norm", max_seq_len=9))
    with pytest.raises(ConfigurationError, match="max_seq_len must be set"):
        check(AlgorithmConfig(loss_reduction="seq_mean_token_sum_norm"))


def test_kl_is_in_the_reward_or_in_the_loss() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        check(AlgorithmConfig(use_kl_in_reward=True, use_kl_loss=True))


@pytest.mark.parametrize(
    "shaping", [{"use_kl_in_reward": True, "use_kl_loss": False}, {"overlong_buffer": OverlongBufferConfig(len=4)}]
)
def test_maxrl_takes_nothing_that_makes_rewards_negative(shaping: dict[str, Any]) -> None:
    check(AlgorithmConfig(advantage_estimator="rloo", **shaping))
    with pytest.raises(ConfigurationError, match="maxrl needs rewards that are not negative"):
        check(AlgorithmConfig(advantage_estimator="maxrl", **shaping))


def test_dynamic_sampling_needs_two_samples() -> None:
    config = AlgorithmConfig(advantage_estimator="remax", dynamic_sampling=DynamicSamplingConfig(type="filter"))
    check(config, samples_per_prompt=2)
    with pytest.raises(ConfigurationError, match=r"dynamic_sampling\.type=filter looks for prompts whose samples"):
        check(config, samples_per_prompt=1)


def test_every_problem_is_told_at_once_on_a_line_of_its_own() -> None:
    unknown = {"advantage_estimator": "gpro", "policy_loss_type": "pop"}
    config = AlgorithmConfig(use_kl_in_reward=True).model_copy(update=unknown)
    with pytest.raises(ConfigurationError) as caught:
        check(config)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "trainer.algorithm.advantage_estimator",
        "trainer.algorithm.policy_loss_type",
        "trainer.algorithm.use_kl_in_reward and use_kl_loss exclude each other",
    ]
    assert "unknown 'gpro'; known: dr_grpo, gae, gpg" in lines[0]


def test_custom_functions_have_default_rules_or_those_they_are_registered_with() -> None:
    config = AlgorithmConfig(advantage_estimator="mine:estimator", policy_loss_type="mine:loss")
    check(config, samples_per_prompt=1)
    with pytest.raises(ConfigurationError, match="mine:estimator needs a critic"):
        check(config, estimator=EstimatorRules(needs_critic=True))
    with pytest.raises(ConfigurationError, match="mine:loss takes its ratio to the rollout policy"):
        check(config, policy_loss=LossRules(needs_rollout_logprobs=True), rollout_logprobs=False)
