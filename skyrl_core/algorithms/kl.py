"""KL divergence between two policies from the log-probabilities of sampled tokens.

J. Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html, for samples of the current
policy.
"""

from torch import Tensor

from skyrl_core.algorithms.types import zero_masked
from skyrl_core.config.algorithm_rules import KL_ESTIMATORS
from skyrl_core.errors import ConfigurationError

LOG_RATIO_LIMIT = 20.0
"""exp() of a log-ratio is taken no further out than this (SkyRL's limit): exp(20) ≈ 5e8 is finite in any dtype."""

K3_LIMIT = 10.0
"""k3 of one token is cut here (SkyRL's limit), so that one outlier cannot dominate a batch; its gradient is then 0."""


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy ‖ reference) at each token: [B, T], exactly 0 where `loss_mask` [B, T] bool is False.

    With d = logprobs - ref_logprobs: k1 = d; abs = |d|; k2 = d²/2; k3 = exp(-d) + d - 1, with d clamped to ±20 and the
    result to at most 10. As a loss k1 has a gradient of mean zero and does not pull towards the reference; k2 does.
    Gradient flows into `logprobs` only. Raises ConfigurationError for an unknown estimator.
    """
    difference = zero_masked(logprobs, loss_mask) - zero_masked(ref_logprobs, loss_mask).detach()
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where almost all tokens are.
        bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return ((-bounded).expm1() + bounded).clamp(max=K3_LIMIT)
    raise ConfigurationError(
        f"trainer.algorithm.kl_estimator_type: unknown {estimator!r}; known: {', '.join(KL_ESTIMATORS)}"
    )


def penalize_rewards(
    token_rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, coefficient: float, estimator: str
) -> Tensor:
    """KL in the reward (InstructGPT, arXiv:2203.02155): token_rewards - coefficient · KL at each trained token, [B, T].

    `logprobs` are those of the policy before the update. Rewards at masked positions stay as they are.
    """
    penalty = token_kl(logprobs.detach(), ref_logprobs, loss_mask, estimator)
    return token_rewards - coefficient * penalty.to(token_rewards.dtype)
