"""Estimators that look at when a reward comes: one advantage a token.

Only trained tokens are actions. Time passes from one of them to the next: tokens between them (observations, padding)
are passed over, neither discounted nor valued, and a reward that stands on one counts for the action before it. A
reward before the first action counts for none.
"""

import torch
from torch import Tensor

from skyrl_core.algorithms.advantages.normalize import whiten
from skyrl_core.algorithms.registry import register_advantage_estimator
from skyrl_core.algorithms.types import AdvantageInputs, Advantages, zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import ESTIMATORS
from skyrl_core.errors import ConfigurationError


def _backwards(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float, lambd: float) -> Tensor:
    """Σ_k (γλ)^k · δ_{t+k} over the following actions, δ = r + γ·V(next action) - V: [B, T], 0 where not an action."""
    out = torch.zeros_like(values)
    total, next_value, passed = (torch.zeros_like(values[:, 0]) for _ in range(3))
    for t in reversed(range(values.shape[1])):
        action = mask[:, t]
        reward = rewards[:, t] + passed
        delta = reward + gamma * next_value - values[:, t]
        total = torch.where(action, delta + gamma * lambd * total, total)
        next_value = torch.where(action, values[:, t], next_value)
        passed = torch.where(action, 0.0, reward)
        out[:, t] = torch.where(action, total, 0.0)
    return out


def _clean(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Rewards [B, T] float64 with 0 in rows that are not valid, and the tokens [B, T] bool that are actions."""
    rewards = torch.where(inputs.valid[:, None], inputs.token_rewards.double(), 0.0)
    return rewards, inputs.loss_mask & inputs.valid[:, None]


@register_advantage_estimator("gae", ESTIMATORS["gae"])
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) with `gamma` and `lambd`, whitened over the batch.

    Returns are the advantages before whitening plus values. The value after a row's last action is 0. Raises
    ConfigurationError without values.
    """
    if inputs.values is None:
        raise ConfigurationError("advantage_estimator=gae needs a critic: set trainer.critic.model.path")
    rewards, actions = _clean(inputs)
    values = zero_masked(inputs.values.double(), actions)
    advantages = _backwards(rewards, actions, values, config.gamma, config.lambd)
    dtype = inputs.token_rewards.dtype
    return Advantages(advantages=whiten(advantages, actions).to(dtype), returns=(advantages + values).to(dtype))


@register_advantage_estimator("reinforce++", ESTIMATORS["reinforce++"])
def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """REINFORCE++ (arXiv:2501.03262): the discounted reward to come, whitened over the batch's tokens.

    SkyRL's return starts anew after each masked token, so that in a dialogue a late reward never reaches earlier turns;
    ours passes over observations. Returns are the rewards to come before whitening.
    """
    rewards, actions = _clean(inputs)
    to_come = _backwards(rewards, actions, torch.zeros_like(rewards), config.gamma, 1.0)
    dtype = inputs.token_rewards.dtype
    return Advantages(advantages=whiten(to_come, actions).to(dtype), returns=to_come.to(dtype))
