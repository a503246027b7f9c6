"""What a run reports its metrics to: the tracker that callers see, and the backends behind it."""

from collections.abc import Mapping
from typing import Protocol

NOTHING_LOGGED = -1
"""`logged_through` of a backend that holds no step yet (evaluation before training is step 0)."""


class Tracker(Protocol):
    """Receives a run's metrics, one call a step.

    After a restart the caller offers every recorded step again, oldest first; steps that a backend already holds are
    left alone, so that no point is lost and none is doubled.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report the metrics of `step`. Never raises: a backend that fails costs a warning, not the run."""
        ...

    def log_exception(self, error: BaseException, where: str) -> None:
        """Report type, message and traceback of a failure in `where` ("set-up", "generate step 12").

        Never raises; the caller raises `error` again.
        """
        ...

    def links(self) -> Mapping[str, str]:
        """Where each backend shows the run: its name, and an address or a folder."""
        ...

    def finish(self, ok: bool) -> None:
        """Flush and close; `ok` is False when the run failed. Calling it again does nothing."""
        ...


class Backend(Protocol):
    """One place that metrics go to. Its methods may raise; the tracker in front of it turns that into warnings."""

    name: str
    place: str | None
    """Where people look at the run: an address or a folder; None for a backend without one."""

    @property
    def logged_through(self) -> int:
        """The newest step that is durable in this backend, NOTHING_LOGGED when none is."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step above `logged_through`."""
        ...

    def log_exception(self, error: BaseException, where: str) -> None:
        """Write a failure where this backend's users look for it."""
        ...

    def finish(self, ok: bool) -> None:
        """Flush and close."""
        ...
