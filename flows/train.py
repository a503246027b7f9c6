"""The training flow: setup as a chain of tasks, then epochs as subflows.

tokenizer ─▶ datasets ─▶ placement ─▶ inference client ─▶ generator ─▶ trainer ─▶ epoch 1 ─▶ epoch 2 ─▶ …
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from flows.environment import prefect_environment
from flows.epoch import Loop, active_loop, announce_checkpoints, evaluate_start, train_epoch
from flows.flow_runs import close_killed, name_flow_run
from flows.parameters import ConfigFile, Overrides
from flows.preflight import check_before_start, make_missing_data
from flows.reconcile import Reconciler
from flows.run import Actors, Run, open_run
from flows.settings import load_settings
from flows.stage_runner import StageRunner
from flows.view import RunView
from skyrl_core.config.algorithm_checks import algorithm_advice
from skyrl_core.hooks import load_hook
from skyrl_core.runtime.cluster import RayCluster, ensure_ray, warm_worker
from skyrl_core.tracking.build import build_tracker
from skyrl_core.tracking.metrics_file import MetricsFile, MetricsLine
from skyrl_core.tracking.plots import render_curves
from skyrl_core.tracking.protocol import Tracker
from skyrl_core.tracking.summary import RunSummary
from tasks import setup, stages
from tasks.artifacts import RunArtifacts

logger = logging.getLogger(__name__)


@flow(name="train", validate_parameters=True)
def train(config: ConfigFile = None, overrides: Overrides = ()) -> dict[str, Any]:
    """Train a model by reinforcement learning, or continue the run of that name.

    Args:
        config: YAML file with keys, by its path on the machine that runs the flow. Empty: the defaults.
        overrides: Words `key=value` that win over the file. `skyrl-flows config --help-keys` lists the keys.

    Returns:
        The run's summary, as in summary.json.
    """
    began = time.monotonic()
    settings = load_settings(config, overrides)
    make_missing_data(settings)
    check_before_start(settings)
    with ExitStack() as stack:
        run = stack.enter_context(open_run(settings, flow_run_id=str(flow_run.id or "")))
        run.mark(finished=False)
        name_flow_run(run.name)
        _close_predecessor(run)
        view = stack.enter_context(RunView.open(settings.flow.show, None, run.name))
        if run.fresh:
            begins = f"from {run.base.uri}" if run.base is not None else "fresh"
            view.note(f"run {run.name}: nothing to resume in {run.store.uri}, starting {begins}")
        for advice in algorithm_advice(settings.trainer.algorithm):
            view.note(advice)
        tracker = stack.enter_context(_tracking(run))
        # Entered last, so that Ray — and every actor with it — is gone before the lease is given back.
        cluster = stack.enter_context(
            ensure_ray(run.name, num_cpus=settings.flow.ray_num_cpus, environment=prefect_environment())
        )
        warm_worker(stages.__name__, "skyrl_core.training.scoring")
        loop = _set_up(run, view, tracker, cluster, stack)
        _run_epochs(loop)
        summary = _summarise(loop, time.monotonic() - began)
    return asdict(summary)


def _set_up(run: Run, view: RunView, tracker: Tracker, cluster: RayCluster, stack: ExitStack) -> Loop:
    """The chain of setup tasks; a failure in it reaches the trackers before it is raised.

    What it reserves is given back when `stack` unwinds: Ray may live on after the run.
    """
    config = run.config
    artifacts = RunArtifacts(run.name)
    try:
        tokenizer = setup.load_tokenizer_task(config)
        validation = config.trainer.eval_interval > 0
        datasets = setup.load_datasets(config, tokenizer, training=True, validation=validation)
        run.attach_data(datasets, setup.make_loader(config, datasets))
        view.plan(run.total_steps, run.done_step)
        placement = setup.reserve_placement(config, cluster, datasets)
        stack.callback(placement.remove)
        inference = setup.start_inference(config, placement)
        generator = setup.build_generator(config, tokenizer, inference)
        trainer = setup.start_training(config, placement, generator, run.planned_steps)
        inference.wait(config.generator.inference_engine.timeout_seconds)
    except Exception as error:
        tracker.log_exception(error, "set-up")
        artifacts.publish_failure("set-up", run.done_step, error, "Correct what the message names and start again.")
        raise
    run.attach_actors(Actors(placement=placement, engines=inference.engines, trainer=trainer))
    metrics = MetricsFile(run.export_dir / "metrics.jsonl")
    metrics.rewrite(run.lines)
    for line in run.lines:
        tracker.log({**line.metrics, "trainer/epoch": float(line.epoch)}, line.step)
    return Loop(
        run=run,
        stage=StageRunner(config, run.context, Reconciler(run, view), view, artifacts, tracker),
        view=view,
        tracker=tracker,
        metrics=metrics,
        artifacts=artifacts,
    )


def _run_epochs(loop: Loop) -> None:
    """Evaluate the start, then every epoch that is not finished."""
    run, config = loop.run, loop.run.config
    token = active_loop.set(loop)
    try:
        wants_start = config.trainer.eval_before_train and config.trainer.eval_interval > 0
        if wants_start and not any(line.step == run.base_step for line in run.lines):
            evaluate_start(run.name)
        if run.done_step >= run.total_steps:
            loop.view.note(f"run {run.name} already reached its last step, {run.total_steps}: nothing to do")
        announce_checkpoints(run)
        while run.done_step < run.total_steps:
            first = run.done_step + 1
            train_epoch(run.name, run.epoch_of(first), first, _last_of_epoch(run, first))
        run.mark(finished=True)
    finally:
        active_loop.reset(token)


def _last_of_epoch(run: Run, first: int) -> int:
    steps = range(first, run.total_steps + 1)
    return max(step for step in steps if run.epoch_of(step) == run.epoch_of(first))


@contextmanager
def _tracking(run: Run) -> Iterator[Tracker]:
    """The run's trackers, closed with the run's outcome."""
    factory = load_hook(run.config.hooks.tracker, "hooks.tracker", build_tracker)
    tracker: Tracker = factory(run.config, run_name=run.name, run_dir=run.export_dir, run_key=str(run.document["key"]))
    ok = False
    try:
        yield tracker
        ok = True
    finally:
        tracker.finish(ok)


def _close_predecessor(run: Run) -> None:
    """Close the flow run of a predecessor that was killed."""
    previous = run.lease.previous
    killed = previous.info.get("flow_run_id") if previous is not None else None
    if killed and killed != flow_run.id:
        close_killed(killed, f"its process was killed; {run.name} is continued by flow run {flow_run.id}")


def _summarise(loop: Loop, seconds: float) -> RunSummary:
    run = loop.run
    plots = render_curves(run.lines, run.export_dir / "curves.png", title=run.name)
    api_url = PREFECT_API_URL.value()
    summary = summarise_lines(
        run.name,
        run.lines,
        seconds_total=seconds,
        checkpoints=run.store.uri,
        metrics=str(loop.metrics.path),
        plots=str(plots),
        ui_url=f"{api_url.removesuffix('/api')}/runs/flow-run/{flow_run.id}" if api_url else None,
    )
    summary.write(run.export_dir / "summary.json")
    return summary


def summarise_lines(name: str, lines: list[MetricsLine], *, seconds_total: float, **places: Any) -> RunSummary:
    """The run in numbers: accuracies of the first and last evaluation, seconds by stage over all starts of the run."""
    scores = [line.metrics for line in lines if "eval/all/avg_score" in line.metrics]
    first, last = (scores[0], scores[-1]) if scores else ({}, {})
    by_stage: dict[str, float] = {}
    for line in lines:
        for metric, value in line.metrics.items():
            if metric.startswith("timing/") and metric != "timing/step":
                stage = metric.removeprefix("timing/")
                by_stage[stage] = by_stage.get(stage, 0.0) + value
    return RunSummary(
        run_name=name,
        steps=lines[-1].step if lines else 0,
        accuracy_before=first.get("eval/all/avg_score"),
        accuracy_after=last.get("eval/all/avg_score"),
        greedy_before=first.get("eval/all/greedy_score"),
        greedy_after=last.get("eval/all/greedy_score"),
        seconds_total=seconds_total,
        seconds_by_stage=by_stage,
        **places,
    )
