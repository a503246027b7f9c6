"""`trainer.algorithm`: advantages, losses, KL, and their parameters."""

import difflib
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES
from skyrl_core.config.section import Count, NonNegative, Positive, Section, Share, ours, own_code


def _known(name: str, names: Collection[str]) -> str:
    if name in names:
        return name
    if ":" in name:
        return own_code(name)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"must be one of {', '.join(names)}, or one of your own as module:function or path/to/file.py:function{hint}"
    )


def _estimator(name: str) -> str:
    return _known(name, ESTIMATORS)


def _policy_loss(name: str) -> str:
    return _known(name, POLICY_LOSSES)


class KLCtrlConfig(Section):
    """`trainer.algorithm.kl_ctrl`: how the KL coefficient moves when KL is part of the reward."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="keep the coefficient, or steer it to kl_target")
    kl_target: Positive = Field(0.1, description="KL that the adaptive controller steers to, in nats per token")
    horizon: Count = Field(10000, description="larger: the adaptive controller moves more slowly")


class OffPolicyCorrectionConfig(Section):
    """`trainer.algorithm.off_policy_correction`: weights and masks against engine and trainer disagreeing."""

    tis_ratio_type: Literal["token", "sequence"] | None = Field(
        None, description="importance weight of old over rollout policy, per token or per sequence; null for none"
    )
    token_tis_ratio_clip_high: Positive = Field(2.0, description="cap of the per-token importance weight")
    sequence_tis_ratio_clip_high: Positive = Field(5.0, description="cap of the per-sequence importance weight")
    sequence_mask_metric: Literal["product", "geometric"] | None = Field(
        None, description="leave out sequences whose product or geometric-mean ratio is outside its bounds"
    )
    geo_mask_high: NonNegative = Field(1.01, description="upper bound of the geometric-mean ratio")
    geo_mask_low: NonNegative = Field(0.99, description="lower bound of the geometric-mean ratio")
    product_mask_high: NonNegative = Field(2.0, description="upper bound of the product of ratios")
    product_mask_low: NonNegative = Field(0.5, description="lower bound of the product of ratios")
    outlier_token_is_threshold_low: NonNegative | None = Field(
        None, description="leave out sequences with a token ratio below this"
    )
    outlier_token_is_threshold_high: NonNegative | None = Field(
        None, description="leave out sequences with a token ratio above this"
    )
    token_mask_is_threshold_low: NonNegative | None = Field(
        None, description="leave out tokens with a ratio below this"
    )
    token_mask_is_threshold_high: NonNegative | None = Field(
        None, description="leave out tokens with a ratio above this"
    )

    @property
    def active(self) -> bool:
        """True when any weight or mask is on."""
        switches = (self.tis_ratio_type, self.sequence_mask_metric)
        outliers = (self.outlier_token_is_threshold_low, self.outlier_token_is_threshold_high)
        tokens = (self.token_mask_is_threshold_low, self.token_mask_is_threshold_high)
        return any(value is not None for value in (*switches, *outliers, *tokens))


class SAPOConfig(Section):
    """`trainer.algorithm.sapo`: used by policy_loss_type=sapo (arXiv:2511.20347)."""

    tau_pos: Positive = Field(1.0, description="gate temperature of tokens with positive advantage")
    tau_neg: Positive = Field(1.05, description="gate temperature of tokens with negative or zero advantage")


class DynamicSamplingConfig(Section):
    """`trainer.algorithm.dynamic_sampling`: what to do with groups whose rewards are all equal."""

    type: Literal["filter", "replace"] | None = Field(
        None, description="filter them and sample more (DAPO), replace them by good ones (POLARIS), or null"
    )
    max_sample_batches: int = Field(30, description="give up after this many batches for one step; 0 or below: never")
    min_replace_ratio: Share = Field(0.3, description="replace: least share of good samples needed")


class ClipCovConfig(Section):
    """`trainer.algorithm.clip_cov`: used by policy_loss_type=clip_cov (arXiv:2505.22617)."""

    clip_ratio: Share = Field(0.0002, description="share of tokens to detach by covariance")
    clip_cov_lb: float = Field(1.0, description="lower bound of the covariances considered")
    clip_cov_ub: float = Field(5.0, description="upper bound of the covariances considered")


class KLCovConfig(Section):
    """`trainer.algorithm.kl_cov`: used by policy_loss_type=kl_cov (arXiv:2505.22617)."""

    kl_cov_frac: Share = Field(0.2, description="share of tokens, by covariance, that get the KL penalty")
    ppo_kl_coef: NonNegative = Field(1.0, description="coefficient of that penalty")


class CISPOConfig(Section):
    """`trainer.algorithm.cispo`: used by policy_loss_type=cispo (arXiv:2506.13585)."""

    cispo_eps_clip_low: NonNegative = Field(1.0, description="the importance weight is clipped below at 1 - this")
    cispo_eps_clip_high: NonNegative = Field(4.0, description="the importance weight is clipped above at 1 + this")
    cispo_anchor: Literal["old", "rollout"] = Field(
        "old", description="policy in the weight's denominator: trainer before the update, or engine while sampling"
    )


class DPPOConfig(Section):
    """`trainer.algorithm.dppo`: used by policy_loss_type=dppo (arXiv:2602.04879)."""

    dppo_type: Literal["binary_tv", "binary_kl"] = Field("binary_tv", description="divergence that bounds the update")
    delta_low: NonNegative = Field(0.2, description="bound where the advantage is negative (paper: 0.2 tv, 0.05 kl)")
    delta_high: NonNegative = Field(0.2, description="bound where the advantage is positive (paper: 0.2 tv, 0.05 kl)")


class OverlongBufferConfig(Section):
    """`trainer.algorithm.overlong_buffer`: DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13)."""

    len: Count | None = Field(
        None, description=ours("tokens below max_generate_length over which the punishment grows; null for none")
    )
    penalty_factor: NonNegative = Field(
        1.0, description=ours("punishment of a response of max_generate_length tokens, taken off its reward")
    )


class AlgorithmConfig(Section):
    """`trainer.algorithm`."""

    advantage_estimator: Annotated[str, AfterValidator(_estimator)] = Field(
        "grpo", description="how rewards become advantages: a name, or module:function, file.py:function"
    )
    kl_ctrl: KLCtrlConfig = Field(KLCtrlConfig(), description="controller of the KL coefficient in rewards")
    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = Field(
        "k3", description="estimator of the per-token KL (Schulman, Approximating KL divergence)"
    )
    use_kl_in_reward: bool = Field(False, description="subtract kl_loss_coef x KL from the rewards")
    use_kl_loss: bool = Field(True, description="add kl_loss_coef x KL to the policy loss")
    kl_loss_coef: NonNegative = Field(0.001, description="coefficient of the KL to the reference model")
    use_entropy_loss: bool = Field(False, description="subtract entropy_loss_coef x entropy from the policy loss")
    entropy_loss_coef: NonNegative = Field(0.01, description="coefficient of the entropy bonus")
    temperature: Positive | None = Field(
        None, description="divides the trainer's logits; null takes generator.sampling_params.temperature"
    )
    advantage_batch_normalize: bool = Field(False, description="normalise advantages over the whole training batch")
    value_head_prefix: str = Field("value_head", description="name of the value head in the critic")
    policy_loss_type: Annotated[str, AfterValidator(_policy_loss)] = Field(
        "regular",
        description="policy loss: a name (regular: PPO's clipped ratio), or module:function, file.py:function",
    )
    loss_reduction: Literal[
        "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy"
    ] = Field("token_mean", description="how token losses of a minibatch become one number")
    grpo_norm_by_std: bool = Field(True, description="GRPO: divide by the group's standard deviation")
    zero_variance_filter: bool = Field(False, description="mask out groups whose rewards are all equal")
    zero_variance_filter_tol: NonNegative = Field(1e-6, description="rewards this close count as equal")
    lambd: Share = Field(1.0, description="GAE: lambda")
    gamma: Share = Field(1.0, description="GAE: discount")
    eps_clip_low: Share = Field(0.2, description="PPO: the ratio is clipped below at 1 - this")
    eps_clip_high: NonNegative = Field(0.2, description="PPO: the ratio is clipped above at 1 + this")
    clip_ratio_c: Annotated[float, Field(gt=1.0)] = Field(
        3.0, description="dual clip: bound on the ratio where the advantage is negative"
    )
    tis_imp_ratio_cap: float = Field(-1.0, description="deprecated: off_policy_correction.token_tis_ratio_clip_high")
    use_tis: bool = Field(False, description="deprecated: off_policy_correction.tis_ratio_type=token")
    off_policy_correction: OffPolicyCorrectionConfig = Field(
        OffPolicyCorrectionConfig(), description="correction for rollouts from another policy than the trainer's"
    )
    sapo: SAPOConfig = Field(SAPOConfig(), description="SAPO's parameters")
    value_clip: Positive = Field(0.2, description="value loss: predicted values move at most this far per update")
    dynamic_sampling: DynamicSamplingConfig = Field(DynamicSamplingConfig(), description="groups without signal")
    overlong_buffer: OverlongBufferConfig = Field(
        OverlongBufferConfig(), description=ours("punishment of long responses")
    )
    clip_cov: ClipCovConfig = Field(ClipCovConfig(), description="Clip-Cov's parameters")
    kl_cov: KLCovConfig = Field(KLCovConfig(), description="KL-Cov's parameters")
    cispo: CISPOConfig = Field(CISPOConfig(), description="CISPO's parameters")
    dppo: DPPOConfig = Field(DPPOConfig(), description="DPPO's parameters")
    max_seq_len: Count | None = Field(None, description="divisor of loss_reduction=seq_mean_token_sum_norm, in tokens")
