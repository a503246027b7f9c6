"""The evaluation flow: validation data, engines, one evaluate stage. No training data, no trainer."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect_ray import RayTaskRunner

from flows.environment import prefect_environment
from flows.preflight import check_before_start
from flows.reconcile import Need, heal_engines, sick_engines
from flows.run import fresh_name
from flows.stage_runner import StageRunner
from flows.view import RunView
from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.config import SkyRLConfig, config_digest, load_config
from skyrl_core.data.digests import digest_of, sha256_of_bytes
from skyrl_core.data.lease import Lease
from skyrl_core.data.references import StageRecord
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.serialization import prompts_to_bytes
from skyrl_core.hooks import load_hook
from skyrl_core.runtime.cluster import ensure_ray
from skyrl_core.runtime.engines import EngineGroup
from skyrl_core.runtime.placement import Placement
from skyrl_core.tracking.build import build_tracker
from skyrl_core.training.sharded_state import read_policy_weights
from tasks import setup, stages
from tasks.artifacts import RunArtifacts
from tasks.context import StageContext
from tasks.stages import PROMPTS, REPORT, StageInputs


class EvaluationReconciler:
    """Keeps engines alive with one fixed set of weights: a checkpoint's, or the model's own."""

    def __init__(
        self, config: SkyRLConfig, placement: Placement, engines: EngineGroup, view: RunView, checkpoint: str | None
    ) -> None:
        self._config = config
        self._placement = placement
        self._engines = engines
        self._view = view
        self._checkpoint = checkpoint

    def ensure(self, need: Need) -> None:
        """Return when every engine answers and holds the weights."""
        heal_engines(self._config, self._placement, self._engines, self._view)
        client = self._engines.client()
        if any(version != need.engine_version for version in asyncio.run(client.versions())):
            weights = read_policy_weights(str(self._checkpoint))
            asyncio.run(client.update_weights([weights], int(need.engine_version or 0)))

    def actors_failed(self) -> bool:
        """True when an engine does not answer."""
        return bool(sick_engines(self._engines))

    def abandon(self, need: Need) -> None:
        """End engines that a stage out of time may still hold."""
        self._engines.kill()


_work: ContextVar[Callable[[], StageRecord]] = ContextVar("evaluation_work")


def do_work() -> None:
    """Run what the evaluation flow set up. Not inside the subflow: it travels to Ray workers with the globals it names,
    and a context variable cannot."""
    _work.get()()


@flow(name="evaluation", flow_run_name="{run_name} step {step}", task_runner=RayTaskRunner())
def run_evaluation(run_name: str, step: int) -> None:
    """The evaluate stage on a Ray worker."""
    do_work()


@flow(name="evaluate")
def evaluate(config: str | None = None, overrides: list[str] | None = None, checkpoint: str | None = None) -> str:
    """Score a checkpoint, or the configured model, on the validation data.

    Args:
        config: Path of a YAML configuration file; None takes the defaults.
        overrides: Words `key=value` on top of it.
        checkpoint: A `global_step_N` folder; None evaluates `trainer.policy.model.path`.

    Returns:
        The report as JSON. The trackers get the same metrics at step 0.
    """
    settings = load_config(config, overrides or [])
    check_before_start(settings, training=False)
    saved = checkpoint_at(checkpoint)[0] if checkpoint is not None else None
    step = saved.step if saved is not None else 0
    name = settings.trainer.run_name or fresh_name().replace("run-", "eval-", 1)
    export_dir = Path(settings.trainer.export_path).expanduser() / "evaluations" / name
    with ExitStack() as stack:
        lease = stack.enter_context(Lease.acquire(export_dir / "store"))
        store = RunStore.open(export_dir / "store", fence=lease.token)
        _name_flow_run(name)
        view = stack.enter_context(RunView.open(settings.flow.show, 1, name))
        factory = load_hook(settings.hooks.tracker, "hooks.tracker", build_tracker)
        tracker = factory(settings, run_name=name, run_dir=export_dir)
        stack.callback(tracker.finish, ok=True)
        cluster = stack.enter_context(
            ensure_ray(name, num_cpus=settings.flow.ray_num_cpus, environment=prefect_environment())
        )
        tokenizer = setup.load_tokenizer_task(settings)
        datasets = setup.load_datasets(settings, tokenizer, training=False, validation=True)
        placement = setup.reserve_placement(settings, cluster, datasets)
        inference = setup.start_inference(settings, placement)
        setup.build_generator(settings, tokenizer, inference)
        inference.wait(settings.generator.inference_engine.timeout_seconds)
        context = StageContext(
            config=settings,
            run_name=name,
            store=store,
            export_dir=str(export_dir),
            trainer=None,
            engines=inference.engines,
        )
        reconciler = EvaluationReconciler(settings, placement, inference.engines, view, checkpoint)
        stage = StageRunner(settings, lambda: context, reconciler, view, RunArtifacts(name), tracker)
        record = _evaluate(stage, store, settings, datasets, name, step, checkpoint)
        tracker.log(record.summary["metrics"], 0)
        view.evaluation(step, record.summary["metrics"])
        return store.read_file(record, REPORT).decode()


def _evaluate(
    stage: StageRunner,
    store: RunStore,
    config: SkyRLConfig,
    datasets: setup.Datasets,
    name: str,
    step: int,
    checkpoint: str | None,
) -> StageRecord:
    """Commit the prompts and run the stage in its subflow."""
    data = prompts_to_bytes(datasets.validation.prompts if datasets.validation is not None else ())
    identity = {
        "weights": checkpoint or config.trainer.policy.model.path,
        "prompts": sha256_of_bytes(data),
        "config": config_digest(config),
        "eval": [config.generator.eval_n_samples_per_prompt, config.trainer.eval_greedy],
    }
    digest = digest_of(identity)
    prompts = store.find_stage("validation", step, digest) or store.write_stage(
        "validation", step, digest, files={PROMPTS: data}, summary={}, seconds=0.0
    )
    inputs = StageInputs(step=step, digest=digest_of([digest, prompts.digest]), policy_version=step)
    found: list[StageRecord] = []

    def work() -> StageRecord:
        found.append(stage(stages.evaluate, step, Need(engine_version=step), inputs, prompts))
        return found[0]

    token = _work.set(work)
    try:
        run_evaluation(name, step)
    finally:
        _work.reset(token)
    return found[0]


def _name_flow_run(name: str) -> None:
    if flow_run.id:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=name)
