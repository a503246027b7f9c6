"""Make true what a stage needs: living actors, the trainer at a version, the engines at a version. Idempotent.

Runs in the flow process, which owns the actors. Nothing here generates or samples: a lost trainer comes back from the
newest complete checkpoint and the batches recorded since.
"""

import asyncio
import logging
from dataclasses import dataclass

import ray

from flows.run import Run
from flows.view import RunView
from skyrl_core.config import SkyRLConfig
from skyrl_core.data.serialization import training_batch_from_bytes
from skyrl_core.errors import CheckpointError, SkyRLError, StateMismatchError
from skyrl_core.runtime.engines import EngineGroup, launch_engine, wait_started
from skyrl_core.runtime.placement import Placement
from skyrl_core.runtime.trainer import TrainerStatus, start_policy, start_reference
from skyrl_core.runtime.worker_group import WorkerGroup
from skyrl_core.weight_sync.sync import sync_weights
from tasks.stages import BATCH

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a stage needs. None: it does not care.

    An update needs the version before it, or that the trainer has done this very update already (`done_lineage`), when
    only its record was lost.
    """

    trainer_version: int | None = None
    done_lineage: str | None = None
    engine_version: int | None = None


class Reconciler:
    """Brings a run's actors to what a stage needs."""

    def __init__(self, run: Run, view: RunView) -> None:
        self._run = run
        self._view = view

    def ensure(self, need: Need) -> None:
        """Return when `need` holds.

        Raises:
            SkyRLError: it cannot be made true; transient when trying again may help.
        """
        self._run.lease.check()
        if need.engine_version is not None:
            self._ensure_engines(need.engine_version)
        if need.trainer_version is not None:
            self._ensure_trainer(need.trainer_version, need.done_lineage)

    def actors_failed(self) -> bool:
        """True when an actor is dead, or did not answer in time: a failure without a cause of its own may be theirs."""
        trainer = self._run.actors.trainer
        groups = [] if trainer is None else [trainer.policy, *([trainer.ref] if trainer.ref is not None else [])]
        return any(not _alive(group) for group in groups) or bool(sick_engines(self._run.actors.engines))

    def abandon(self, need: Need) -> None:
        """End the actors that a stage which ran out of time may still hold; `ensure` rebuilds them."""
        if need.trainer_version is not None and self._run.actors.trainer is not None:
            self._run.actors.trainer.kill()
        if need.engine_version is not None:
            self._run.actors.engines.kill()

    # engines

    def _ensure_engines(self, version: int) -> None:
        actors = self._run.actors
        heal_engines(self._run.config, actors.placement, actors.engines, self._view)
        client = actors.engines.client()
        if any(held != version for held in asyncio.run(client.versions())):
            if actors.trainer is None:
                raise StateMismatchError(f"engines must hold version {version} and there is no trainer to send it")
            self._ensure_trainer(version)
            asyncio.run(sync_weights(actors.trainer.export_weights, client, version))

    # trainer

    def _ensure_trainer(self, version: int, done_lineage: str | None = None) -> None:
        actors, config = self._run.actors, self._run.config
        trainer = actors.trainer
        if trainer is None:
            raise StateMismatchError(f"policy version {version} is needed and this run has no trainer")
        if trainer.ref is not None and not _alive(trainer.ref):
            self._view.note("a reference rank died: building the reference group anew")
            trainer.ref.kill()
            trainer.ref = start_reference(config, actors.placement)
        status = self._trainer_status()
        done = status is not None and done_lineage is not None and status.lineage == done_lineage
        if not done and not self._holds(status, version):
            self._restore(version)

    def _trainer_status(self) -> TrainerStatus | None:
        """What the policy group holds; None when it is dead or stuck."""
        trainer = self._run.actors.trainer
        if trainer is None or not _alive(trainer.policy):
            return None
        try:
            return trainer.status(timeout=_PROBE_SECONDS)
        except SkyRLError as error:
            logger.warning("the policy group does not answer: %s", error)
            return None

    def _holds(self, status: TrainerStatus | None, version: int) -> bool:
        """True when the trainer is at this version of this run's history."""
        if status is None or status.version != version:
            return False
        return version == self._run.base_step or status.lineage == self._run.lineage(version)

    def _restore(self, version: int) -> None:
        """Bring the policy to `version`: newest checkpoint at or before it, then the recorded batches after that."""
        run = self._run
        trainer = run.actors.trainer
        if trainer is None:
            raise StateMismatchError("this run has no trainer")
        status = self._trainer_status()
        if status is None:
            self._view.note("a policy rank died: building the policy group anew")
            self._rebuild_policy()
            status = trainer.status()
        at = self._nearest(status, version)
        for step in range(at + 1, version + 1):
            record = run.store.read_stage("score", step)
            if record is None:
                raise CheckpointError(
                    f"run {run.name}: step {step} has to be replayed and its batch is not in the run store; "
                    f"restart from an earlier checkpoint with trainer.resume_mode=from_path"
                )
            self._view.note(f"replaying the recorded batch of step {step}")
            batch = training_batch_from_bytes(run.store.read_file(record, BATCH))
            trainer.update(batch, step, run.lineage(step))

    def _nearest(self, status: TrainerStatus, version: int) -> int:
        """Load the best starting point for a replay up to `version`; returns the version it has."""
        run = self._run
        trainer = run.actors.trainer
        if trainer is None:
            raise StateMismatchError("this run has no trainer")
        held = status.version
        usable = held is not None and held <= version and self._holds(status, held)
        for found in reversed([found for found in run.checkpoints() if found.step <= version]):
            if usable and held is not None and held >= found.step:
                break
            self._view.note(f"restoring checkpoint global_step_{found.step}")
            trainer.load(found.uri, optimizer=found is not run.base or run.config.trainer.restore_optimizer)
            if self._holds(trainer.status(), found.step):
                return found.step
            usable = False
            self._view.note(f"global_step_{found.step} belongs to another history of this run: looking further back")
        if usable and held is not None:
            return held
        self._view.note("no checkpoint yet: starting again from the start model")
        self._rebuild_policy()
        return 0

    def _rebuild_policy(self) -> None:
        run = self._run
        trainer = run.actors.trainer
        if trainer is not None:
            trainer.policy.kill()
            trainer.policy = start_policy(run.config, run.actors.placement, run.planned_steps)


def sick_engines(engines: EngineGroup) -> dict[int, str]:
    """Engines that do not answer, by number, and why."""
    health = asyncio.run(engines.client().health())
    return {index: problem for index, problem in enumerate(health) if problem is not None}


def heal_engines(config: SkyRLConfig, placement: Placement, engines: EngineGroup, view: RunView) -> None:
    """Replace engines that do not answer by new ones with the start model, in the same slots."""
    starts = []
    for index, problem in sick_engines(engines).items():
        view.note(f"engine {index} does not answer ({problem[:120]}): building it anew")
        ray.kill(engines.actors[index])
        engines.actors[index], start = launch_engine(config, placement, index)
        starts.append(start)
    wait_started(starts, config.generator.inference_engine.timeout_seconds)


def _alive(group: WorkerGroup) -> bool:
    try:
        group.probe(_PROBE_SECONDS)
    except SkyRLError:
        return False
    return True
