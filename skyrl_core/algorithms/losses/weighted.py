"""Losses that weigh log π or the ratio instead of clipping the surrogate, and plain cross entropy."""

import torch

from skyrl_core.algorithms.losses.common import bounded_exp, finish, rollout_anchor
from skyrl_core.algorithms.off_policy import corrects_anything
from skyrl_core.algorithms.registry import register_policy_loss
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import POLICY_LOSSES
from skyrl_core.errors import ConfigurationError

DPPO_EPSILON = 1e-8
"""Keeps the logarithms of 1 - probability finite where a probability is 1 (SkyRL's value)."""


@register_policy_loss("cispo", POLICY_LOSSES["cispo"])
def cispo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """CISPO (arXiv:2506.13585, eq. 4 and 5): -sg[clip(r, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)]·A·log π.

    Every token keeps a gradient; only its weight is bounded. r is taken to old_logprobs, or to the rollout policy with
    cispo_anchor=rollout. clip_ratio: share of tokens whose weight was bounded; clipped_ratio: mean bounded weight.
    Raises ConfigurationError for cispo_anchor=rollout without rollout log-probabilities or with tis_ratio_type.
    """
    inputs = inputs.masked()
    anchor = inputs.old_logprobs
    if config.cispo.cispo_anchor == "rollout":
        anchor = rollout_anchor(inputs, config, "policy_loss_type=cispo with cispo_anchor=rollout")
    ratio = bounded_exp(inputs.logprobs.detach() - anchor)
    weight = ratio.clamp(1.0 - config.cispo.cispo_eps_clip_low, 1.0 + config.cispo.cispo_eps_clip_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return finish(inputs, config, loss, clip_ratio=weight != ratio, importance_ratio=ratio, clipped_ratio=weight)


@register_policy_loss("rollout_is", POLICY_LOSSES["rollout_is"])
def rollout_is(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """GLM-5's agentic loss (arXiv:2602.15763, section 4.1.2): -sg[f(r)]·A·log π, r taken to the rollout policy.

    f(r) = r where 1 - eps_clip_low < r < 1 + eps_clip_high, else 0: such tokens have no gradient. Raises
    ConfigurationError without rollout log-probabilities or with tis_ratio_type.
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs.detach() - rollout_anchor(inputs, config, "policy_loss_type=rollout_is"))
    outside = (ratio <= 1.0 - config.eps_clip_low) | (ratio >= 1.0 + config.eps_clip_high)
    loss = -torch.where(outside, 0.0, ratio) * inputs.advantages * inputs.logprobs
    return finish(inputs, config, loss, clip_ratio=outside, importance_ratio=ratio)


@register_policy_loss("importance_sampling", POLICY_LOSSES["importance_sampling"])
def importance_sampling(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """The plain importance-weighted policy gradient: -r·A with r = exp(logprobs - old_logprobs).

    SkyRL sums this loss whatever the reduction; ours follows loss_reduction.
    """
    inputs = inputs.masked()
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    return finish(inputs, config, -ratio * inputs.advantages, importance_ratio=ratio)


@register_policy_loss("dppo", POLICY_LOSSES["dppo"])
def dppo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """DPPO (arXiv:2602.04879, eq. 12 to 14): -M·r·A, r = π/μ with μ the rollout policy.

    M = 0 where the update would leave the trust region and goes further out: A > 0, π > μ and D > dppo.delta_high, or
    A < 0, π < μ and D > dppo.delta_low. D over {this token, any other}: |π - μ| (binary_tv), or
    μ·log(μ/π) + (1-μ)·log((1-μ)/(1-π)) (binary_kl). Without rollout log-probabilities SkyRL takes old_logprobs for μ;
    ours raises ConfigurationError, as it does with tis_ratio_type.
    """
    inputs = inputs.masked()
    rollout = rollout_anchor(inputs, config, "policy_loss_type=dppo")
    ratio = bounded_exp(inputs.logprobs - rollout)
    now, before = inputs.logprobs.detach().exp(), rollout.exp()
    if config.dppo.dppo_type == "binary_tv":
        divergence = (now - before).abs()
    else:
        others = ((1.0 - before + DPPO_EPSILON) / (1.0 - now + DPPO_EPSILON)).log()
        divergence = before * (rollout - inputs.logprobs.detach()) + (1.0 - before) * others
    too_high = (inputs.advantages > 0) & (now > before) & (divergence > config.dppo.delta_high)
    too_low = (inputs.advantages < 0) & (now < before) & (divergence > config.dppo.delta_low)
    stopped = too_high | too_low
    loss = torch.where(stopped, 0.0, -ratio * inputs.advantages)
    return finish(inputs, config, loss, clip_ratio=stopped, importance_ratio=ratio, divergence=divergence)


@register_policy_loss("cross_entropy", POLICY_LOSSES["cross_entropy"])
def cross_entropy(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """Supervised fine-tuning on the sampled tokens: -log π; advantages and old_logprobs are not read.

    SkyRL sums this loss whatever the reduction; ours follows loss_reduction. Raises ConfigurationError when
    off_policy_correction is on, which has no meaning here.
    """
    if corrects_anything(config.off_policy_correction):
        raise ConfigurationError("policy_loss_type=cross_entropy does not take off_policy_correction: switch it off")
    inputs = inputs.masked()
    return finish(inputs, config, -inputs.logprobs)
