"""What each algorithm needs and allows, as data: the one source of their names."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRules:
    """What an advantage estimator needs.

    needs_critic: reads values. needs_group: compares the samples of a prompt, so that one sample teaches nothing.
    needs_greedy: reads the reward of each prompt's greedy completion. step_wise: may be used where each turn is a row
    of its own: it gives one advantage a trajectory, which all its rows share. rewards_not_negative: it is made for
    success rates.
    """

    needs_critic: bool = False
    needs_group: bool = False
    needs_greedy: bool = False
    step_wise: bool = False
    rewards_not_negative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """What a policy loss needs and allows.

    needs_rollout_logprobs: cannot work without the engine's log-probabilities. off_policy: how much of
    `off_policy_correction` it allows: all, masks only (its own ratio is taken to the rollout policy, so a truncated
    importance weight would count the same gap twice), or none. reductions: the only loss reductions it allows, None
    for all. advised_reduction: the one of its paper, when another works but was not studied there.
    """

    needs_rollout_logprobs: bool = False
    off_policy: Literal["all", "masks", "none"] = "all"
    reductions: tuple[str, ...] | None = None
    advised_reduction: str | None = None


ESTIMATORS: dict[str, EstimatorRules] = {
    "grpo": EstimatorRules(needs_group=True, step_wise=True),
    "dr_grpo": EstimatorRules(needs_group=True, step_wise=True),
    "rloo": EstimatorRules(needs_group=True, step_wise=True),
    "maxrl": EstimatorRules(needs_group=True, step_wise=True, rewards_not_negative=True),
    "opo": EstimatorRules(needs_group=True, step_wise=True),
    "gpg": EstimatorRules(needs_group=True, step_wise=True),
    "grpo_passk": EstimatorRules(needs_group=True, step_wise=True),
    "reinforce++-baseline": EstimatorRules(needs_group=True, step_wise=True),
    "remax": EstimatorRules(needs_greedy=True, step_wise=True),
    "reinforce++": EstimatorRules(),
    "gae": EstimatorRules(needs_critic=True),
}

POLICY_LOSSES: dict[str, LossRules] = {
    "regular": LossRules(),
    "dual_clip": LossRules(),
    "bnpo": LossRules(reductions=("token_mean",)),
    "gspo": LossRules(advised_reduction="sequence_mean"),
    "sapo": LossRules(advised_reduction="sequence_mean"),
    "cispo": LossRules(),
    "importance_sampling": LossRules(),
    "clip_cov": LossRules(),
    "kl_cov": LossRules(),
    "rollout_is": LossRules(needs_rollout_logprobs=True, off_policy="masks"),
    "dppo": LossRules(needs_rollout_logprobs=True, off_policy="masks"),
    "cross_entropy": LossRules(off_policy="none"),
}

REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
