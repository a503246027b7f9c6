"""Estimators that read a row's total reward only: one advantage a row, the same on each of its tokens.

All of them give 0 to rows that are not valid and to the only valid sample of a prompt (with one warning a batch), and
return the row's total reward as what a critic should learn.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from skyrl_core.algorithms.groups import Groups
from skyrl_core.algorithms.registry import register_advantage_estimator
from skyrl_core.algorithms.rules import ESTIMATORS
from skyrl_core.algorithms.types import AdvantageInputs, Advantages

if TYPE_CHECKING:
    from skyrl_core.config.algorithm import AlgorithmConfig

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it (SkyRL's value)."""


def _broadcast(inputs: AdvantageInputs, row_advantages: Tensor) -> Advantages:
    return Advantages(advantages=inputs.on_tokens(row_advantages), returns=inputs.on_tokens(inputs.scores()))


@register_advantage_estimator("grpo", ESTIMATORS["grpo"])
def grpo(inputs: AdvantageInputs, config: "AlgorithmConfig") -> Advantages:
    """Group-relative advantage (GRPO, arXiv:2402.03300, section 4.1.2): (R_i - mean) / (std + 1e-6).

    Without `grpo_norm_by_std` it is R_i - mean (Dr. GRPO, arXiv:2503.20783). std divides by n - 1, as in SkyRL.
    Groups whose rewards are all equal, and groups of one, get exactly 0 (SkyRL gives a group of one its raw reward).
    """
    groups = Groups.of(inputs)
    groups.warn_about_singles("grpo")
    scores = inputs.scores()
    advantages = scores - groups.mean(scores)
    if config.grpo_norm_by_std:
        advantages = advantages / (groups.std(scores) + STD_EPSILON)
    return _broadcast(inputs, advantages.where(groups.varied(scores), 0.0))
