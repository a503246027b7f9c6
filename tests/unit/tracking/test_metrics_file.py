"""metrics.jsonl: whole lines only, each step once, every float as it was."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.tracking.metrics_file import MetricsFile, MetricsLine, read_metrics


def line(step: int, epoch: int = 1, **metrics: float) -> MetricsLine:
    return MetricsLine(step=step, epoch=epoch, metrics=metrics)


def test_a_line_is_flat_json_with_sorted_keys(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    MetricsFile(path).append(MetricsLine(step=3, epoch=2, metrics={"reward/avg_raw_reward": 0.25, "a": 1}))
    assert path.read_text() == '{"a": 1.0, "epoch": 2, "reward/avg_raw_reward": 0.25, "step": 3}\n'


def test_numbers_that_json_lacks_are_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(line(1, loss=math.nan, high=math.inf, low=-math.inf, fine=2.0))
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["loss"] is content["high"] is content["low"] is None
    assert content["non_finite"] == {"loss": "nan", "high": "inf", "low": "-inf"}
    metrics = read_metrics(path)[0].metrics
    assert math.isnan(metrics["loss"])
    assert (metrics["high"], metrics["low"], metrics["fine"]) == (math.inf, -math.inf, 2.0)


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False), max_size=5))
def test_every_float_comes_back_bit_for_bit(metrics: dict[str, float]) -> None:
    metrics = {name: value for name, value in metrics.items() if name not in ("step", "epoch", "non_finite")}
    original = MetricsLine(step=1, epoch=1, metrics=metrics)
    text = original.to_json()
    assert "\n" not in text
    assert MetricsLine.from_json(text) == original


def test_numpy_scalars_are_written_as_numbers() -> None:
    assert json.loads(line(1, loss=np.float32(0.5)).to_json())["loss"] == 0.5


def test_a_metric_may_not_take_the_name_of_a_column() -> None:
    with pytest.raises(ValueError, match="epoch, step"):
        MetricsLine(step=1, epoch=1, metrics={"step": 1.0, "epoch": 2.0})


def test_a_step_that_does_not_rise_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(line(0))
    file.append(line(1))
    for step in (1, 0):
        with pytest.raises(ValueError, match=f"already holds step 1: step {step}"):
            file.append(line(step))
    reopened = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="already holds step 1"):
        reopened.append(line(1))
    assert [item.step for item in read_metrics(file.path)] == [0, 1]


@pytest.mark.parametrize("kept", range(1, len(line(2, a=0.5).to_json()) + 1))
def test_a_line_torn_at_any_byte_is_ignored_and_replaced_by_the_next_append(
    tmp_path: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(line(1, a=0.25))
    with path.open("a") as file:
        file.write(line(2, a=0.5).to_json()[:kept])
    assert [item.step for item in read_metrics(path)] == [1]
    MetricsFile(path).append(line(2, a=0.75))
    assert [dict(item.metrics) for item in read_metrics(path)] == [{"a": 0.25}, {"a": 0.75}]
    assert "torn part is removed" in caplog.text


def test_rewriting_after_a_kill_leaves_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line(1, a=1.0).to_json()}\n{line(1, a=1.0).to_json()}\n" + '{"step": 2, "ep')
    file = MetricsFile(path)
    file.rewrite([line(1, a=1.0), line(2, a=2.0)])
    file.append(line(3, a=3.0))
    assert [(item.step, item.metrics["a"]) for item in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewriting_to_nothing_lets_the_run_begin_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(line(5))
    file.rewrite([])
    file.append(line(0))
    assert [item.step for item in read_metrics(file.path)] == [0]


def test_rewriting_refuses_doubled_steps_and_keeps_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(line(1))
    before = file.path.read_bytes()
    with pytest.raises(ValueError, match="steps must rise: 2 after 2"):
        file.rewrite([line(1), line(2), line(2)])
    assert file.path.read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line(1).to_json()}\nnot json\n{line(2).to_json()}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
