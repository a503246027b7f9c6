"""Nights on a schedule: one at a time, a killed one goes on the next time, a new one begins with production."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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
    first, second = wait_for(
        lambda: len(found := [run for run in team.runs(NIGHTLY) if run.start_time is not None]) >= 2 and found[:2],
        "two scheduled nights",
    )
    # The second was due long before the first had ended, and waited.
    for schedule in deployment.schedules:
        team.client.delete_deployment_schedule(deployment.id, schedule.id)
    nights = [team.ended(run) for run in (first, second)]
    assert [night.state_name for night in nights] == ["Completed", "Completed"]
    assert all(night.auto_scheduled for night in nights)
    one, two = sorted(nights, key=lambda night: night.start_time or 0)
    assert one.end_time is not None
    assert two.start_time is not None
    assert two.expected_start_time is not None
    assert two.expected_start_time < one.end_time <= two.start_time
    waited = team.client.request("GET", "/flow_run_states/", params={"flow_run_id": str(two.id)}).json()
    assert "AwaitingConcurrencySlot" in {state["name"] for state in waited}


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
