"""Estimators that read a trajectory's total reward only: one advantage a trajectory, the same on each of its tokens.

In step-wise training a trajectory is all its rows, and they share its advantage; otherwise it is one row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_core.algorithms.advantages.normalize import weighted_whiten
from skyrl_core.algorithms.groups import Groups
from skyrl_core.algorithms.registry import register_advantage_estimator
from skyrl_core.algorithms.types import AdvantageEstimator, AdvantageInputs, Advantages
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import ESTIMATORS, EstimatorRules
from skyrl_core.errors import RewardError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it (SkyRL's value)."""

COMPARES_SAMPLES = EstimatorRules(needs_group=True, step_wise=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The trajectories of a batch: scores [R] (total rewards, float64), tokens [R] (trained tokens, float64), their
    groups, greedy [R] or None, and row [B]: which trajectory each row of the batch belongs to."""

    scores: Tensor
    tokens: Tensor
    groups: Groups
    greedy: Tensor | None
    row: Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> "Outcomes":
        """Add up the rows of each trajectory. A trajectory with a row that is not valid is not valid.

        Raises ValueError when rows of one trajectory belong to different prompts.
        """
        rows = len(inputs.group_ids)
        if inputs.trajectory_ids is None:
            count, row = rows, torch.arange(rows, device=inputs.group_ids.device)
        else:
            names, row = torch.unique(inputs.trajectory_ids, return_inverse=True)
            count = len(names)
        group_ids = torch.zeros(count, dtype=inputs.group_ids.dtype, device=row.device)
        group_ids[row] = inputs.group_ids
        if bool((group_ids[row] != inputs.group_ids).any()):
            raise ValueError("AdvantageInputs: rows with one trajectory_id have different group_ids")
        greedy = None
        if inputs.greedy_rewards is not None:
            greedy = torch.zeros(count, dtype=torch.float64, device=row.device)
            greedy[row] = inputs.greedy_rewards.double()
        failed_rows = torch.zeros(count, dtype=torch.int64, device=row.device).index_add_(
            0, row, (~inputs.valid).long()
        )
        total = torch.zeros(count, dtype=torch.float64, device=row.device)
        tokens = inputs.loss_mask.sum(dim=1, dtype=torch.float64)
        return cls(
            scores=total.clone().index_add_(0, row, inputs.scores()),
            tokens=total.index_add_(0, row, tokens),
            groups=Groups.of(group_ids, failed_rows == 0),
            greedy=greedy,
            row=row,
        )


OutcomeFunction = Callable[[Outcomes, AlgorithmConfig], Tensor]


def outcome_estimator(
    name: str, rules: EstimatorRules = COMPARES_SAMPLES
) -> Callable[[OutcomeFunction], AdvantageEstimator]:
    """Decorator: makes an estimator of `function(outcomes, config) -> [R]` and registers it under `name`.

    The estimator gives 0 to trajectories that are not valid. Its returns are the trajectory's total reward. Estimators
    that compare samples (`rules.needs_group`) give 0 to the only valid sample of a prompt and to prompts whose valid
    samples all have the same reward, whatever `function` says, and warn once a batch about the former.
    """

    def decorate(function: OutcomeFunction) -> AdvantageEstimator:
        @functools.wraps(function)
        def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
            outcomes = Outcomes.of(inputs)
            counted = outcomes.groups.valid
            if rules.needs_group:
                outcomes.groups.warn_about_singles(name)
                counted = outcomes.groups.varied(outcomes.scores)
            advantages = torch.where(counted, function(outcomes, config), 0.0)
            scores = torch.where(outcomes.groups.valid, outcomes.scores, 0.0)
            return Advantages(
                advantages=inputs.on_tokens(advantages[outcomes.row]), returns=inputs.on_tokens(scores[outcomes.row])
            )

        return register_advantage_estimator(name, rules)(estimate)

    return decorate


@outcome_estimator("grpo", ESTIMATORS["grpo"])
def grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Group-relative advantage (GRPO, arXiv:2402.03300, section 4.1.2): (R_i - mean) / (std + 1e-6).

    `grpo_norm_by_std=false` leaves the division out. The deviation divides by n - 1, as SkyRL's. SkyRL gives a group
    of one its raw reward; ours is 0.
    """
    centred = outcomes.scores - outcomes.groups.mean(outcomes.scores)
    if config.grpo_norm_by_std:
        return centred / (outcomes.groups.std(outcomes.scores) + STD_EPSILON)
    return centred


@outcome_estimator("dr_grpo", ESTIMATORS["dr_grpo"])
def dr_grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783): R_i - mean, whatever `grpo_norm_by_std` says.

    Its other half is the loss: loss_reduction=seq_mean_token_sum_norm.
    """
    return outcomes.scores - outcomes.groups.mean(outcomes.scores)


@outcome_estimator("rloo", ESTIMATORS["rloo"])
def rloo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Leave-one-out baseline (arXiv:2402.14740): R_i - mean of the other samples' = n/(n-1) · (R_i - mean)."""
    size = outcomes.groups.size()
    return (outcomes.scores - outcomes.groups.mean(outcomes.scores)) * size / (size - 1.0).clamp(min=1.0)


@outcome_estimator("maxrl", ESTIMATORS["maxrl"])
def maxrl(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """MaxRL (arXiv:2602.02710): (R_i - mean) / mean, 0 where the mean is 0.

    SkyRL divides by mean + 1e-6. Raises RewardError for a negative reward: the method is made for rewards that are
    success rates, and a negative mean would reverse every advantage of its group.
    """
    if bool((outcomes.groups.valid & (outcomes.scores < 0)).any()):
        raise RewardError("advantage_estimator=maxrl needs rewards that are not negative; use grpo or rloo for others")
    mean = outcomes.groups.mean(outcomes.scores)
    return (outcomes.scores - mean) / torch.where(mean > 0, mean, 1.0)


@outcome_estimator("opo", ESTIMATORS["opo"])
def opo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Optimal baseline (OPO, arXiv:2505.23585): R_i - Σ n_j R_j / Σ n_j, n_j the trained tokens of sample j."""
    weighted = outcomes.groups.total(outcomes.tokens * outcomes.scores)
    return outcomes.scores - weighted / outcomes.groups.total(outcomes.tokens).clamp(min=1.0)


@outcome_estimator("gpg", ESTIMATORS["gpg"])
def gpg(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Group policy gradient (GPG, arXiv:2504.02546): α · (R_i - mean), with F_norm = 1.

    α = B / (B - M): all samples over those of prompts whose rewards differ, since the others have no gradient. It is
    taken over the step's batch. The paper's loss has no ratio: policy_loss_type=importance_sampling is its equal for
    one optimizer step a batch.
    """
    samples = outcomes.groups.valid.sum()
    useful = outcomes.groups.varied(outcomes.scores).sum().clamp(min=1)
    return (outcomes.scores - outcomes.groups.mean(outcomes.scores)) * samples / useful


@outcome_estimator("grpo_passk", ESTIMATORS["grpo_passk"])
def grpo_passk(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Pass@k objective, k the group's size (arXiv:2503.19595): what a sample adds to the group's best reward.

    max_j R_j - max_{j≠i} R_j: the best sample gets its lead over the second best, all others 0 (all, when two share
    the best). With `grpo_norm_by_std` divided by the group's std + 1e-6.
    """
    groups, scores = outcomes.groups, outcomes.scores
    best = groups.largest(scores)
    leads = groups.valid & (scores == best)
    alone = groups.total(leads) == 1
    # Without the only leader the group's best is the best of the rest; with two leaders it does not change.
    rest = Groups(index=groups.index, valid=groups.valid & ~leads, count=groups.count)
    lead = torch.where(leads & alone & (rest.size() > 0), best - rest.largest(scores), 0.0)
    return lead / (groups.std(scores) + STD_EPSILON) if config.grpo_norm_by_std else lead


@outcome_estimator("reinforce++-baseline", ESTIMATORS["reinforce++-baseline"])
def reinforce_plus_plus_baseline(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv:2501.03262): R_i - mean, then whitened over the batch's tokens.

    Trajectories of groups without a difference count in the whitening with 0, and get 0 in the end (in the paper they
    get the shift that whitening gives to 0).
    """
    varied = outcomes.groups.varied(outcomes.scores)
    centred = torch.where(varied, outcomes.scores - outcomes.groups.mean(outcomes.scores), 0.0)
    return weighted_whiten(centred, torch.where(outcomes.groups.valid, outcomes.tokens, 0.0))


@outcome_estimator("remax", ESTIMATORS["remax"])
def remax(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Greedy baseline (ReMax, arXiv:2310.10505): R_i - R(greedy completion of the same prompt).

    Mark rows whose greedy completion could not be scored as not valid. Raises RewardError without greedy rewards.
    """
    if outcomes.greedy is None:
        raise RewardError("advantage_estimator=remax needs the reward of each prompt's greedy completion, got none")
    return outcomes.scores - outcomes.greedy
