"""Nights on a schedule: one at a time, a killed one goes on the next time, a new one begins with production."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun

from skyrl_core.tracking.metrics_file import read_metrics
from tests.integration.operations.conftest import Team, wait_for

pytestmark = pytest.mark.service
NIGHTLY = "nightly/nightly-train"


def test_a_scheduled_night_fires_and_nights_never_overlap(new_team: Callable[..., Team]) -> None:
    team = new_team("schedule")
    team.deploy(
        nightly_train={
            "schedules": [{"interval": 10.0, "active": True}],
            "parameters": {"config": str(team.config), "overrides": ["trainer.max_training_steps=1"]},
        }
    )
    deployment = team.client.read_deployment_by_name(NIGHTLY)
    team.worker("training")

    def started() -> list[FlowRun]:
        return [run for run in team.runs(NIGHTLY) if run.start_time is not None]

    def waiting() -> FlowRun | None:
        return next((run for run in team.runs(NIGHTLY) if run.state_name == "AwaitingConcurrencySlot"), None)

    wait_for(started, "a scheduled night")
    waited: FlowRun = wait_for(waiting, "a night that waits for the one before")
    wait_for(lambda: len(started()) >= 2, "a second night")
    for schedule in deployment.schedules:
        team.client.delete_deployment_schedule(deployment.id, schedule.id)

    # Which of the waiting nights comes second is Prefect's choice: that none runs beside another is the promise.
    nights = [team.ended(run) for run in started()]
    assert [night.state_name for night in nights] == ["Completed"] * len(nights)
    assert all(night.auto_scheduled for night in nights)
    spans = sorted((night.start_time, night.end_time) for night in nights if night.start_time and night.end_time)
    assert len(spans) == len(nights)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert waited.state is not None
    assert waited.state.timestamp < spans[0][1]


def test_a_killed_night_goes_on_and_the_next_one_begins_with_production(new_team: Callable[..., Team]) -> None:
    team = new_team("nights")
    team.deploy()
    team.worker("training", faults="update.between_minibatches@step=3:kill-flow")
    words = ["trainer.max_training_steps=4"]
    killed = team.ended(team.start(NIGHTLY, overrides=words))
    assert killed.state is not None
    assert killed.state.is_crashed(), killed.state

    continued = team.ended(team.start(NIGHTLY, overrides=words))
    assert continued.state is not None
    assert continued.state.is_completed(), continued.state.message
    (night,) = [path.name for path in team.checkpoints.iterdir() if path.name.startswith("nightly-")]
    assert re.fullmatch(r"nightly-\d{8}-\d{6}", night)
    assert continued.name == f"{night} continued"
    steps = [line.step for line in read_metrics(team.root / "exports" / night / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4]

    team.command("promote", str(team.checkpoints / night / "global_step_4"), "--alias", "production")
    third = team.ended(team.start(NIGHTLY, overrides=words))
    assert third.state is not None
    assert third.state.is_completed(), third.state.message
    (new,) = [path for path in team.checkpoints.iterdir() if path.name.startswith("nightly-") and path.name != night]
    model = Path(yaml.safe_load((new / "config.yaml").read_text())["trainer"]["policy"]["model"]["path"])
    assert model == team.root / "exports" / night / "global_step_4" / "policy"
    assert (model / "model.safetensors").is_file()
    # What was in production at the end of one night is what the next one scores before its first step.
    before = read_metrics(team.root / "exports" / new.name / "metrics.jsonl")[0].metrics["eval/all/greedy_score"]
    after = read_metrics(team.root / "exports" / night / "metrics.jsonl")[-1].metrics["eval/all/greedy_score"]
    assert before == after
