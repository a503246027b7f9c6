"""A killed run continues under its name and ends as if nothing had happened: weights and metrics, bit for bit."""

import random
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from skyrl_core.data.run_store import RunStore
from skyrl_core.tracking.metrics_file import MetricsLine
from tests.e2e.conftest import LAST_STEP, RUN, Project, wait_until


def final_weights(project: Project) -> dict[str, torch.Tensor]:
    """The policy's tensors and optimizer state, as the last checkpoint holds them."""
    files = sorted((project.checkpoint("k", LAST_STEP) / "policy").glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def learned(lines: list[MetricsLine]) -> list[tuple[int, int, dict[str, float]]]:
    """Everything in metrics.jsonl that is not a matter of speed."""
    return [
        (
            line.step,
            line.epoch,
            {k: v for k, v in line.metrics.items() if "timing/" not in k and "per_second" not in k},
        )
        for line in lines
    ]


def assert_same_run(project: Project, reference: Project) -> None:
    expected, found = final_weights(reference), final_weights(project)
    assert expected.keys() == found.keys()
    assert len(expected) > 10
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert different == []
    lines = project.metrics("k")
    assert [line.step for line in lines] == list(range(LAST_STEP + 1))
    assert learned(lines) == learned(reference.metrics("k"))
    assert len({line.metrics["reward/avg_raw_reward"] for line in lines[1:]}) > 3, "the rewards do not tell runs apart"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("generate.sampled@step=3:kill-flow", id="inside generate", marks=pytest.mark.slow),
        pytest.param("update.between_minibatches@step=3,minibatch=0:kill-flow", id="between two optimizer steps"),
        pytest.param("checkpoint.written@step=4:kill-flow", id="inside a checkpoint's write", marks=pytest.mark.slow),
    ],
)
def test_a_killed_flow_process_continues_bit_for_bit(
    fault: str, project: Project, uninterrupted: Project, prefect_api: str
) -> None:
    began = datetime.now(UTC)
    killed = project.start(RUN, faults=fault)
    output, _ = killed.communicate(timeout=900)
    assert killed.returncode == -signal.SIGKILL, output
    assert "nothing to resume" in output
    project.run(RUN)
    assert_same_run(project, uninterrupted)
    # Stages that were finished before the kill were not done again: their records are the first writer's.
    store = RunStore.open(project.root / "checkpoints" / "k")
    made_by = {
        (record.stage, record.step): record.fence
        for stage in ("generate", "score", "update")
        for record in store.records(stage)
    }
    assert {writer for (_, step), writer in made_by.items() if step < 3} == {1}
    assert {writer for (_, step), writer in made_by.items() if step > 4} == {2}
    if fault.startswith("update"):
        assert (made_by["generate", 3], made_by["score", 3], made_by["update", 3]) == (1, 1, 2)
    # The killed process could not say so: its flow run and the epoch in it were closed by the one that continued.
    wanted = {"flow_runs": {"start_time": {"after_": began.isoformat()}}}
    runs = httpx.post(f"{prefect_api}/flow_runs/filter", json=wanted).json()
    assert sorted(run["state_name"] for run in runs if run["name"] == "k") == ["Completed", "Crashed"]
    assert {run["state_name"] for run in runs if run["name"] == "k epoch 1"} == {"Completed", "Crashed"}
    assert {run["state_name"] for run in runs} == {"Completed", "Crashed"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_flow_process_killed_at_a_random_moment_continues_bit_for_bit(
    seed: int, project: Project, uninterrupted: Project
) -> None:
    draw = random.Random(seed)
    process = project.start(RUN)
    first = project.root / "exports" / "k" / "metrics.jsonl"
    wait_until(lambda: first.exists() and first.stat().st_size > 0, process)
    time.sleep(draw.uniform(0.0, 4.0))
    process.kill()
    process.communicate()
    project.run(RUN)
    assert_same_run(project, uninterrupted)


def test_killed_actors_and_workers_heal_unattended(project: Project, uninterrupted: Project) -> None:
    output = project.run(
        RUN,
        faults=";".join(
            [
                "update.between_minibatches@step=2,minibatch=0:kill-self",
                "engine.generate@version=3:kill-self",
                "score.begin@step=6:kill-self",
            ]
        ),
    )
    assert "policy rank" in output
    assert "engine 0" in output
    assert "worker of score step 6 died" in output
    assert {path.name for path in (project.root / "faults").iterdir()} == {f"fault-{n}.fired" for n in range(3)}
    assert_same_run(project, uninterrupted)


def test_a_finished_run_started_again_does_nothing_and_says_so(uninterrupted: Project) -> None:
    before = (uninterrupted.root / "exports" / "k" / "metrics.jsonl").read_bytes()
    assert "already reached its last step, 8" in uninterrupted.run(RUN)
    assert (uninterrupted.root / "exports" / "k" / "metrics.jsonl").read_bytes() == before


def test_torn_metrics_are_rebuilt_from_committed_results(uninterrupted: Project) -> None:
    path: Path = uninterrupted.root / "exports" / "k" / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-40] + b"\n" + before[:100])
    uninterrupted.run(RUN)
    assert path.read_bytes() == before
