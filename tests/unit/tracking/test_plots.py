"""The run's picture: what the curves hold, and that it can be drawn from any metrics."""

import io
import math
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from skyrl_core.tracking.metrics_file import MetricsLine
from skyrl_core.tracking.plots import draw, render_curves, render_png, seconds_by_stage, series


def line(step: int, metrics: dict[str, float]) -> MetricsLine:
    return MetricsLine(step=step, epoch=1, metrics=metrics)


LINES = [
    line(0, {"eval/all/avg_score": 0.25, "eval/all/greedy_score": 0.5, "timing/evaluate": 1.5}),
    line(1, {"reward/avg_raw_reward": 0.3, "timing/generate": 2.0, "timing/update": 1.0, "timing/step": 3.0}),
    line(2, {"reward/avg_raw_reward": math.nan, "timing/generate": 2.5, "timing/update": 1.0}),
    line(3, {"reward/avg_raw_reward": 0.5, "eval/all/avg_score": 0.75, "timing/evaluate": 0.5}),
]


def test_a_series_leaves_out_what_was_not_measured_or_is_no_number() -> None:
    assert series(LINES, "reward/avg_raw_reward") == ([1, 3], [0.3, 0.5])
    assert series(LINES, "no/such") == ([], [])


def test_seconds_are_summed_by_stage_in_the_order_of_a_step() -> None:
    assert list(seconds_by_stage(LINES).items()) == [("generate", 4.5), ("update", 2.0), ("evaluate", 2.0)]


def test_panels_show_reward_accuracy_and_time_with_units() -> None:
    reward, accuracy, stages = draw(LINES, "night 1").axes
    assert [list(curve.get_xdata()) for curve in reward.lines] == [[1, 3]]
    assert [list(curve.get_ydata()) for curve in accuracy.lines] == [[0.25, 0.75], [0.5]]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["sampled", "greedy"]
    assert [bar.get_width() for bar in stages.patches] == [4.5, 2.0, 2.0]
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in (reward, accuracy, stages)]
    assert labels == [("training step", "mean reward"), ("training step", "held-out score"), ("seconds, all steps", "")]


@pytest.mark.parametrize("lines", [[], [line(1, {"reward/avg_raw_reward": math.nan})], LINES[:1]])
def test_little_or_nothing_measured_still_makes_a_picture(lines: list[MetricsLine]) -> None:
    pixels = matplotlib.image.imread(io.BytesIO(render_png(lines, dpi=50)), format="png")
    assert pixels.shape[:2] == (170, 500)


def test_the_picture_is_small_however_long_the_run(tmp_path: Path) -> None:
    lines = [line(step, {"reward/avg_raw_reward": math.sin(step)}) for step in range(1, 5001)]
    path = render_curves(lines, tmp_path / "plots" / "curves.png", title="long")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) < 150_000


def test_drawing_leaves_pyplots_global_state_alone() -> None:
    code = (
        "import sys; from skyrl_core.tracking.plots import render_png; render_png([]); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
