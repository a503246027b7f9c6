"""One tracker in front of several backends: each is fed what it lacks, and none can stop the run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from skyrl_core.tracking.protocol import Backend

logger = logging.getLogger(__name__)


class MultiTracker:
    """Feeds every backend the steps it does not hold yet (see `Tracker` for the contract)."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)
        self._last_step: int | None = None
        self._last_keys: frozenset[str] = frozenset()
        self._finished = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._warn_about_lost_metrics(metrics, step)
        for backend in self._backends:
            if step > backend.logged_through:
                _guarded(backend, f"metrics of step {step}", partial(backend.log, metrics, step))

    def log_exception(self, error: BaseException, where: str) -> None:
        for backend in self._backends:
            _guarded(backend, f"the failure in {where}", partial(backend.log_exception, error, where))

    def links(self) -> Mapping[str, str]:
        return {backend.name: backend.place for backend in self._backends if backend.place is not None}

    def finish(self, ok: bool) -> None:
        if self._finished:
            return
        self._finished = True
        for backend in self._backends:
            _guarded(backend, "the end of the run", partial(backend.finish, ok))

    def _warn_about_lost_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """A second call for a step is a repetition; new names in it would vanish, so say so."""
        keys = frozenset(metrics)
        if step == self._last_step and not keys <= self._last_keys:
            names = ", ".join(sorted(keys - self._last_keys))
            logger.warning("step %d was reported already: %s not tracked (report each step once)", step, names)
        self._last_step, self._last_keys = step, keys


def _guarded(backend: Backend, what: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # a tracker's fault must never cost the training run
        logger.warning("tracker %s did not take %s: %s: %s", backend.name, what, type(error).__name__, error)
