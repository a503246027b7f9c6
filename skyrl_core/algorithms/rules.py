"""What each algorithm needs and allows, as data that configuration can read without importing torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRules:
    """needs_critic: reads values. needs_group: compares samples of a prompt, so one sample teaches nothing.
    needs_greedy: reads the reward of a greedy completion of each prompt. outcome_only: reads a row's total reward, not
    where it stands. step_wise: may be computed on trajectories' last steps and broadcast to the others."""

    needs_critic: bool = False
    needs_group: bool = False
    needs_greedy: bool = False
    outcome_only: bool = True
    step_wise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """needs_rollout_logprobs: cannot work without the engine's log-probabilities. reads_old_logprobs: False when the
    trainer need not compute them. corrects_off_policy: honours `off_policy_correction`. sequence_level: one ratio a
    row, so rows must be whole. minibatch_selection: has a `prepare` over the whole minibatch.
    reductions: the only loss reductions allowed, None for all. advised_reduction: what its paper uses."""

    needs_rollout_logprobs: bool = False
    reads_old_logprobs: bool = True
    corrects_off_policy: bool = True
    sequence_level: bool = False
    minibatch_selection: bool = False
    reductions: tuple[str, ...] | None = None
    advised_reduction: str | None = None


ESTIMATORS: dict[str, EstimatorRules] = {
    "grpo": EstimatorRules(needs_group=True),
}

POLICY_LOSSES: dict[str, LossRules] = {
    "regular": LossRules(),
}

REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
