"""Losses that clip or gate an importance ratio to the policy before the update.

r = exp(logprobs - old_logprobs), A the advantage, both per token unless said otherwise. Every loss reports clip_ratio,
the share of trained tokens whose ratio its bound changed, and importance_ratio, the ratio's mean.
"""

import torch
from torch import Tensor

from skyrl_core.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_core.algorithms.losses.common import bounded_exp, finish
from skyrl_core.algorithms.registry import register_policy_loss
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import POLICY_LOSSES


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The token loss -min(r·A, clip(r)·A), and where clipping changed it."""
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - config.eps_clip_low, 1.0 + config.eps_clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


@register_policy_loss("regular", POLICY_LOSSES["regular"])
def regular(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), with a bound of its own on each side (DAPO, arXiv:2503.14476).

    loss = -min(r·A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high)·A).
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, config)
    return finish(inputs, config, loss, clip_ratio=clipped, importance_ratio=ratio)


@register_policy_loss("bnpo", POLICY_LOSSES["bnpo"])
def bnpo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """TRL's loss type of this name: the clipped surrogate, averaged over all tokens of a batch.

    TRL takes the average over each device's microbatch; ours is over the minibatch, which makes it regular with
    loss_reduction=token_mean, the only reduction allowed. (The paper of this name, arXiv:2506.02864, is about
    advantages, not about the loss.)
    """
    return regular(inputs, config)


@register_policy_loss("dual_clip", POLICY_LOSSES["dual_clip"])
def dual_clip(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """Dual-clip PPO (arXiv:1912.09729): where A < 0 the regular loss is at most -clip_ratio_c·A.

    dual_clip_ratio is the share of tokens that this bound stopped.
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, config)
    bound = -config.clip_ratio_c * inputs.advantages
    stopped = (inputs.advantages < 0) & (loss > bound)
    loss = torch.where(stopped, bound, loss)
    return finish(inputs, config, loss, clip_ratio=clipped, dual_clip_ratio=stopped, importance_ratio=ratio)


@register_policy_loss("gspo", POLICY_LOSSES["gspo"])
def gspo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """GSPO-token (arXiv:2507.18071, eq. 14 and 15): the clipped surrogate with one ratio a row.

    s_i = exp(mean over the row's trained tokens of logprobs - old_logprobs); the token's ratio is
    sg[s_i]·π(y_t)/sg[π(y_t)], so each token pulls with the row's ratio. Rows must be whole. The mean is clamped to ±20
    (SkyRL: to at most 10).
    """
    inputs = inputs.masked()
    gap = (inputs.logprobs - inputs.old_logprobs).detach()
    tokens = inputs.loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (gap.sum(dim=1, keepdim=True) / tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # The two log-probabilities cancel first: added to the mean one by one they would round it.
    ratio = (mean + (inputs.logprobs - inputs.logprobs.detach())).exp()
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, config)
    return finish(inputs, config, loss, clip_ratio=clipped, importance_ratio=ratio)


@register_policy_loss("sapo", POLICY_LOSSES["sapo"])
def sapo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """SAPO (arXiv:2511.20347): a soft gate instead of a clip, -(4/τ)·σ(τ·(r - 1))·A.

    τ is sapo.tau_pos where A > 0, else sapo.tau_neg. At r = 1 the gradient is the plain policy gradient's. clip_ratio
    is the mean of 1 - 4·σ(1 - σ), how much of a token's gradient per ratio the gate takes away.
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    # Made from the ratio, not from two numbers: those would meet in single precision.
    tau = torch.where(inputs.advantages > 0, ratio.new_tensor(config.sapo.tau_pos), config.sapo.tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = -(4.0 / tau) * gate * inputs.advantages
    return finish(inputs, config, loss, clip_ratio=1.0 - 4.0 * gate * (1.0 - gate), importance_ratio=ratio)
