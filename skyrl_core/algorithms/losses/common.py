"""What every policy loss starts and ends with."""

import torch
from torch import Tensor

from skyrl_core.algorithms.kl import LOG_RATIO_LIMIT
from skyrl_core.algorithms.off_policy import correction_weights, require_no_tis
from skyrl_core.algorithms.types import PolicyLossInputs, PolicyLossOutput, zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.errors import ConfigurationError


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with log_ratio clamped to ±20; NaN stays NaN. The gradient beyond the clamp is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def rollout_anchor(inputs: PolicyLossInputs, config: AlgorithmConfig, loss: str) -> Tensor:
    """The rollout log-probabilities [B, T], for a loss whose ratio is taken to the rollout policy.

    Raises ConfigurationError when there are none, or when the same gap would be corrected a second time.
    """
    require_no_tis(config, f"{loss} takes its ratio to the rollout policy already")
    if inputs.rollout_logprobs is None:
        raise ConfigurationError(
            f"{loss} needs the engine's log-probabilities, but the rollouts have none: "
            "set generator.sampling_params.logprobs=1"
        )
    return inputs.rollout_logprobs


def finish(
    inputs: PolicyLossInputs, config: AlgorithmConfig, token_loss: Tensor, **token_metrics: Tensor
) -> PolicyLossOutput:
    """The output of a loss: `token_loss` [B, T] with `off_policy_correction` applied, and metrics [B, T], both selected
    by the loss mask. Custom losses may end with it too.

    Raises ConfigurationError when a correction is on and there are no rollout log-probabilities.
    """
    weights = correction_weights(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask, config.off_policy_correction
    )
    keep = inputs.loss_mask
    if weights is not None:
        # Tokens that a mask leaves out are selected away, not multiplied by 0: their loss may be infinite.
        keep = keep & (weights != 0)
        token_loss = torch.where(keep, token_loss, 0.0) * weights
    metrics = {name: zero_masked(metric.detach(), inputs.loss_mask) for name, metric in token_metrics.items()}
    return PolicyLossOutput(token_loss=torch.where(keep, token_loss, 0.0), token_metrics=metrics)
