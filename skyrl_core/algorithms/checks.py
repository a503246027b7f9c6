"""Which algorithms go together, checked before anything is loaded. Imports no torch."""

from collections.abc import Mapping
from typing import TypeVar

from skyrl_core.algorithms.rules import ESTIMATORS, POLICY_LOSSES, EstimatorRules, LossRules
from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_core.errors import ConfigurationError

RulesT = TypeVar("RulesT", EstimatorRules, LossRules)


def check_algorithm(
    config: AlgorithmConfig,
    *,
    samples_per_prompt: int,
    has_critic: bool,
    step_wise: bool,
    rollout_logprobs: bool,
    estimator: EstimatorRules | None = None,
    policy_loss: LossRules | None = None,
) -> list[str]:
    """Refuse what cannot work; return advice on what works but was not studied in its paper.

    samples_per_prompt: rollouts of each prompt. step_wise: each turn is a row of its own. rollout_logprobs: the
    engines return log-probabilities. For a custom `module:function`, pass the rules it was registered with
    (registry.estimator_rules, registry.loss_rules), else it has the defaults.

    Raises ConfigurationError with every problem on a line of its own.
    """
    problems: list[str] = []
    estimator = estimator or _rules(
        "advantage_estimator", config.advantage_estimator, ESTIMATORS, EstimatorRules(), problems
    )
    policy_loss = policy_loss or _rules(
        "policy_loss_type", config.policy_loss_type, POLICY_LOSSES, LossRules(), problems
    )
    problems += _estimator_problems(config, estimator, samples_per_prompt, has_critic, step_wise)
    problems += _loss_problems(config, policy_loss, rollout_logprobs)
    problems += _correction_problems(config, policy_loss, rollout_logprobs)
    if config.use_kl_in_reward and config.use_kl_loss:
        problems.append("use_kl_in_reward and use_kl_loss exclude each other: set one of them to false")
    if problems:
        raise ConfigurationError("\n".join(f"trainer.algorithm.{problem}" for problem in problems))
    advised = policy_loss.advised_reduction
    if advised is not None and config.loss_reduction != advised:
        return [f"policy_loss_type={config.policy_loss_type} was studied with loss_reduction={advised}"]
    return []


def _rules(key: str, name: str, known: Mapping[str, RulesT], default: RulesT, problems: list[str]) -> RulesT:
    if name not in known and ":" not in name:
        problems.append(f"{key}: unknown {name!r}; known: {', '.join(sorted(known))}, or module:function for your own")
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
