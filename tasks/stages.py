"""The stages of a training step as Prefect tasks on Ray workers: verify, work, commit.

A stage makes nothing true. When actors are not in the state it needs it raises a transient error, the flow reconciles
and submits it again. What is committed for the same inputs is returned at once, in a state named "Recorded".
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed, State

from skyrl_core.algorithms.dynamic_sampling import count, select
from skyrl_core.algorithms.kl_control import make_kl_controller
from skyrl_core.checkpoint.aliases import aliased_steps
from skyrl_core.checkpoint.pins import pinned_steps
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.retention import apply_retention
from skyrl_core.data.carriers import Rollout, RolloutBatch
from skyrl_core.data.references import StageRecord
from skyrl_core.data.seeds import derive_seed
from skyrl_core.data.serialization import (
    prompts_from_bytes,
    rollouts_from_bytes,
    rollouts_to_bytes,
    training_batch_from_bytes,
    training_batch_to_bytes,
)
from skyrl_core.errors import StateMismatchError
from skyrl_core.evaluation.evaluate import evaluate as run_evaluation
from skyrl_core.evaluation.evaluate import write_dump
from skyrl_core.generators.metrics import rollout_metrics
from skyrl_core.generators.protocol import InferenceClient
from skyrl_core.generators.training_rollouts import roll_out
from skyrl_core.testing import faults
from skyrl_core.weight_sync.sync import sync_weights
from tasks.context import StageContext

PROMPTS, ROLLOUTS, BATCH, REPORT = "prompts.json", "rollouts.npz", "batch.npz", "report.json"
_stage_task: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """What identifies one stage of one step: the digest of all its inputs, and the policy version it works with."""

    step: int
    digest: str
    policy_version: int


def draw_name(stage: str, draw: int) -> str:
    """What a stage of a step's draw is recorded as: the first draw bears the stage's own name."""
    return f"{stage}-{draw}" if draw else stage


@task(name="generate", **_stage_task)
def generate(context: StageContext, inputs: StageInputs, prompts: StageRecord, draw: int) -> StageRecord | State:
    """Roll prompts out with the policy of `inputs.policy_version`.

    `draw` counts the step's batches of prompts from 0; only dynamic sampling needs more than one.
    """
    return _once(draw_name("generate", draw), context, inputs, lambda: _generate(context, inputs, prompts, draw))


def _generate(
    context: StageContext, inputs: StageInputs, prompts: StageRecord, draw: int
) -> tuple[Mapping[str, bytes], Any]:
    config, step = context.config, inputs.step
    client = context.engines.client()
    asyncio.run(_require_engines(client, inputs.policy_version))
    began = time.monotonic()
    rollouts = asyncio.run(
        roll_out(
            context.generator(client),
            prompts_from_bytes(context.store.read_file(prompts, PROMPTS)),
            config,
            step=step,
            # A prompt that a step draws again is sampled anew.
            run_seed=derive_seed(config.trainer.seed, "draw", draw) if draw else config.trainer.seed,
        )
    )
    seconds = time.monotonic() - began
    faults.point("generate.sampled", step=step)
    metrics = _rollout_metrics(context, rollouts)
    tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    metrics["generate/tokens_per_second"] = tokens / max(seconds, 1e-9)
    return {ROLLOUTS: rollouts_to_bytes(RolloutBatch(step=step, rollouts=rollouts))}, {
        "metrics": metrics,
        "trajectories": len(rollouts),
        "tokens": tokens,
        "draw": asdict(count(rollouts, config.trainer.algorithm.zero_variance_filter_tol)),
    }


def _rollout_metrics(context: StageContext, rollouts: Sequence[Rollout]) -> dict[str, float]:
    end_ids = {token for token in (context.tokenizer().eos_token_id,) if token is not None}
    return rollout_metrics(rollouts, context.config.generator.n_samples_per_prompt, end_ids)


@task(name="score", **_stage_task)
def score_rollouts(
    context: StageContext, inputs: StageInputs, draws: Sequence[StageRecord], state: Mapping[str, float]
) -> StageRecord | State:
    """Log-probabilities of policy and reference, KL, advantages: everything the update trains on.

    `state` is what the algorithm carries from step to step; the record's summary holds it as it is after this step.
    """
    return _once("score", context, inputs, lambda: _score(context, inputs, draws, state))


def _score(
    context: StageContext, inputs: StageInputs, draws: Sequence[StageRecord], state: Mapping[str, float]
) -> tuple[Mapping[str, bytes], Any]:
    # Imports torch, which the flow process has no use for.
    from skyrl_core.training.scoring import build_training_batch, score, shape_rewards

    trainer, config = context.require_trainer(), context.config
    held = trainer.status().version
    if held != inputs.policy_version:
        raise StateMismatchError(f"score needs policy version {inputs.policy_version}, the trainer holds {held}")
    algorithm = config.trainer.algorithm
    sampled = [rollouts_from_bytes(context.store.read_file(draw, ROLLOUTS)).rollouts for draw in draws]
    chosen = select(
        sampled,
        draws[0].summary["draw"]["prompts"],
        algorithm.dynamic_sampling,
        algorithm.zero_variance_filter_tol,
        derive_seed(config.trainer.seed, "replace", inputs.step),
    )
    # All that was sampled, not only the last draw.
    metrics = _rollout_metrics(context, [row for rows in sampled for row in rows]) if len(sampled) > 1 else {}
    shaped, shaping = shape_rewards(RolloutBatch(step=inputs.step, rollouts=chosen.rollouts), config)
    batch = build_training_batch(
        shaped,
        int(context.tokenizer().pad_token_id),
        group_ids=chosen.group_ids,
        step_wise=config.generator.step_wise_trajectories,
    )
    controller = make_kl_controller(algorithm)
    if state:
        controller.load_state_dict(state)
    batch, scoring = score(trainer.with_logprobs(batch), algorithm, controller)
    faults.point("score.computed", step=inputs.step)
    return {BATCH: training_batch_to_bytes(batch)}, {
        "metrics": {**metrics, **chosen.metrics, **shaping, **scoring},
        "rows": batch.size,
        "algorithm_state": controller.state_dict() if algorithm.use_kl_in_reward else {},
    }


@task(name="update", **_stage_task)
def update(context: StageContext, inputs: StageInputs, batch: StageRecord, lineage: str) -> StageRecord | State:
    """One policy update: from version `inputs.policy_version` to `inputs.step`."""
    return _once("update", context, inputs, lambda: _update(context, inputs, batch, lineage))


def _update(
    context: StageContext, inputs: StageInputs, batch: StageRecord, lineage: str
) -> tuple[Mapping[str, bytes], Any]:
    rows = training_batch_from_bytes(context.store.read_file(batch, BATCH))
    result = context.require_trainer().update(rows, inputs.step, lineage)
    faults.point("update.done", step=inputs.step)
    return {}, {"metrics": dict(result.metrics), "policy_version": result.policy_version, "lineage": lineage}


@task(name="sync weights", **_stage_task)
def sync(context: StageContext, inputs: StageInputs) -> None:
    """Bring the engines to the trainer's version. Leaves no record: engines forget when they die."""
    _log_place("sync", inputs.step)
    trainer = context.require_trainer()
    held = trainer.status().version
    if held != inputs.policy_version:
        raise StateMismatchError(f"sync needs policy version {inputs.policy_version}, the trainer holds {held}")
    asyncio.run(sync_weights(trainer.export_weights, context.engines.client(), inputs.policy_version))


@task(name="checkpoint", **_stage_task)
def checkpoint(context: StageContext, inputs: StageInputs, facts: Mapping[str, Any]) -> StageRecord | State:
    """Save the policy's full state and publish it; then delete what retention no longer keeps.

    `facts` are the manifest's fields that the flow knows: digests, data position, world size, metrics.
    """
    return _once("checkpoint", context, inputs, lambda: _checkpoint(context, inputs, facts))


def _checkpoint(
    context: StageContext, inputs: StageInputs, facts: Mapping[str, Any]
) -> tuple[Mapping[str, bytes], Any]:
    store, step = context.store, inputs.step
    with CheckpointWriter(store.uri, step, fence=store.fence) as writer:
        context.require_trainer().save(writer.directory, step)
        faults.point("checkpoint.written", step=step)
        saved = writer.commit(policy_version=inputs.policy_version, run_name=context.run_name, **facts)
    root = store.uri.rpartition("/")[0]
    protected = pinned_steps(store.uri) | aliased_steps(root, context.run_name)
    deleted = apply_retention(store.uri, context.config.trainer.max_ckpts_to_keep, protected, fence=store.fence)
    return {}, {"uri": saved.uri, "deleted": deleted}


@task(name="evaluate", **_stage_task)
def evaluate(context: StageContext, inputs: StageInputs, prompts: StageRecord) -> StageRecord | State:
    """Score the validation prompts with the engines' present weights; draws nothing from training's randomness."""
    return _once("evaluate", context, inputs, lambda: _evaluate(context, inputs, prompts))


def _evaluate(context: StageContext, inputs: StageInputs, prompts: StageRecord) -> tuple[Mapping[str, bytes], Any]:
    config = context.config
    client = context.engines.client()
    asyncio.run(_require_engines(client, inputs.policy_version))
    validation = prompts_from_bytes(context.store.read_file(prompts, PROMPTS))
    evaluation = asyncio.run(
        run_evaluation(context.generator(client), validation, config, run_seed=config.trainer.seed)
    )
    if config.trainer.dump_eval_results:
        write_dump(evaluation, context.export_dir, inputs.step, context.tokenizer())
    return {REPORT: evaluation.report.to_json().encode()}, {"metrics": evaluation.report.metrics()}


def _once(
    stage: str, context: StageContext, inputs: StageInputs, work: Callable[[], tuple[Mapping[str, bytes], Any]]
) -> StageRecord | State:
    """Return the committed record for these inputs, or do the work and commit it."""
    _log_place(stage, inputs.step)
    found = context.store.find_stage(stage, inputs.step, inputs.digest)
    if found is not None:
        return Completed(name="Recorded", message="its committed output was found in the run store", data=found)
    faults.point(f"{stage}.begin", step=inputs.step)
    began = time.monotonic()
    files, summary = work()
    record = context.store.write_stage(
        stage, inputs.step, inputs.digest, files=files, summary=summary, seconds=time.monotonic() - began
    )
    faults.point(f"{stage}.committed", step=inputs.step)
    return record


def _log_place(stage: str, step: int) -> None:
    get_run_logger().info("%s step %d in process %d, parent %d", stage, step, os.getpid(), os.getppid())


async def _require_engines(client: InferenceClient, version: int) -> None:
    held = await client.versions()
    if any(engine != version for engine in held):
        raise StateMismatchError(f"engines must hold policy version {version}, they hold {held}")
