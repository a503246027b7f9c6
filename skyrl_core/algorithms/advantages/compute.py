"""From rewards to advantages as the configuration asks: what the score stage calls."""

from dataclasses import replace

from torch import Tensor

from skyrl_core.algorithms.advantages.normalize import normalize_batch
from skyrl_core.algorithms.advantages.outcome import Outcomes
from skyrl_core.algorithms.registry import estimator_rules, get_advantage_estimator
from skyrl_core.algorithms.types import AdvantageInputs, Advantages, zero_masked
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.errors import ConfigurationError


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Advantages of `advantage_estimator`, normalised when `advantage_batch_normalize` says so.

    Whatever a custom estimator puts at masked tokens, or in rows that are not valid, is 0 in the result. Raises
    ConfigurationError when the estimator is unknown, cannot be used in step-wise training, or returns other shapes.
    """
    name = config.advantage_estimator
    if inputs.trajectory_ids is not None and not estimator_rules(name).step_wise:
        raise ConfigurationError(f"advantage_estimator={name} gives no advantage to trajectories of several rows")
    result = get_advantage_estimator(name)(inputs, config)
    for field in ("advantages", "returns"):
        shape = tuple(getattr(result, field).shape)
        if shape != tuple(inputs.token_rewards.shape):
            raise ConfigurationError(
                f"advantage_estimator={name} returned {field} of shape {shape}, "
                f"expected {tuple(inputs.token_rewards.shape)}"
            )
    trained = inputs.loss_mask & inputs.valid[:, None]
    result = Advantages(
        advantages=zero_masked(result.advantages, trained), returns=zero_masked(result.returns, trained)
    )
    return normalize_batch(result, trained) if config.advantage_batch_normalize else result


def filter_zero_variance(inputs: AdvantageInputs, tolerance: float) -> Tensor:
    """`zero_variance_filter`: the loss mask without the rows of prompts whose rewards are all equal: [B, T] bool.

    Rewards closer than `tolerance` are equal. As in SkyRL only trajectories with trained tokens are compared, and a
    prompt with one of them is kept. Where each turn is a row, a trajectory's reward is that of all its rows.
    """
    outcomes = Outcomes.of(inputs)
    groups = replace(outcomes.groups, valid=outcomes.groups.valid & (outcomes.tokens > 0))
    same = (groups.size() > 1) & ~groups.varied(outcomes.scores, tolerance) & groups.valid
    return inputs.loss_mask & ~same[outcomes.row][:, None]


def zero_variance_share(inputs: AdvantageInputs, tolerance: float = 0.0) -> float:
    """Share of the prompts with two or more valid samples whose rewards are all equal; 0 when there is none."""
    outcomes = Outcomes.of(inputs)
    groups = outcomes.groups
    compared = groups.valid & (groups.size() > 1)
    same = compared & ~groups.varied(outcomes.scores, tolerance)
    prompts = len(groups.index[compared].unique())
    return len(groups.index[same].unique()) / prompts if prompts else 0.0
