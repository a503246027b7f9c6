"""What a finished run leaves behind: summary.json, and the same as a table for the terminal."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from skyrl_core.data.storage import atomic_write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in numbers and paths; None where something was not measured or made.

    Accuracies are mean held-out scores: sampled at the evaluation's temperature, and greedy. `before` is before the
    run's first update also when the run was continued. Seconds are wall-clock time; `steps` counts finished training
    steps.
    """

    run_name: str
    steps: int
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    seconds_total: float
    seconds_by_stage: Mapping[str, float] = field(default_factory=dict)
    checkpoints: str | None = None
    metrics: str | None = None
    plots: str | None = None
    ui_url: str | None = None

    def write(self, path: Path) -> None:
        """Write summary.json at once: keys sorted, numbers in full, null for a number that is NaN or infinite."""
        content = json.dumps(_finite(asdict(self)), sort_keys=True, indent=2, allow_nan=False)
        atomic_write_bytes(path, content.encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote. Keys of a later version are left out."""
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in known})


def summary_table(summary: RunSummary) -> Table:
    """The summary for the terminal: accuracy before and after, time by stage, where things are."""
    table = Table(title=f"Run {summary.run_name}", show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("training steps", str(summary.steps))
    table.add_row("accuracy, sampled", _change(summary.accuracy_before, summary.accuracy_after))
    table.add_row("accuracy, greedy", _change(summary.greedy_before, summary.greedy_after))
    table.add_row("time in all", duration(summary.seconds_total))
    for stage, seconds in summary.seconds_by_stage.items():
        share = f"  {seconds / summary.seconds_total:.0%}" if summary.seconds_total > 0 else ""
        table.add_row(f"  {stage}", f"{duration(seconds)}{share}")
    for label, place in (
        ("checkpoints", summary.checkpoints),
        ("metrics", summary.metrics),
        ("plots", summary.plots),
        ("page in the UI", summary.ui_url),
    ):
        table.add_row(label, place or "none")
    return table


def duration(seconds: float) -> str:
    """Seconds as people read them: `4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _change(before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return "not measured"
    if before is None or after is None:
        return f"{_score(before)} → {_score(after)}"
    return f"{_score(before)} → {_score(after)}  ({after - before:+.3f})"


def _score(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
