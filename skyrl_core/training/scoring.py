"""From rollouts to a training batch, and from rewards to advantages."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_core.algorithms.advantages.compute import compute_advantages, filter_zero_variance, zero_variance_share
from skyrl_core.algorithms.kl import token_kl
from skyrl_core.algorithms.types import AdvantageInputs
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.data.carriers import FloatArray, IntArray, Rollout, RolloutBatch, TrainingBatch
from skyrl_core.errors import RewardError, TrainingError


def build_training_batch(rollouts: RolloutBatch, pad_token_id: int) -> TrainingBatch:
    """Pad the trajectories of a step into one batch: prompts on the left, responses on the right, rows in order.

    Trajectories whose environment failed become rows that are not valid: no reward and nothing to train on. An empty
    response keeps its reward at the first response column. Raises RewardError for a reward that is not finite,
    TrainingError when there is no trajectory, when a prompt is empty, or when only some of the usable trajectories have
    log-probabilities.
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
    return TrainingBatch(
        step=rollouts.step,
        prompt_width=prompt_width,
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        token_rewards=token_rewards,
        group_ids=_number_groups([row.uid for row in rows]),
        valid=valid,
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


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """What only the trajectories know: the share that ran into the length limit, among those that did not fail."""
    usable = [row for row in rollouts.rollouts if row.error is None]
    if not usable:
        return {}
    return {"response/truncated_share": sum(row.stop_reason == "length" for row in usable) / len(usable)}


def _number_groups(uids: Sequence[str]) -> IntArray:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=np.int64)


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


def score(batch: TrainingBatch, algorithm: AlgorithmConfig) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with advantages and returns, and the step's metrics.

    With `zero_variance_filter` prompts whose rewards are all equal are taken out of the loss mask first.
    Raises RewardError for a reward that is not finite, ConfigurationError for an unknown or unusable estimator.
    """
    inputs = AdvantageInputs(
        token_rewards=torch.tensor(batch.token_rewards),
        loss_mask=torch.tensor(batch.loss_mask != 0),
        group_ids=torch.tensor(batch.group_ids),
        valid=torch.tensor(batch.valid),
        values=None if batch.values is None else torch.tensor(batch.values),
    )
    metrics = {
        **_reward_metrics(inputs),
        **_length_metrics(batch),
        **_mismatch_metrics(batch),
    }
    if algorithm.zero_variance_filter:
        loss_mask = filter_zero_variance(inputs, algorithm.zero_variance_filter_tol)
        batch = replace(batch, loss_mask=loss_mask.numpy().astype(np.int64))
        inputs = replace(inputs, loss_mask=loss_mask)
    result = compute_advantages(inputs, algorithm)
    scored = replace(batch, advantages=result.advantages.float().numpy(), returns=result.returns.float().numpy())
    metrics["batch/trained_tokens"] = float(inputs.loss_mask.sum())
    return scored, metrics


def _reward_metrics(inputs: AdvantageInputs) -> dict[str, float]:
    scores = inputs.scores()[inputs.valid]
    metrics = {"reward/failed_share": 1.0 - len(scores) / len(inputs.valid)}
    if len(scores):
        metrics["reward/mean"] = float(scores.mean())
        metrics["reward/std"] = float(scores.std(correction=0))
        metrics["reward/zero_variance_share"] = zero_variance_share(inputs)
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


def _mismatch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """How far the trainer's log-probabilities before the update are from the engine's, over trained tokens.

    Same weights, template and temperature on both sides make it rounding only. mismatch/kl is the k3 estimate of
    KL(engine ‖ trainer), whose samples are the engine's.
    """
    trained: NDArray[np.bool_] = batch.loss_mask != 0
    if batch.rollout_logprobs is None or batch.old_logprobs is None or not trained.any():
        return {}
    rollout, old = torch.tensor(batch.rollout_logprobs[trained]), torch.tensor(batch.old_logprobs[trained])
    gap = (rollout.double() - old.double()).abs()
    divergence = token_kl(rollout[None], old[None], torch.ones_like(rollout[None], dtype=torch.bool), "k3")
    return {
        "mismatch/abs_mean": float(gap.mean()),
        "mismatch/abs_max": float(gap.max()),
        "mismatch/kl": float(divergence.double().mean()),
    }
