"""Deployments on a real server with real workers: parameters, checkpoints that start their evaluation, promotion."""

import json
from collections.abc import Callable

import pytest

from tests.integration.operations.conftest import Team, wait_for

pytestmark = pytest.mark.service


def test_a_checkpoint_starts_exactly_one_evaluation_and_the_better_one_is_promoted(
    new_team: Callable[..., Team],
) -> None:
    team = new_team("promotion")
    team.deploy()
    team.worker("training")
    team.worker("evaluation")
    run = team.ended(team.start("train/train", overrides=["trainer.run_name=p", "trainer.max_training_steps=4"]))
    assert run.state is not None
    assert run.state.is_completed(), run.state.message

    evaluations = wait_for(
        lambda: len(found := team.runs("evaluate-checkpoint/evaluate-checkpoint")) == 2 and found, "two evaluations"
    )
    ended = [team.ended(found) for found in evaluations]
    assert [found.state_name for found in ended] == ["Completed", "Completed"], [found.state for found in ended]
    assert sorted((found.parameters["run"], found.parameters["step"]) for found in ended) == [("p", 2), ("p", 4)]
    for found in ended:
        step = found.parameters["step"]
        assert found.parameters["path"] == str(team.checkpoints / "p" / f"global_step_{step}")

    rows = {row["step"]: row for row in json.loads(team.command("checkpoints", "--config", str(team.config), "--json"))}
    assert set(rows) == {2, 4}
    (holder,) = [step for step in rows if rows[step]["aliases"] == ["best", "production"]]
    (other,) = [step for step in rows if rows[step]["aliases"] == []]
    assert rows[holder]["score"] >= rows[other]["score"]

    again = team.start("evaluate-checkpoint/evaluate-checkpoint", path=rows[2]["path"], step=2, run="p")
    assert team.ended(again).state_name == "Completed"
    assert "evaluated already at" in team.logs("evaluation")

    cleaned = team.ended(team.start("cleanup/cleanup", keep=1))
    assert cleaned.state_name == "Completed", cleaned.state
    kept = {path.name for path in (team.checkpoints / "p").iterdir() if path.name.startswith("global_step_")}
    assert kept == {"global_step_4", f"global_step_{holder}"}
