"""wandb for real, offline: what its files hold after a kill, a failure and a continuation."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from skyrl_core.tracking.wandb_backend import wandb_run_id
from skyrl_core.tracking.wandb_files import log_records

PROGRAM = Path(__file__).with_name("wandb_run_program.py")


def start(home: Path, *arguments: str, mode: str = "offline") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_MODE": mode, "WANDB_SILENT": "true"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=home, timeout=120
    )


def records(run_dir: Path) -> list[list[Record]]:
    """The records of each start, oldest first."""
    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [[Record.FromString(data) for data in log_records(path)] for path in paths]


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[list[Record]]:
    """A run that is killed, fails when continued, and is continued to its end. Steps are offered from 0 each time."""
    home = tmp_path_factory.mktemp("wandb")
    run_dir = home / "run"
    codes = [
        start(home, str(PROGRAM), str(run_dir), steps, end).returncode
        for steps, end in (("2", "kill"), ("3", "fail"), ("5", "finish"))
    ]
    assert codes == [-signal.SIGKILL, 0, 0]
    return records(run_dir)


def test_a_killed_and_continued_run_has_every_point_once(starts: list[list[Record]]) -> None:
    rows = [items(record.history.item) for run in starts for record in run if record.HasField("history")]
    points = [(row["_step"], row["trainer/global_step"], row["reward/avg_raw_reward"]) for row in rows]
    assert points == [(step, step, step / 4) for step in range(5)]


def test_every_start_continues_the_same_run(starts: list[list[Record]]) -> None:
    runs = [record.run for run in starts[1:] for record in run if record.HasField("run")]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (wandb_run_id("night 1", "first"), "night 1", "arithmetic")
    }
    assert [list(run.tags) for run in runs] == [["nightly"], ["nightly"]]


def test_every_chart_is_drawn_over_the_training_step(starts: list[list[Record]]) -> None:
    metrics = [record.metric for record in starts[-1] if record.HasField("metric")]
    assert ("*", "trainer/global_step") in [(metric.glob_name, metric.step_metric) for metric in metrics]


def test_the_configuration_goes_along_without_secrets(starts: list[list[Record]]) -> None:
    (run,) = [record.run for record in starts[-1] if record.HasField("run")]
    config = items(run.config.update)
    assert config["trainer"]["project_name"] == "arithmetic"
    assert config["generator"]["inference_engine"]["engine_init_kwargs"] == {"api_key": "[hidden]"}
    assert not any(b"not-for-others" in record.SerializeToString() for start in starts for record in start)


def test_a_failure_is_in_the_summary_and_the_exit_code(starts: list[list[Record]]) -> None:
    failed, finished = starts[1], starts[2]
    summary: dict[str, Any] = {}
    for record in failed:
        summary |= items(record.summary.update)
    assert summary["exception/where"] == "update step 3"
    assert summary["exception/error"] == "ValueError: NaN in loss"
    assert summary["exception/traceback"].startswith("Traceback (most recent call last)")
    codes = [[record.exit.exit_code for record in run if record.HasField("exit")] for run in (failed, finished)]
    assert codes == [[1], [0]]


def test_without_a_login_the_run_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    code = (
        "from skyrl_core.config import SkyRLConfig; from skyrl_core.tracking.build import check_trackers; "
        "check_trackers(SkyRLConfig.model_validate({'trainer': {'logger': 'wandb'}}))"
    )
    result = start(tmp_path, "-c", code, mode="online")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("skyrl_core.errors.ConfigurationError: trainer.logger=wandb")
    for remedy in ("wandb login", "WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=tensorboard"):
        assert remedy in last


def test_run_ids_are_stable_distinct_and_safe() -> None:
    first = wandb_run_id("nightly/2026 é", "k")
    assert first == wandb_run_id("nightly/2026 é", "k")
    others = {wandb_run_id("nightly-2026", "k"), wandb_run_id("nightly/2026 é", "l"), wandb_run_id("x" * 200, "k")}
    assert len(others | {first}) == 4
    for run_id in others | {first}:
        assert len(run_id) <= 64
        assert set(run_id) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
