"""Weights & Biases: one run per training run, continued under the same id after a restart."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_core.errors import ConfigurationError
from skyrl_core.tracking.failure_text import headline, traceback_text
from skyrl_core.tracking.wandb_files import last_recorded_step

STEP_METRIC = "trainer/global_step"

_NO_LOGIN = (
    "trainer.logger=wandb, but nobody is logged in to wandb on this machine: run `wandb login`, or set WANDB_API_KEY, "
    "or set WANDB_MODE=offline to keep the run on disk, or choose trainer.logger=tensorboard or console"
)


def wandb_run_id(run_name: str, run_key: str) -> str:
    """The run's id: the same for the same name and key, safe in URLs, at most 64 characters.

    `run_key` tells a run from an earlier one of the same name whose folder was deleted.
    """
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", run_name).strip("-")[:48] or "run"
    digest = hashlib.sha256(f"{run_name}\0{run_key}".encode()).hexdigest()
    return f"{slug}-{digest[:12]}"


def check_wandb() -> None:
    """Raise ConfigurationError when wandb would have to ask for a login. No network is used."""
    import wandb

    try:
        settings = wandb.setup().settings
        offline = settings.mode in ("offline", "dryrun", "disabled")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ConfigurationError(_NO_LOGIN)
    except wandb.errors.Error as error:
        raise ConfigurationError(f"trainer.logger=wandb: {error}") from error


class WandbBackend:
    """A wandb run in `{run_dir}/wandb`, every chart over `trainer/global_step`.

    wandb works behind the caller's back, and a kill loses what it had not uploaded or flushed. So what survived
    decides where logging continues: online the server's last step, offline the files on disk.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        project: str,
        run_name: str,
        run_key: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        run_dir: Path,
    ) -> None:
        import wandb

        check_wandb()
        run_id = wandb_run_id(run_name, run_key)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                name=run_name,
                resume="allow",
                tags=list(tags) or None,
                config=dict(config),
                dir=str(run_dir),
                # wandb would record the terminal's output, every redraw of the live view included.
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigurationError(
                f"trainer.logger=wandb: the run could not be started: {error}. "
                "WANDB_MODE=offline keeps it on disk; trainer.logger=tensorboard does without wandb"
            ) from error
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC)
        local = self._run.offline or self._run.disabled
        self.place: str | None = str(run_dir / "wandb") if local else self._run.url
        self._held = last_recorded_step(run_dir, run_id) if local else self._run.step - 1

    @property
    def logged_through(self) -> int:
        return self._held

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._run.log({**values, STEP_METRIC: step}, step=step, commit=True)
        self._held = step

    def log_exception(self, error: BaseException, where: str) -> None:
        # In the summary, not the history: a history row would take the step that a resumed run needs.
        self._run.summary.update(
            {
                "exception/where": where,
                "exception/error": headline(error),
                "exception/traceback": traceback_text(error),
            }
        )

    def finish(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
