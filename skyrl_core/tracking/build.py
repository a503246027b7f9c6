"""Builds the tracker that `trainer.logger` asks for, and checks it before anything expensive starts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_core.errors import ConfigurationError
from skyrl_core.tracking.console_backend import ConsoleBackend
from skyrl_core.tracking.multi import MultiTracker
from skyrl_core.tracking.protocol import Backend, Tracker
from skyrl_core.tracking.redact import redacted
from skyrl_core.tracking.tensorboard_backend import TensorBoardBackend
from skyrl_core.tracking.wandb_backend import WandbBackend, check_wandb

if TYPE_CHECKING:
    from skyrl_core.config import SkyRLConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a backend may need to know of the run."""

    config: "SkyRLConfig"
    run_name: str
    run_dir: Path
    run_key: str

    @property
    def state_dir(self) -> Path:
        return self.run_dir / "trackers"


def _wandb(run: TrackedRun) -> Backend:
    return WandbBackend(
        project=run.config.trainer.project_name,
        run_name=run.run_name,
        run_key=run.run_key,
        tags=run.config.trainer.tags or (),
        config=redacted(run.config.model_dump(mode="json")),
        run_dir=run.run_dir,
    )


def _tensorboard(run: TrackedRun) -> Backend:
    return TensorBoardBackend(run.run_dir, run.state_dir)


def _console(run: TrackedRun) -> Backend:
    return ConsoleBackend(run.state_dir)


_BUILDERS: dict[str, Callable[[TrackedRun], Backend]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "console": _console,
}


def tracker_names(config: "SkyRLConfig") -> tuple[str, ...]:
    """The backends of `trainer.logger`, a name or a list of names. ConfigurationError for an unknown or doubled one."""
    names = config.trainer.loggers
    for name in names:
        if name not in _BUILDERS:
            raise ConfigurationError(f"trainer.logger: {name!r} is no tracker; there are {', '.join(_BUILDERS)}")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"trainer.logger: a tracker is named twice in {', '.join(names)}")
    return names


def check_trackers(config: "SkyRLConfig") -> None:
    """Raise ConfigurationError when a tracker could not start. Cheap, no network: call it before loading models."""
    if "wandb" in tracker_names(config):
        check_wandb()


def build_tracker(config: "SkyRLConfig", *, run_name: str, run_dir: Path, run_key: str = "") -> Tracker:
    """Start every backend of `trainer.logger` under `run_dir`.

    `run_key` is any string that stays with this run for good and differs from that of an earlier, deleted run of the
    same name (the run store's creation stamp): with it, a re-used name does not continue the old run at the tracker.
    ConfigurationError when a backend cannot start; those started before it are closed again.
    """
    run = TrackedRun(config=config, run_name=run_name, run_dir=run_dir, run_key=run_key)
    backends: list[Backend] = []
    for name in tracker_names(config):
        try:
            backends.append(_BUILDERS[name](run))
        except (ConfigurationError, OSError) as error:
            MultiTracker(backends).finish(ok=False)
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"trainer.logger={name} cannot write to {run_dir}: {error}") from error
    return MultiTracker(backends)
