"""Draws a run's reward and accuracy curves and its time by stage as a PNG."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from skyrl_core.data.storage import atomic_write_bytes
from skyrl_core.tracking.metrics_file import MetricsLine
from skyrl_core.tracking.names import ACCURACY, GREEDY, REWARD, STAGES

_BLUE, _ORANGE, _GREEN = "#2563eb", "#d97706", "#059669"


def series(lines: Sequence[MetricsLine], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the metric where it was measured and is finite."""
    points = [(line.step, line.metrics[name]) for line in lines if math.isfinite(line.metrics.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def seconds_by_stage(lines: Sequence[MetricsLine]) -> dict[str, float]:
    """Total seconds of every stage that ran, in the order of a step."""
    totals = {stage: math.fsum(series(lines, f"timing/{stage}")[1]) for stage in STAGES}
    return {stage: seconds for stage, seconds in totals.items() if seconds > 0}


def draw(lines: Sequence[MetricsLine], title: str = "") -> Figure:
    """Three panels: mean reward of the training samples, held-out accuracy, seconds by stage."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, accuracy, stages = figure.subplots(1, 3)
    _draw(reward, lines, {"training samples": (REWARD, _BLUE)}, "mean reward", legend=False)
    _draw(accuracy, lines, {"sampled": (ACCURACY, _ORANGE), "greedy": (GREEDY, _GREEN)}, "held-out score", legend=True)
    _draw_stages(stages, seconds_by_stage(lines))
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def render_png(lines: Sequence[MetricsLine], *, title: str = "", dpi: int = 90) -> bytes:
    """The picture of `draw` as a PNG of 10 by 3.4 inches at `dpi` dots an inch."""
    buffer = io.BytesIO()
    draw(lines, title).savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def render_curves(lines: Sequence[MetricsLine], path: Path, *, title: str = "") -> Path:
    """Write the picture to `path` and return it."""
    atomic_write_bytes(path, render_png(lines, title=title, dpi=110))
    return path


def _draw(
    axes: Axes, lines: Sequence[MetricsLine], curves: Mapping[str, tuple[str, str]], label: str, *, legend: bool
) -> None:
    drawn = 0
    for caption, (metric, colour) in curves.items():
        steps, values = series(lines, metric)
        if steps:
            axes.plot(
                steps, values, color=colour, label=caption, marker="o" if len(steps) <= 40 else None, markersize=3
            )
            drawn += 1
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not drawn:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", va="center", color="gray")
    elif legend:
        axes.legend(loc="lower right", fontsize=8)


def _draw_stages(axes: Axes, totals: Mapping[str, float]) -> None:
    names = list(totals)
    bars = axes.barh(names, [totals[name] for name in names], color=_BLUE)
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("seconds, all steps")
    if not names:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", va="center", color="gray")
