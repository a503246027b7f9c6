"""Writes scalars as TensorBoard event files into the run's folder."""

from collections.abc import Mapping
from pathlib import Path

from skyrl_core.tracking.failure_text import headline, traceback_text
from skyrl_core.tracking.high_water import HighWaterMark


class TensorBoardBackend:
    """Event files under `{run_dir}/tensorboard`.

    Reopening tells TensorBoard to purge what lies beyond the mark: a step of which a kill let only a part through is
    dropped and written again whole.
    """

    name = "tensorboard"

    def __init__(self, run_dir: Path, state_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only wanted when chosen

        folder = run_dir / "tensorboard"
        self.place: str | None = str(folder)
        self._mark = HighWaterMark(state_dir / "tensorboard.json", "tensorboard")
        reopened = any(folder.glob("events.out.tfevents.*"))
        if not reopened:
            self._mark.reset()
        self._writer = SummaryWriter(str(folder), purge_step=self._mark.step + 1 if reopened else None)

    @property
    def logged_through(self) -> int:
        return self._mark.step

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name in sorted(metrics):
            self._writer.add_scalar(name, float(metrics[name]), step)
        self._writer.flush()
        self._mark.advance(step)

    def log_exception(self, error: BaseException, where: str) -> None:
        # Indented text is a code block in TensorBoard's markdown, whatever back-ticks the traceback holds.
        code = "\n".join(f"    {line}" for line in traceback_text(error).splitlines())
        step = max(self._mark.step, 0)
        self._writer.add_text("exception", f"**{where}** failed: {headline(error)}\n\n{code}", step)
        self._writer.flush()

    def finish(self, ok: bool) -> None:
        self._writer.close()
