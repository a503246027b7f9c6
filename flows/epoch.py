"""One epoch as a subflow. A step reads like the data flow:

prompts ─▶ generate ─▶ score ─▶ update ─▶ sync weights ─▶ [checkpoint] ─▶ [evaluate]
           rollouts    batch    policy    engines
                                n-1 → n   n-1 → n
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, replace

from prefect import flow
from prefect_ray import RayTaskRunner

from flows.reconcile import Need
from flows.run import Run
from flows.stage_runner import StageRunner
from flows.view import RunView
from skyrl_core.algorithms.dynamic_sampling import Draw, enough
from skyrl_core.checkpoint.discovery import read_manifest
from skyrl_core.data.digests import digest_of
from skyrl_core.data.references import StageRecord
from skyrl_core.errors import RolloutError
from skyrl_core.evaluation.identity import evaluation_identity
from skyrl_core.tracking.metrics_file import MetricsFile, MetricsLine
from skyrl_core.tracking.protocol import Tracker
from tasks import stages
from tasks.artifacts import RunArtifacts
from tasks.events import CHECKPOINT_SAVED, send_event
from tasks.stages import StageInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What the steps of a run share in the flow process."""

    run: Run
    stage: StageRunner
    view: RunView
    tracker: Tracker
    metrics: MetricsFile
    artifacts: RunArtifacts

    def report(self, line: MetricsLine) -> None:
        """Tell everybody who listens that a step is committed."""
        run = self.run
        self.metrics.append(line)
        self.tracker.log({**line.metrics, "trainer/epoch": float(line.epoch)}, line.step)
        self.view.step_done(line.step, line.metrics)
        if line.step % run.config.flow.artifact_interval == 0 or line.step == run.total_steps:
            self.artifacts.publish_progress(line.step, run.total_steps)
            places = {"run store": run.store.uri, "metrics": str(self.metrics.path)}
            self.artifacts.publish_curves(run.lines, {**places, **self.tracker.links()})


active_loop: ContextVar[Loop] = ContextVar("active_loop")
"""Subflows take plain parameters, readable in the UI, and find what they work on here."""


def current_loop() -> Loop:
    """The loop of this flow process.

    Subflows call this rather than read the variable: Prefect ships them to Ray workers by value, with the globals they
    name, and a context variable cannot travel.
    """
    return active_loop.get()


@flow(name="epoch", flow_run_name="{run_name} epoch {epoch}", task_runner=RayTaskRunner())
def train_epoch(run_name: str, epoch: int, first_step: int, last_step: int) -> None:
    """Steps `first_step` to `last_step` of the run, all of one epoch (counted from 1).

    Fewer when dynamic sampling uses the epoch's prompts up before.
    """
    loop = current_loop()
    loop.view.epoch(epoch)
    for step in range(first_step, last_step + 1):
        if step > loop.run.total_steps or loop.run.epoch_of(step) != epoch:
            break
        train_step(loop, step, epoch)


@flow(name="evaluation", flow_run_name="{run_name} evaluation before training", task_runner=RayTaskRunner())
def evaluate_start(run_name: str) -> None:
    """Score the start model, so that there is something to compare with."""
    loop = current_loop()
    step = loop.run.base_step
    records = {"evaluate": evaluate(loop, step)}
    loop.report(loop.run.close_step(step, 0, records, 0.0))


def train_step(loop: Loop, step: int, epoch: int) -> None:
    """One training step, from prompts to committed metrics."""
    run, stage, before = loop.run, loop.stage, step - 1
    records: dict[str, StageRecord] = {}

    draws = sample(loop, step)
    records["generate"] = replace(draws[-1], seconds=sum(draw.seconds for draw in draws))

    state = run.algorithm_state(before)
    digest = run.inputs("score", step, before, *(draw.digest for draw in draws))
    inputs = StageInputs(step=step, digest=digest, policy_version=before)
    found = run.store.find_stage("score", step, inputs.digest)
    need = Need(trainer_version=before)
    records["score"] = stage(stages.score_rollouts, step, need, inputs, draws, state, found=found)

    batch = records["score"]
    lineage = digest_of({"parent": run.lineage(before), "batch": batch.digest})
    inputs = StageInputs(step=step, digest=run.inputs("update", step, before, batch.digest), policy_version=before)
    found = run.store.find_stage("update", step, inputs.digest)
    need = Need(trainer_version=before, done_lineage=lineage)
    records["update"] = stage(stages.update, step, need, inputs, batch, lineage, found=found)

    began = time.monotonic()
    inputs = StageInputs(step=step, digest=run.inputs("sync", step, step), policy_version=step)
    stage(stages.sync, step, Need(trainer_version=step), inputs)
    sync_seconds = time.monotonic() - began

    last = step == run.total_steps
    if last or _due(step, run.config.trainer.ckpt_interval):
        records["checkpoint"] = checkpoint(loop, step)
    if run.config.trainer.eval_interval > 0 and (last or _due(step, run.config.trainer.eval_interval)):
        records["evaluate"] = evaluate(loop, step)
    if "checkpoint" in records:
        # After the evaluation, so that whoever evaluates checkpoints finds it; before the step is closed, so that a
        # kill in between repeats it. What could not be sent is sent with the next checkpoint, or at the next start.
        announce_checkpoints(run)

    loop.report(run.close_step(step, epoch, records, sync_seconds))


def sample(loop: Loop, step: int) -> list[StageRecord]:
    """Roll out a batch of prompts, and with dynamic sampling as many more as the step needs. The data then stands after
    the last of them, so nothing is sampled in two steps."""
    run, before = loop.run, step - 1
    draws: list[StageRecord] = []
    while not draws or not _enough(loop, step, draws):
        number = len(draws)
        prompts = run.plan(step, number)
        name = stages.draw_name("generate", number)
        inputs = StageInputs(step=step, digest=run.inputs(name, step, before, prompts.digest), policy_version=before)
        found = run.store.find_stage(name, step, inputs.digest)
        need = Need(engine_version=before)
        draws.append(loop.stage(stages.generate, step, need, inputs, prompts, number, found=found))
    if len(draws) > 1:
        run.consume(step, len(draws))
        loop.view.shorten(run.total_steps)
    return draws


def _enough(loop: Loop, step: int, draws: list[StageRecord]) -> bool:
    counts = [Draw(**draw.summary["draw"]) for draw in draws]
    try:
        return enough(counts, counts[0].prompts, loop.run.config.trainer.algorithm.dynamic_sampling)
    except RolloutError as error:
        loop.artifacts.publish_failure("generate", step, error, "The run stopped; what was sampled is kept.")
        loop.tracker.log_exception(error, f"generate step {step}")
        raise


def checkpoint(loop: Loop, step: int) -> StageRecord:
    """Save and publish the policy of `step`; recorded batches older than the oldest kept checkpoint go."""
    run = loop.run
    inputs = StageInputs(step=step, digest=run.inputs("checkpoint", step, step), policy_version=step)
    update = run.store.read_stage("update", step)
    facts = {
        "config_digest": run.document["config_digest"],
        "dataset_fingerprint": run.loader.dataset.fingerprint,
        "data_position": run.loader.state_dict(step),
        "world_size": len(run.actors.placement.policy),
        "metrics": dict(update.summary["metrics"]) if update is not None else {},
        "algorithm_state": run.algorithm_state(step),
    }
    found = run.store.find_stage("checkpoint", step, inputs.digest)
    record: StageRecord = loop.stage(stages.checkpoint, step, Need(trainer_version=step), inputs, facts, found=found)
    kept = [found.step for found in run.checkpoints() if found is not run.base]
    if kept:
        # Pinned and aliased checkpoints may be much older: nobody replays from them.
        newest = kept[-run.config.trainer.max_ckpts_to_keep :] if run.config.trainer.max_ckpts_to_keep > 0 else kept
        run.store.prune_before(min(newest) + 1)
    return record


def announce_checkpoints(run: Run) -> None:
    """Send an event for every checkpoint of the run that has not had one; evaluation flows start on it."""
    for found in run.checkpoints():
        if found is run.base:
            continue
        content = read_manifest(found).content_digest
        digest = digest_of({"checkpoint": content})
        if run.store.find_stage("announce", found.step, digest) is not None:
            continue
        payload = {"run": run.name, "step": found.step, "path": found.uri, "content_digest": content}
        if send_event(CHECKPOINT_SAVED, kind="checkpoint", name=f"{run.name}/{found.step}", payload=payload):
            run.store.write_stage("announce", found.step, digest, files={}, summary={}, seconds=0.0)


def evaluate(loop: Loop, step: int) -> StageRecord:
    """Score the validation prompts with the weights of `step`; a checkpoint of that step keeps the score."""
    run = loop.run
    prompts = run.validation(step)
    identity = evaluation_identity(run.config, prompts.files[0].sha256)
    inputs = StageInputs(
        step=step, digest=run.inputs("evaluate", step, step, prompts.digest, identity), policy_version=step
    )
    found = run.store.find_stage("evaluate", step, inputs.digest)
    record: StageRecord = loop.stage(stages.evaluate, step, Need(engine_version=step), inputs, prompts, found=found)
    loop.view.evaluation(step, record.summary["metrics"])
    run.keep_score(step, identity, record)
    return record


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
