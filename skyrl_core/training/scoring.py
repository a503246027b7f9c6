"""From rollouts to a training batch, and from rewards to advantages."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_core.algorithms.advantages.compute import compute_advantages, filter_zero_variance, zero_variance_share
from skyrl_core.algorithms.advantages.outcome import Outcomes
from skyrl_core.algorithms.kl import penalize_rewards, token_kl
from skyrl_core.algorithms.kl_control import KLController, make_kl_controller
from skyrl_core.algorithms.off_policy import correction_metrics, mismatch_metrics
from skyrl_core.algorithms.rewards import shape_overlong
from skyrl_core.algorithms.types import AdvantageInputs
from skyrl_core.config import SkyRLConfig
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.data.carriers import FloatArray, IntArray, Rollout, RolloutBatch, TrainingBatch
from skyrl_core.errors import RewardError, TrainingError


def build_training_batch(
    rollouts: RolloutBatch,
    pad_token_id: int,
    *,
    group_ids: Sequence[int] | None = None,
    step_wise: bool = False,
) -> TrainingBatch:
    """Pad the trajectories of a step into one batch: prompts on the left, responses on the right, rows in order.

    Rows with equal `group_ids` are compared with each other; without it those of one prompt are. With `step_wise` the
    rows of one sample of a group are turns of one trajectory.

    Trajectories whose environment failed become rows that are not valid: no reward and nothing to train on. An empty
    response keeps its reward at the first response column. Raises RewardError for a reward that is not finite,
    TrainingError when there is no trajectory, when a prompt is empty, or when only some of the usable trajectories have
    log-probabilities or only some have a greedy reward.
    """
    rows = rollouts.rollouts
    if not rows:
        raise TrainingError(f"step {rollouts.step} has no trajectory to train on")
    for row in rows:
        _check(row, rollouts.step)
    prompt_width = max(len(row.prompt_ids) for row in rows)
    # An empty response still needs a column for its reward.
    width = prompt_width + max(1, *(max(len(row.response_ids), len(row.token_rewards)) for row in rows))
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask, loss_mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    token_rewards = np.zeros(shape, dtype=np.float32)
    valid = np.array([row.error is None for row in rows], dtype=np.bool_)
    for index, row in enumerate(rows):
        start, stop = prompt_width - len(row.prompt_ids), prompt_width + len(row.response_ids)
        input_ids[index, start:prompt_width] = row.prompt_ids
        input_ids[index, prompt_width:stop] = row.response_ids
        attention_mask[index, start:stop] = 1
        if row.error is None:
            loss_mask[index, prompt_width:stop] = row.loss_mask
            token_rewards[index, prompt_width : prompt_width + len(row.token_rewards)] = row.token_rewards
    groups = _number([row.uid for row in rows]) if group_ids is None else np.array(group_ids, dtype=np.int64)
    samples = [(int(group), row.sample_index) for group, row in zip(groups, rows, strict=True)]
    return TrainingBatch(
        step=rollouts.step,
        prompt_width=prompt_width,
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        token_rewards=token_rewards,
        group_ids=groups,
        valid=valid,
        trajectory_ids=_number(samples) if step_wise else None,
        greedy_rewards=_greedy_rewards(rollouts.step, rows),
        rollout_logprobs=_rollout_logprobs(rollouts.step, rows, loss_mask, prompt_width),
    )


def _check(row: Rollout, step: int) -> None:
    if len(row.prompt_ids) == 0:
        raise TrainingError(f"step {step}: the prompt of {row.uid} is empty; the template must give a token")
    if row.error is None and not np.isfinite(row.token_rewards).all():
        raise RewardError(
            f"step {step}: sample {row.sample_index} of {row.uid} has reward {row.reward}, which is not a finite "
            "number; an environment that cannot score must fail instead"
        )


def shape_rewards(rollouts: RolloutBatch, config: SkyRLConfig) -> tuple[RolloutBatch, dict[str, float]]:
    """The rollouts with the overlong punishment on their rewards, where `overlong_buffer.len` asks for it."""
    buffer = config.trainer.algorithm.overlong_buffer
    if buffer.len is None:
        return rollouts, {}
    longest = config.generator.sampling_params.max_generate_length
    rows = [shape_overlong(row, longest, buffer.len, buffer.penalty_factor) for row in rollouts.rollouts]
    added = [
        after.reward - before.reward
        for before, after in zip(rollouts.rollouts, rows, strict=True)
        if before.error is None
    ]
    metrics = {
        "reward/overlong_mean": sum(added) / max(len(added), 1),
        "reward/overlong_share": sum(value < 0 for value in added) / max(len(added), 1),
    }
    return replace(rollouts, rollouts=rows), metrics


def _number(names: Sequence[Hashable]) -> IntArray:
    """Equal names get the same number, counted from 0 in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _greedy_rewards(step: int, rows: Sequence[Rollout]) -> FloatArray | None:
    usable = [row for row in rows if row.error is None]
    lacking = [row.uid for row in usable if row.greedy_reward is None]
    if len(lacking) == len(usable):
        return None
    if lacking:
        raise TrainingError(
            f"step {step}: {len(lacking)} trajectories have no greedy reward, among them {lacking[0]}'s"
        )
    return np.array([0.0 if row.greedy_reward is None else row.greedy_reward for row in rows], dtype=np.float32)


def _rollout_logprobs(step: int, rows: Sequence[Rollout], loss_mask: IntArray, prompt_width: int) -> FloatArray | None:
    usable = [row for row in rows if row.error is None]
    lacking = [row.uid for row in usable if row.rollout_logprobs is None]
    if len(lacking) == len(usable):
        return None
    if lacking:
        raise TrainingError(
            f"step {step}: {len(lacking)} of {len(usable)} trajectories have no rollout log-probabilities, among them "
            f"one of {lacking[0]}; the engines must return them for all or for none"
        )
    logprobs = np.zeros(loss_mask.shape, dtype=np.float32)
    for index, row in enumerate(rows):
        if row.error is None and row.rollout_logprobs is not None:
            logprobs[index, prompt_width : prompt_width + len(row.response_ids)] = row.rollout_logprobs
    return np.where(loss_mask != 0, logprobs, np.float32(0.0))


def score(
    batch: TrainingBatch, algorithm: AlgorithmConfig, controller: KLController | None = None
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with advantages and returns, and the step's metrics.

    With `use_kl_in_reward` KL to the reference is taken off the token rewards, at the coefficient of `controller` (the
    configured one without it), which is then told the step's mean KL. With `zero_variance_filter` prompts whose rewards
    before that are all equal are taken out of the loss mask. Raises RewardError for a reward that is not finite,
    ConfigurationError for an unknown or unusable estimator, TrainingError when log-probabilities are missing.
    """
    inputs = _advantage_inputs(batch)
    metrics = {
        **_reward_metrics(inputs),
        **_length_metrics(batch),
        **_engine_metrics(batch, algorithm),
    }
    trained = inputs.loss_mask
    if algorithm.zero_variance_filter:
        trained = filter_zero_variance(inputs, algorithm.zero_variance_filter_tol)
    if algorithm.use_kl_in_reward:
        rewards, measured = _penalized(batch, inputs, algorithm, controller or make_kl_controller(algorithm))
        inputs = replace(inputs, token_rewards=rewards)
        metrics |= measured
    inputs = replace(inputs, loss_mask=trained)
    result = compute_advantages(inputs, algorithm)
    scored = replace(
        batch,
        loss_mask=trained.numpy().astype(np.int64),
        advantages=result.advantages.float().numpy(),
        returns=result.returns.float().numpy(),
    )
    metrics["batch/trained_tokens"] = float(trained.sum())
    return scored, metrics


def _advantage_inputs(batch: TrainingBatch) -> AdvantageInputs:
    def tensor(array: NDArray[Any] | None) -> torch.Tensor | None:
        return None if array is None else torch.tensor(array)

    return AdvantageInputs(
        token_rewards=torch.tensor(batch.token_rewards),
        loss_mask=torch.tensor(batch.loss_mask != 0),
        group_ids=torch.tensor(batch.group_ids),
        valid=torch.tensor(batch.valid),
        values=tensor(batch.values),
        greedy_rewards=tensor(batch.greedy_rewards),
        trajectory_ids=tensor(batch.trajectory_ids),
    )


def _penalized(
    batch: TrainingBatch, inputs: AdvantageInputs, algorithm: AlgorithmConfig, controller: KLController
) -> tuple[torch.Tensor, dict[str, float]]:
    """Token rewards [B, T] with KL taken off. The controller learns the mean KL over the step's trained tokens, and how
    many trajectories it was measured on."""
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        raise TrainingError("trainer.algorithm.use_kl_in_reward=true needs log-probabilities of policy and reference")
    old, ref, mask = torch.tensor(batch.old_logprobs), torch.tensor(batch.ref_logprobs), inputs.loss_mask
    coefficient, estimator = controller.value, algorithm.kl_estimator_type
    rewards = penalize_rewards(inputs.token_rewards, old, ref, mask, coefficient, estimator)
    tokens = int(mask.sum())
    mean = float(token_kl(old, ref, mask, estimator).double().sum()) / max(tokens, 1)
    if tokens:
        controller.update(mean, int((Outcomes.of(inputs).tokens > 0).sum()))
    penalized = Outcomes.of(replace(inputs, token_rewards=rewards))
    scores = penalized.scores[penalized.groups.valid]
    metrics = {"reward/kl": mean, "reward/kl_coefficient": coefficient}
    return rewards, metrics | ({"reward/mean_after_kl": float(scores.mean())} if len(scores) else {})


def _reward_metrics(inputs: AdvantageInputs) -> dict[str, float]:
    """Over trajectories, whether they are one row or several."""
    outcomes = Outcomes.of(inputs)
    scores = outcomes.scores[outcomes.groups.valid]
    metrics = {"reward/failed_share": 1.0 - len(scores) / len(outcomes.scores)}
    if len(scores):
        metrics["reward/mean"] = float(scores.mean())
        metrics["reward/std"] = float(scores.std(correction=0))
        metrics["reward/zero_variance_share"] = zero_variance_share(inputs)
    if outcomes.greedy is not None and len(scores):
        metrics["reward/greedy_mean"] = float(outcomes.greedy[outcomes.groups.valid].mean())
    return metrics


def _length_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Response lengths in tokens, observations included, over valid rows."""
    lengths = batch.attention_mask[batch.valid, batch.prompt_width :].sum(axis=1)
    if not len(lengths):
        return {}
    return {
        "response/length_mean": float(lengths.mean()),
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
        "response/empty_share": float((lengths == 0).mean()),
    }


def _engine_metrics(batch: TrainingBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """How far the trainer's log-probabilities before the update are from the engine's, over trained tokens, and what
    `off_policy_correction` makes of it. Same weights, template and temperature on both sides make it rounding only."""
    if batch.rollout_logprobs is None or batch.old_logprobs is None:
        return {}
    old, rollout = torch.tensor(batch.old_logprobs), torch.tensor(batch.rollout_logprobs)
    mask = torch.tensor(batch.loss_mask != 0)
    correction = correction_metrics(old, rollout, mask, algorithm.off_policy_correction)
    return {
        **{f"mismatch/{name}": value for name, value in mismatch_metrics(old, rollout, mask).items()},
        **{f"off_policy/{name}": value for name, value in correction.items()},
    }
