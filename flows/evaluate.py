"""The evaluation flow: validation data, engines, one evaluate stage. No training data, no trainer."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect_ray import RayTaskRunner

from flows.environment import prefect_environment
from flows.flow_runs import name_flow_run
from flows.parameters import ConfigFile, Overrides
from flows.preflight import check_before_start
from flows.reconcile import Need, heal_engines, sick_engines
from flows.run import fresh_name
from flows.settings import load_settings
from flows.stage_runner import StageRunner
from flows.view import RunView
from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.config import SkyRLConfig, config_digest
from skyrl_core.data.digests import digest_of, sha256_of_bytes
from skyrl_core.data.lease import Lease
from skyrl_core.data.references import StageRecord
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.serialization import prompts_to_bytes
from skyrl_core.evaluation.identity import evaluation_identity
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
def evaluate(
    config: ConfigFile = None,
    overrides: Overrides = (),
    checkpoint: str | None = None,
) -> str:
    """Score a checkpoint, or the configured model, on the validation data.

    Args:
        config: YAML file with keys, by its path on the machine that runs the flow. Empty: the defaults.
        overrides: Words `key=value` that win over the file. `skyrl-flows config --help-keys` lists the keys.
        checkpoint: A folder `global_step_N`. Empty: the model that trainer.policy.model.path names.

    Returns:
        The report as JSON. The trackers get the same metrics at step 0.
    """
    settings = load_settings(config, overrides)
    check_before_start(settings, training=False)
    saved, manifest = checkpoint_at(checkpoint) if checkpoint is not None else (None, None)
    name = settings.trainer.run_name or fresh_name().replace("run-", "eval-", 1)
    name_flow_run(name)
    export_dir = Path(settings.trainer.export_path).expanduser() / "evaluations" / name
    evaluation = Evaluation(
        config=settings,
        name=name,
        checkpoint=checkpoint,
        step=saved.step if saved is not None else 0,
        weights=manifest.content_digest if manifest is not None else model_digest(settings),
        export_dir=export_dir,
        store_root=str(export_dir / "store"),
    )
    record, store = evaluation.run(evaluation.prepare())
    return store.read_file(record, REPORT).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Tokenizer and prompts of an evaluation, and which evaluations it may be compared with."""

    tokenizer: Any
    datasets: setup.Datasets
    prompts: bytes
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of fixed weights, told by the digest `weights`; `step` is theirs.

    `store_root` is where the stage is committed.
    """

    config: SkyRLConfig
    name: str
    checkpoint: str | None
    step: int
    weights: str
    export_dir: Path
    store_root: str

    def prepare(self) -> Prepared:
        """Load what tells which evaluation this is; nothing heavy."""
        tokenizer = setup.load_tokenizer_task(self.config)
        datasets = setup.load_datasets(self.config, tokenizer, training=False, validation=True)
        prompts = prompts_to_bytes(datasets.validation.prompts if datasets.validation is not None else ())
        identity = evaluation_identity(self.config, sha256_of_bytes(prompts))
        return Prepared(tokenizer=tokenizer, datasets=datasets, prompts=prompts, identity=identity)

    def run(self, prepared: Prepared) -> tuple[StageRecord, RunStore]:
        """Start engines, evaluate, and tell the trackers.

        Raises RunBusyError while another process does the same.
        """
        settings = self.config
        with ExitStack() as stack:
            lease = stack.enter_context(Lease.acquire(self.store_root, {"flow_run_id": str(flow_run.id or "")}))
            store = RunStore.open(self.store_root, fence=lease.token)
            view = stack.enter_context(RunView.open(settings.flow.show, 1, self.name))
            factory = load_hook(settings.hooks.tracker, "hooks.tracker", build_tracker)
            tracker = factory(settings, run_name=self.name, run_dir=self.export_dir)
            stack.callback(tracker.finish, ok=True)
            cluster = stack.enter_context(
                ensure_ray(self.name, num_cpus=settings.flow.ray_num_cpus, environment=prefect_environment())
            )
            placement = setup.reserve_placement(settings, cluster, prepared.datasets)
            stack.callback(placement.remove)
            inference = setup.start_inference(settings, placement)
            setup.build_generator(settings, prepared.tokenizer, inference)
            inference.wait(settings.generator.inference_engine.timeout_seconds)
            context = StageContext(
                config=settings,
                run_name=self.name,
                store=store,
                export_dir=str(self.export_dir),
                trainer=None,
                engines=inference.engines,
            )
            reconciler = EvaluationReconciler(settings, placement, inference.engines, view, self.checkpoint)
            stage = StageRunner(settings, lambda: context, reconciler, view, RunArtifacts(self.name), tracker)
            record = self._stage(stage, store, prepared)
            tracker.log(record.summary["metrics"], 0)
            view.evaluation(self.step, record.summary["metrics"])
            return record, store

    def _stage(self, stage: StageRunner, store: RunStore, prepared: Prepared) -> StageRecord:
        """Commit the prompts and run the stage in its subflow."""
        digest = digest_of(
            {
                "weights": self.weights,
                "config": config_digest(self.config),
                "identity": prepared.identity,
            }
        )
        prompts = store.find_stage("validation", self.step, digest) or store.write_stage(
            "validation", self.step, digest, files={PROMPTS: prepared.prompts}, summary={}, seconds=0.0
        )
        inputs = StageInputs(step=self.step, digest=digest_of([digest, prompts.digest]), policy_version=self.step)
        found: list[StageRecord] = []

        def work() -> StageRecord:
            found.append(stage(stages.evaluate, self.step, Need(engine_version=self.step), inputs, prompts))
            return found[0]

        token = _work.set(work)
        try:
            run_evaluation(self.name, self.step)
        finally:
            _work.reset(token)
        return found[0]


def model_digest(config: SkyRLConfig) -> str:
    """Tells the configured model from another one, also from one that took its place in the same folder."""
    path = str(config.trainer.policy.model.path)
    folder = Path(path).expanduser()
    files = sorted(item for item in folder.rglob("*") if item.is_file()) if folder.is_dir() else []
    stats = [[item.name, item.stat().st_size, item.stat().st_mtime_ns] for item in files]
    return digest_of({"model": path, "files": stats})
