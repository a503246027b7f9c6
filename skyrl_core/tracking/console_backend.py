"""Prints every metric of a step on one line of standard output, failures on standard error."""

import sys
from collections.abc import Mapping
from pathlib import Path

from skyrl_core.tracking.failure_text import traceback_text
from skyrl_core.tracking.high_water import HighWaterMark


class ConsoleBackend:
    """The `console` logger: for logs of machines without a terminal, where no live view runs."""

    name = "console"
    place: str | None = None

    def __init__(self, state_dir: Path) -> None:
        self._mark = HighWaterMark(state_dir / "console.json", "console")

    @property
    def logged_through(self) -> int:
        return self._mark.step

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = "  ".join(f"{name}={float(metrics[name]):.6g}" for name in sorted(metrics))
        print(f"step {step}  {values}", flush=True)
        self._mark.advance(step)

    def log_exception(self, error: BaseException, where: str) -> None:
        print(f"{where} failed\n{traceback_text(error)}", file=sys.stderr, flush=True)

    def finish(self, ok: bool) -> None:
        print("run finished" if ok else "run failed", flush=True)
