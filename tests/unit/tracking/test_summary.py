"""summary.json and the closing table."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from skyrl_core.tracking.summary import RunSummary, duration, summary_table

SUMMARY = RunSummary(
    run_name="night-1",
    steps=40,
    accuracy_before=0.281,
    accuracy_after=0.6625,
    greedy_after=0.9,
    seconds_total=200.0,
    seconds_by_stage={"generate": 90.0, "update": 50.0},
    checkpoints="/data/ckpts/night-1",
    ui_url="http://127.0.0.1:4200/runs/flow-run/1",
)


def test_a_summary_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "summary.json"
    SUMMARY.write(path)
    assert RunSummary.read(path) == SUMMARY


def test_the_file_holds_null_for_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    RunSummary(run_name="r", steps=0, accuracy_after=math.nan, seconds_total=1.5).write(path)
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content == {
        "run_name": "r",
        "steps": 0,
        "accuracy_before": None,
        "accuracy_after": None,
        "greedy_before": None,
        "greedy_after": None,
        "seconds_total": 1.5,
        "seconds_by_stage": {},
        "checkpoints": None,
        "metrics": None,
        "plots": None,
        "ui_url": None,
    }


def test_a_key_of_a_later_version_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text('{"run_name": "r", "steps": 3, "seconds_total": 2.0, "carbon_grams": 5}')
    assert RunSummary.read(path) == RunSummary(run_name="r", steps=3, seconds_total=2.0)


def test_the_table_shows_change_time_and_places() -> None:
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(SUMMARY))
    rows = {
        cells[0].strip(): cells[1].strip()
        for text in console.export_text().splitlines()
        if len(cells := text.strip("│┃ ").split("│")) == 2
    }
    assert rows == {
        "training steps": "40",
        "accuracy, sampled": "0.281 → 0.662  (+0.381)",
        "accuracy, greedy": "not measured → 0.900",
        "time in all": "3 min 20 s",
        "generate": "1 min 30 s  45%",
        "update": "50.0 s  25%",
        "checkpoints": "/data/ckpts/night-1",
        "metrics": "none",
        "plots": "none",
        "page in the UI": "http://127.0.0.1:4200/runs/flow-run/1",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (4.24, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185.0, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7620.0, "2 h 07 min"),
        (90_000.0, "25 h 00 min"),
    ],
)
def test_durations_are_rounded_without_carrying_over(seconds: float, text: str) -> None:
    assert duration(seconds) == text
