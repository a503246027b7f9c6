"""A training run as the flow process holds it: configuration, run store, data, actors, and what is done so far."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from skyrl_core.checkpoint.catalog import CONFIG_DOCUMENT, RUN_DOCUMENT, STATE_DOCUMENT, RunState, read_state
from skyrl_core.checkpoint.code_version import code_version
from skyrl_core.checkpoint.discovery import list_checkpoints, read_manifest
from skyrl_core.checkpoint.resume import starting_point
from skyrl_core.checkpoint.retention import clean_leftovers
from skyrl_core.checkpoint.scores import CheckpointScore, record_score
from skyrl_core.config import SkyRLConfig, config_digest, diff_configs, dump_yaml
from skyrl_core.config.load import config_from_yaml
from skyrl_core.data.digests import digest_of, sha256_of_bytes
from skyrl_core.data.lease import Lease
from skyrl_core.data.loader import PromptLoader
from skyrl_core.data.references import CheckpointRef, StageRecord
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.serialization import prompts_to_bytes
from skyrl_core.errors import ConfigurationError
from skyrl_core.runtime.engines import EngineGroup
from skyrl_core.runtime.placement import Placement
from skyrl_core.runtime.trainer import Trainer
from skyrl_core.tracking.metrics_file import MetricsLine
from skyrl_core.user_code import file_digests
from tasks.context import StageContext
from tasks.setup import Datasets
from tasks.stages import PROMPTS, draw_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Actors:
    """The Ray side of a run. Only the flow process builds and rebuilds it."""

    placement: Placement
    engines: EngineGroup
    trainer: Trainer | None


@dataclass(slots=True, kw_only=True)
class Run:
    """One run name's writer. `lines` are the committed steps, oldest first (step 0: the evaluation before training)."""

    config: SkyRLConfig
    name: str
    store: RunStore
    lease: Lease
    document: dict[str, Any]
    export_dir: Path
    lines: list[MetricsLine] = field(default_factory=list)
    base: CheckpointRef | None = None
    fresh: bool = True
    _loader: PromptLoader | None = None
    _planned_steps: int = 0
    _datasets: Datasets | None = None
    _actors: Actors | None = None

    # what setup provides, in this order

    def attach_data(self, datasets: Datasets, loader: PromptLoader) -> None:
        """Give the run its prompts, and let them stand where the last finished step left them.

        Raises DatasetError when they are others than the run began with.
        """
        self._datasets, self._loader = datasets, loader
        allow_changed = self.config.trainer.allow_changed_data
        if self.base is not None:
            # Of a run with steps of its own only the last one's data matter.
            position = read_manifest(self.base).data_position
            loader.load_state_dict(position, allow_changed=allow_changed or bool(self.lines))
        self._planned_steps = self.total_steps
        record = self.store.read_stage("step", self.done_step) if self.lines else None
        if record is not None and record.summary.get("position") is not None:
            loader.load_state_dict(record.summary["position"], allow_changed=allow_changed)

    def attach_actors(self, actors: Actors) -> None:
        """Give the run its actors."""
        self._actors = actors

    @property
    def loader(self) -> PromptLoader:
        return _present(self._loader, "the training data")

    @property
    def datasets(self) -> Datasets:
        return _present(self._datasets, "the datasets")

    @property
    def actors(self) -> Actors:
        return _present(self._actors, "the actors")

    def context(self) -> StageContext:
        """Handles for a stage task, as the actors are now."""
        return StageContext(
            config=self.config,
            run_name=self.name,
            store=self.store,
            export_dir=str(self.export_dir),
            trainer=self.actors.trainer,
            engines=self.actors.engines,
        )

    # steps

    @property
    def done_step(self) -> int:
        """The last step that is finished with all its stages."""
        return self.lines[-1].step if self.lines else self.base_step

    @property
    def base_step(self) -> int:
        """The step this run started from: 0, or that of the checkpoint it was started from."""
        return self.base.step if self.base is not None else 0

    @property
    def total_steps(self) -> int:
        """The last step of the run. Dynamic sampling, which takes more prompts for a step, brings it nearer."""
        return self.loader.total_steps(self.config.trainer.epochs, self.config.trainer.max_training_steps)

    @property
    def planned_steps(self) -> int:
        """The last step as it was expected when the run began: what learning-rate schedules go by, on every start."""
        return self._planned_steps

    def lineage(self, version: int) -> str:
        """What made the weights of a version: a chain of digests from the start model over every batch since.

        Two runs whose lineages agree hold the same weights, up to the number of ranks.
        """
        if version == self.base_step:
            return str(self.document["start_lineage"])
        record = self.store.read_stage("update", version)
        if record is None:
            raise ConfigurationError(f"run {self.name}: no update is recorded for step {version}")
        return str(record.summary["lineage"])

    def inputs(self, stage: str, step: int, version: int, *parents: str) -> str:
        """The digest of a stage's inputs."""
        return digest_of(
            {
                "stage": stage,
                "step": step,
                "config": self.document["config_digest"],
                "lineage": self.lineage(version),
                "parents": list(parents),
            }
        )

    def plan(self, step: int, draw: int = 0) -> StageRecord:
        """The prompts of one of the step's draws, committed before anything is generated from them."""
        data = prompts_to_bytes(self.loader.batch(step + draw))
        summary = {"prompts": len(self.loader.indices(step + draw))}
        return self._commit_prompts(draw_name("plan", draw), step, data, summary)

    def consume(self, step: int, draws: int) -> None:
        """Let the data stand, after `step`, behind all of its draws."""
        self.loader.seek(replace(self.loader.position(step - 1 + draws), step=step))

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, in which a step begins."""
        return self.loader.position(step - 1).epoch + 1

    def algorithm_state(self, step: int) -> dict[str, float]:
        """What the algorithm carries from step to step (the adaptive KL coefficient), as it is after `step`."""
        if step == self.base_step:
            return dict(read_manifest(self.base).algorithm_state) if self.base is not None else {}
        record = self.store.read_stage("score", step)
        return dict(record.summary.get("algorithm_state", {})) if record is not None else {}

    def validation(self, step: int) -> StageRecord:
        """The validation prompts, committed under the step they are used in."""
        prompts = _present(self.datasets.validation, "the validation data").prompts
        return self._commit_prompts("validation", step, prompts_to_bytes(prompts), {"prompts": len(prompts)})

    def _commit_prompts(self, stage: str, step: int, data: bytes, summary: Mapping[str, Any]) -> StageRecord:
        digest = digest_of({"stage": stage, "step": step, "prompts": sha256_of_bytes(data)})
        found = self.store.find_stage(stage, step, digest)
        return found or self.store.write_stage(stage, step, digest, files={PROMPTS: data}, summary=summary, seconds=0.0)

    def close_step(self, step: int, epoch: int, records: Mapping[str, StageRecord], sync_seconds: float) -> MetricsLine:
        """Commit the step as a whole: from here on a restart begins after it."""
        metrics: dict[str, float] = {}
        for stage, record in records.items():
            metrics |= record.summary.get("metrics", {})
            metrics[f"timing/{stage}"] = record.seconds
        if step > 0:
            metrics["timing/sync"] = sync_seconds
        metrics["timing/step"] = sum(value for name, value in metrics.items() if name.startswith("timing/"))
        parents = [record.digest for record in records.values()]
        self.store.write_stage(
            "step",
            step,
            digest_of({"step": step, "parents": parents}),
            files={},
            summary={
                "epoch": epoch,
                "metrics": metrics,
                "position": self.loader.state_dict(step) if self._loader is not None else None,
            },
            seconds=metrics["timing/step"],
        )
        line = MetricsLine(step=step, epoch=epoch, metrics=metrics)
        self.lines.append(line)
        return line

    def keep_score(self, step: int, identity: str, evaluation: StageRecord) -> None:
        """Keep an evaluation beside the checkpoint of its step, if there is one."""
        for found in self.checkpoints():
            if found.step == step and found is not self.base:
                score = CheckpointScore(
                    run=self.name,
                    step=step,
                    content_digest=read_manifest(found).content_digest,
                    identity=identity,
                    metrics=evaluation.summary["metrics"],
                    code_version=code_version(),
                    created_at=evaluation.created_at,
                    evaluated_by=self.lease.info.get("flow_run_id", ""),
                )
                record_score(self.store.uri, score)

    def mark(self, *, finished: bool) -> None:
        """Say in the store how far the run is, for those who look after it: nightly runs, clean-up, listings."""
        before = read_state(self.store)
        state = RunState(
            finished=finished,
            starts=before.starts + (0 if finished else 1),
            total_steps=self.total_steps if self._loader is not None else before.total_steps,
            flow_run_id=self.lease.info.get("flow_run_id", ""),
        )
        self.store.write_json(STATE_DOCUMENT, asdict(state))

    def checkpoints(self) -> list[CheckpointRef]:
        """Complete checkpoints of this run that belong to its present history, by ascending step.

        The one the run was started from counts as the oldest.
        """
        own = [
            found
            for found in list_checkpoints(self.store.uri)
            if self.store.read_stage("update", found.step) is not None
        ]
        return ([self.base] if self.base is not None else []) + own


@contextmanager
def open_run(config: SkyRLConfig, *, flow_run_id: str = "") -> Iterator[Run]:
    """Become the writer of the configured run name and read what is done; nothing of an earlier run is touched before
    it is known to be the same run.

    Raises:
        RunBusyError: a living process writes this run.
        ConfigurationError: the name holds a run of another configuration, or `resume_mode` contradicts what is there.
    """
    name = config.trainer.run_name or fresh_name()
    root = f"{config.trainer.ckpt_path.rstrip('/')}/{name}"
    with ExitStack() as stack:
        lease = stack.enter_context(Lease.acquire(root, {"flow_run_id": flow_run_id}))
        store = RunStore.open(root, fence=lease.token)
        fresh = store.read_json(RUN_DOCUMENT) is None
        document, base = _identify(config, name, store)
        clean_leftovers(root, fence=lease.token)
        run = Run(
            config=config,
            name=name,
            store=store,
            lease=lease,
            document=document,
            base=base,
            fresh=fresh,
            export_dir=Path(config.trainer.export_path).expanduser() / name,
        )
        run.lines = [_line(record) for record in store.records("step")]
        yield run


def fresh_name() -> str:
    """A run name nobody has used: the time and three random bytes."""
    return f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{token_hex(3)}"


def _line(record: StageRecord) -> MetricsLine:
    return MetricsLine(step=record.step, epoch=record.summary["epoch"], metrics=record.summary["metrics"])


def _identify(config: SkyRLConfig, name: str, store: RunStore) -> tuple[dict[str, Any], CheckpointRef | None]:
    """The run's document, written anew for a fresh run, checked against the configuration otherwise."""
    document = store.read_json(RUN_DOCUMENT)
    digest = config_digest(config)
    if document is not None and document["config_digest"] != digest:
        raise ConfigurationError(_other_configuration(config, name, store))
    own_files = file_digests(config.own_code().values())
    if document is not None:
        _check_own_files(document.get("own_files", {}), own_files, name)
    base = starting_point(
        store.uri,
        mode=config.trainer.resume_mode,
        path=config.trainer.resume_path,
        name=name,
        started=document is not None,
        started_from=document["start_checkpoint"] if document is not None else None,
    )
    if document is None:
        start: dict[str, Any] = {"config": digest, "model": config.trainer.policy.model.path}
        if base is not None:
            start["checkpoint"] = read_manifest(base).content_digest
        document = {
            "run_name": name,
            "config_digest": digest,
            "start_lineage": digest_of(start),
            "start_checkpoint": base.uri if base is not None else None,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "code_version": code_version(),
            "own_files": own_files,
            "key": token_hex(8),
        }
        store.write_text(CONFIG_DOCUMENT, dump_yaml(config))
        store.write_json(RUN_DOCUMENT, document)
    return document, base


def _check_own_files(before: Mapping[str, str], now: Mapping[str, str], name: str) -> None:
    """What a run computes depends on the user's files as on its configuration."""
    changed = [path for path, digest in before.items() if now.get(path, digest) != digest]
    if changed:
        raise ConfigurationError(
            f"run {name!r} was made with another {', '.join(changed)}: restore the file to continue the run, or choose "
            "another trainer.run_name. Nothing was changed."
        )


def _other_configuration(config: SkyRLConfig, name: str, store: RunStore) -> str:
    text = store.read_text(CONFIG_DOCUMENT)
    changes = diff_configs(config_from_yaml(text), config) if text is not None else []
    listed = "".join(f"\n  {path}: was {old!r}, now {new!r}" for path, old, new in changes)
    return (
        f"run {name!r} at {store.uri} was made with another configuration:{listed or ' see its config.yaml'}\n"
        "Restore these values to continue it, or choose another trainer.run_name. Nothing was changed."
    )


def _present(value: _T | None, what: str) -> _T:
    if value is None:
        raise RuntimeError(f"{what} of the run are not set up yet")
    return value
