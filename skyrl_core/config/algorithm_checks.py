"""Which algorithms go together, checked before anything is loaded. Imports no torch."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict, TypeVar, Unpack

from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES, EstimatorRules, LossRules
from skyrl_core.errors import ConfigurationError


class RunFacts(TypedDict):
    """What the checks ask of the other sections.

    samples_per_prompt: rollouts of each prompt. step_wise: each turn is a row of its own. rollout_logprobs: the
    engines return log-probabilities. estimator, policy_loss: rules of functions of the user's own, which they may be
    registered with (registry.estimator_rules, registry.loss_rules); without them they have the defaults.
    """

    samples_per_prompt: int
    has_critic: bool
    step_wise: bool
    rollout_logprobs: bool
    estimator: NotRequired[EstimatorRules]
    policy_loss: NotRequired[LossRules]


RulesT = TypeVar("RulesT", EstimatorRules, LossRules)


def check_algorithm(config: AlgorithmConfig, **facts: Unpack[RunFacts]) -> None:
    """Raise ConfigurationError with every one of `algorithm_problems` on a line of its own."""
    if problems := algorithm_problems(config, **facts):
        raise ConfigurationError("\n".join(problems))


def algorithm_problems(config: AlgorithmConfig, **facts: Unpack[RunFacts]) -> list[str]:
    """What cannot work, one message each, with the reason and a way out."""
    problems: list[str] = []
    estimator = facts.get("estimator") or _rules(
        "advantage_estimator", config.advantage_estimator, ESTIMATORS, EstimatorRules(), problems
    )
    policy_loss = facts.get("policy_loss") or _rules(
        "policy_loss_type", config.policy_loss_type, POLICY_LOSSES, LossRules(), problems
    )
    problems += _estimator_problems(
        config, estimator, facts["samples_per_prompt"], facts["has_critic"], facts["step_wise"]
    )
    problems += _reward_problems(config, estimator)
    problems += _loss_problems(config, policy_loss, facts["rollout_logprobs"])
    problems += _correction_problems(config, policy_loss, facts["rollout_logprobs"])
    return [f"trainer.algorithm.{problem}" for problem in problems]


def algorithm_advice(config: AlgorithmConfig) -> list[str]:
    """What works but was not studied in its paper."""
    rules = POLICY_LOSSES.get(config.policy_loss_type, LossRules())
    if rules.advised_reduction in (None, config.loss_reduction):
        return []
    return [f"policy_loss_type={config.policy_loss_type} was studied with loss_reduction={rules.advised_reduction}"]


def _rules(key: str, name: str, known: Mapping[str, RulesT], default: RulesT, problems: list[str]) -> RulesT:
    if name not in known and ":" not in name:
        problems.append(f"{key}: unknown {name!r}; known: {', '.join(sorted(known))}; or module:function")
    return known.get(name, default)


def _estimator_problems(
    config: AlgorithmConfig, rules: EstimatorRules, samples_per_prompt: int, has_critic: bool, step_wise: bool
) -> list[str]:
    name = f"advantage_estimator={config.advantage_estimator}"
    problems = []
    if rules.needs_critic and not has_critic:
        problems.append(f"{name} needs a critic: set trainer.critic.model.path")
    if rules.needs_group and samples_per_prompt < 2:
        problems.append(
            f"{name} compares the samples of a prompt: with generator.n_samples_per_prompt={samples_per_prompt} every "
            "advantage would be 0. Take 2 or more, or an estimator without groups (remax, reinforce++, gae)"
        )
    if step_wise and not rules.step_wise:
        problems.append(
            f"{name} does not go with generator.step_wise_trajectories=true, where each turn is a row: it gives an "
            "advantage to each token of a row and cannot see the trajectory's other rows. "
            f"Estimators that can: {', '.join(sorted(n for n, r in ESTIMATORS.items() if r.step_wise))}"
        )
    if config.dynamic_sampling.type is not None and samples_per_prompt < 2:
        problems.append(
            f"dynamic_sampling.type={config.dynamic_sampling.type} looks for prompts whose samples differ: "
            f"generator.n_samples_per_prompt={samples_per_prompt} has none. Take 2 or more"
        )
    return problems


def _reward_problems(config: AlgorithmConfig, rules: EstimatorRules) -> list[str]:
    problems = []
    if config.use_kl_in_reward and config.use_kl_loss:
        problems.append("use_kl_in_reward and use_kl_loss exclude each other: set one of them to false")
    if config.use_tis and config.tis_imp_ratio_cap <= 0:
        problems.append(
            f"use_tis=true needs tis_imp_ratio_cap above 0, got {config.tis_imp_ratio_cap:g}; today it is written "
            "off_policy_correction.tis_ratio_type=token and off_policy_correction.token_tis_ratio_clip_high"
        )
    if rules.rewards_not_negative:
        name = f"advantage_estimator={config.advantage_estimator}"
        if config.use_kl_in_reward:
            problems.append(f"{name} needs rewards that are not negative, and use_kl_in_reward takes KL off them")
        if config.overlong_buffer.len is not None:
            problems.append(f"{name} needs rewards that are not negative, and overlong_buffer.len takes something off")
    return problems


def _loss_problems(config: AlgorithmConfig, rules: LossRules, rollout_logprobs: bool) -> list[str]:
    name = f"policy_loss_type={config.policy_loss_type}"
    anchored = rules.needs_rollout_logprobs or _cispo_on_rollout(config)
    problems = []
    if anchored and not rollout_logprobs:
        problems.append(
            f"{name} takes its ratio to the rollout policy: set generator.sampling_params.logprobs=1 so that the "
            "engines return log-probabilities"
        )
    if rules.reductions is not None and config.loss_reduction not in rules.reductions:
        problems.append(
            f"{name} is defined with loss_reduction={' or '.join(rules.reductions)}, not {config.loss_reduction}"
        )
    if config.loss_reduction == "seq_mean_token_sum_norm" and config.max_seq_len is None:
        problems.append(
            "max_seq_len must be set for loss_reduction=seq_mean_token_sum_norm: it is what rows are divided by"
        )
    return problems


def _correction_problems(config: AlgorithmConfig, rules: LossRules, rollout_logprobs: bool) -> list[str]:
    correction = config.off_policy_correction
    tis = correction.tis_ratio_type
    problems = [
        f"off_policy_correction.{low}={low_value} must be below {high}={high_value}: nothing would be kept"
        for low, low_value, high, high_value in _bounds(correction)
        if low_value is not None and high_value is not None and low_value >= high_value
    ]
    if tis is None and not masks_anything(correction):
        return problems
    if not rollout_logprobs:
        problems.append(
            "off_policy_correction compares trainer and engine: set generator.sampling_params.logprobs=1 so that the "
            "engines return log-probabilities"
        )
    if rules.off_policy == "none":
        problems.append(f"off_policy_correction has no meaning for policy_loss_type={config.policy_loss_type}")
    elif tis is not None and (rules.off_policy == "masks" or _cispo_on_rollout(config)):
        problems.append(
            f"off_policy_correction.tis_ratio_type={tis} with policy_loss_type={config.policy_loss_type}, whose ratio "
            "is taken to the rollout policy already, would count the same gap twice: set it to null"
        )
    return problems


def _cispo_on_rollout(config: AlgorithmConfig) -> bool:
    return config.policy_loss_type == "cispo" and config.cispo.cispo_anchor == "rollout"


def _bounds(correction: OffPolicyCorrectionConfig) -> list[tuple[str, float | None, str, float | None]]:
    pairs = [
        ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
    ]
    if correction.sequence_mask_metric == "product":
        pairs.append(("product_mask_low", "product_mask_high"))
    if correction.sequence_mask_metric == "geometric":
        pairs.append(("geo_mask_low", "geo_mask_high"))
    return [(low, getattr(correction, low), high, getattr(correction, high)) for low, high in pairs]


def masks_anything(correction: OffPolicyCorrectionConfig) -> bool:
    """Whether one of the masks of `off_policy_correction` is switched on."""
    bounds = (
        correction.outlier_token_is_threshold_low,
        correction.outlier_token_is_threshold_high,
        correction.token_mask_is_threshold_low,
        correction.token_mask_is_threshold_high,
    )
    return correction.sequence_mask_metric is not None or any(bound is not None for bound in bounds)
