"""Submits one stage to a Ray worker, watches it, and tries again after reconciling when its failure may pass."""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.states import Crashed
from prefect.tasks import Task
from prefect_ray.context import remote_options
from prefect_ray.task_runners import PrefectRayFuture

from flows.reconcile import Need
from flows.view import RunView
from skyrl_core.config import SkyRLConfig
from skyrl_core.data.references import StageRecord
from skyrl_core.errors import OrchestrationError, StateMismatchError, is_transient
from skyrl_core.tracking.protocol import Tracker
from tasks.artifacts import RunArtifacts
from tasks.context import StageContext

logger = logging.getLogger(__name__)

# A wait this short lets Ctrl-C through; Ray's own wait does not.
_POLL_SECONDS = 1.0


class StageTimeoutError(OrchestrationError):
    """A stage did not end within its time limit and was stopped."""

    transient = True


class StageCrashedError(OrchestrationError):
    """The Ray worker of a stage died."""

    transient = True


class Reconciler(Protocol):
    """Makes true what a stage needs; see flows.reconcile."""

    def ensure(self, need: Need) -> None: ...

    def actors_failed(self) -> bool: ...

    def abandon(self, need: Need) -> None: ...


class StageRunner:
    """Runs stages for one run; the only place where stages are retried.

    `context` gives the handles for a stage task as the actors are at that moment.
    """

    def __init__(
        self,
        config: SkyRLConfig,
        context: Callable[[], StageContext],
        reconciler: Reconciler,
        view: RunView,
        artifacts: RunArtifacts,
        tracker: Tracker,
    ) -> None:
        self._flow = config.flow
        self._context = context
        self._reconciler = reconciler
        self._view = view
        self._artifacts = artifacts
        self._tracker = tracker

    def __call__(
        self, stage: Task[..., Any], step: int, need: Need, *arguments: Any, found: StageRecord | None = None
    ) -> Any:
        """Run `stage` of `step` to its end and return its result.

        `found` is the committed record, where there is one: actors need not be ready then. Before every attempt the
        flow reconciles. Ray never retries on its own, so every attempt is a task run that users can see.

        Raises what the stage raised when that cannot pass, or when `flow.stage_attempts` are used up.
        """
        name = {"sync weights": "sync"}.get(stage.name, stage.name)
        for attempt in range(1, self._flow.stage_attempts + 1):
            self._view.stage(name, step, attempt)
            began = time.monotonic()
            try:
                if found is None:
                    self._reconciler.ensure(need)
                result = self._submit(stage, name, step, attempt, need, arguments)
            except Exception as error:
                if isinstance(error, SystemError) and isinstance(error.__cause__, TerminationSignal):
                    # A cancel that arrives while Ray's C code waits comes out wrapped.
                    raise error.__cause__ from None
                self._handle(error, name, step, attempt)
                if isinstance(error, StateMismatchError):
                    found = None
                continue
            recorded = isinstance(result, StageRecord) and result.recorded
            self._view.stage_done(name, time.monotonic() - began, recorded)
            return result
        raise AssertionError("the last attempt returns or raises")

    def _handle(self, error: Exception, name: str, step: int, attempt: int) -> None:
        """Return after a pause when another attempt is due; raise otherwise."""
        passing = is_transient(error) or self._reconciler.actors_failed()
        last = attempt == self._flow.stage_attempts
        if not passing or last:
            tries = f" after {attempt} attempts" if attempt > 1 else ""
            self._artifacts.publish_failure(
                name,
                step,
                error,
                f"The run stopped{tries}. Start it again under the same name to continue at this stage.",
            )
            if last and attempt > 1:
                error.add_note(f"{name} of step {step} failed {attempt} times (flow.stage_attempts)")
            self._tracker.log_exception(error, f"{name} step {step}")
            raise error
        pause = self._flow.stage_retry_seconds * 2 ** (attempt - 1)
        summary = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._view.note(f"{name} step {step} failed: {summary}; trying again in {pause:g} s")
        self._artifacts.publish_failure(name, step, error, f"Trying again in {pause:g} s (attempt {attempt + 1}).")
        time.sleep(pause)

    def _submit(
        self, stage: Task[..., Any], name: str, step: int, attempt: int, need: Need, arguments: tuple[Any, ...]
    ) -> Any:
        run_name = f"{name} step {step}" + (f" (attempt {attempt})" if attempt > 1 else "")
        limit = float(getattr(self._flow.stage_timeout_seconds, name))
        # Zero CPUs: the actors hold them. No retries by Ray: it would run a stage again without anybody seeing it.
        with remote_options(num_cpus=0, max_retries=0):
            submitted: Any = stage.with_options(task_run_name=run_name).submit(self._context(), *arguments)
        future: PrefectRayFuture[Any] = submitted
        if not self._wait(future, limit):
            ray.cancel(future.wrapped_future, force=True)
            self._reconciler.abandon(need)
            self._mark_crashed(future, f"stopped after {limit:g} s")
            raise StageTimeoutError(f"{name} of step {step} did not end within {limit:g} s and was stopped")
        future.wait()
        state = future.state
        if state.is_crashed():
            self._mark_crashed(future, str(state.message))
            raise StageCrashedError(
                f"the worker of {name} step {step} died: {' '.join(str(state.message).split())[:200]}"
            )
        return future.result()

    def _wait(self, future: PrefectRayFuture[Any], limit: float) -> bool:
        """True when the stage ended within `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            ended, _ = ray.wait([future.wrapped_future], timeout=_POLL_SECONDS)
            if ended:
                return True
        return False

    def _mark_crashed(self, future: PrefectRayFuture[Any], message: str) -> None:
        """A dead worker cannot report: its task run stays Running until somebody says otherwise."""
        try:
            with get_client(sync_client=True) as client:
                client.set_task_run_state(future.task_run_id, Crashed(message=message[:500]), force=True)
        except ObjectNotFound:  # it died before it had told anybody of the task run
            pass
        except Exception as error:  # bookkeeping must not hide the failure it is about
            logger.warning("task run %s could not be marked as crashed: %s", future.task_run_id, error)
