"""Every estimator and every loss runs from the command line on the quick start's configuration; so does own code."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES
from skyrl_core.data.run_store import RunStore
from skyrl_core.recipes.arithmetic import ArithmeticSettings, ensure_arithmetic
from skyrl_core.recipes.arithmetic_model import WarmUp
from skyrl_core.tracking.metrics_file import MetricsLine, read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "trainer.max_training_steps=2",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=8",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    # One model less to start; the reference has tests of its own.
    "trainer.algorithm.use_kl_loss=false",
    "trainer.logger=console",
    "flow.show=plain",
]
PAIRS = [
    *((estimator, "regular") for estimator, rules in ESTIMATORS.items() if not rules.needs_critic),
    *(("grpo", loss) for loss in POLICY_LOSSES if loss != "regular"),
]


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the quick start's data and a model warmed up for long enough to be right now and then."""
    root = tmp_path_factory.mktemp("quick_start")
    ensure_arithmetic(root / "data" / "arithmetic", settings=ArithmeticSettings(warm_up=WarmUp(steps=150)))
    return root


def train(folder: Path, api: str, *words: str, code: int = 0) -> str:
    """`skyrl-flows train` on the quick start's configuration, in `folder`; its output."""
    config = ROOT / "deployments" / "configs" / "arithmetic.yaml"
    command = [sys.executable, "-m", "flows.cli", "train", "--config", str(config), *SMALL, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": api, "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of(folder: Path, run_name: str) -> list[MetricsLine]:
    return read_metrics(folder / "runs" / "exports" / run_name / "metrics.jsonl")


# The command line again and again in one process: it finds Ray started, which saves most of a short run's time.
COMMANDS = """
import json, sys
import ray
from flows.cli import main
from flows.environment import prefect_environment, prepare_this_process
from skyrl_core.runtime.cluster import ensure_ray

prepare_this_process(debug=False)
with ensure_ray("commands", num_cpus=4, environment=prefect_environment()):
    for name, words in json.load(sys.stdin).items():
        print(f"== {name}: exit code {main(words)}", flush=True)
    print("== CPUs free:", ray.available_resources().get("CPU"))
"""


@pytest.fixture(scope="module")
def two_steps(quick_start: Path, prefect_api: str) -> str:
    """`skyrl-flows train` for every pair, `skyrl-flows evaluate` for the start model; the output."""
    config = ROOT / "deployments" / "configs" / "arithmetic.yaml"
    runs = {
        f"{estimator}-{loss}": [
            *("train", "--config", str(config), *SMALL),
            f"trainer.run_name={run_name(estimator, loss)}",
            f"trainer.algorithm.advantage_estimator={estimator}",
            f"trainer.algorithm.policy_loss_type={loss}",
        ]
        for estimator, loss in PAIRS
    }
    runs["evaluation"] = ["evaluate", "--config", str(config), "flow.show=plain"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_api, "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(runs),
        cwd=quick_start,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def run_name(estimator: str, loss: str) -> str:
    return f"{estimator}-{loss}".replace("+", "p")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_estimator_and_every_loss_takes_two_steps(
    estimator: str, loss: str, quick_start: Path, two_steps: str
) -> None:
    assert f"== {estimator}-{loss}: exit code 0" in two_steps, two_steps
    lines = lines_of(quick_start, run_name(estimator, loss))
    assert [line.step for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line.metrics.values())
        assert line.metrics["policy/grad_norm"] > 0
        # The same weights on both sides: the engine's log-probabilities are the trainer's, up to rounding.
        assert line.metrics["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.slow
def test_a_ray_that_was_there_before_the_runs_is_left_as_it_was_found(two_steps: str) -> None:
    assert "== evaluation: exit code 0" in two_steps, two_steps
    assert "== CPUs free: 4.0" in two_steps, two_steps


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of docs/extending.md as files outside the repository and outside the folder of the run."""
    folder = tmp_path_factory.mktemp("own")
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL):
        (folder / name).write_text(code)
    return folder


@pytest.mark.slow
def test_own_estimator_loss_reward_and_tracker_run_and_go_on_in_a_new_process(
    own: Path, quick_start: Path, prefect_api: str
) -> None:
    relative = os.path.relpath(own, quick_start)
    words = [
        "trainer.run_name=own",
        f"trainer.algorithm.advantage_estimator={relative}/median.py:median_baseline",
        f"trainer.algorithm.policy_loss_type={own}/soft_clip.py:soft_clip",
        "environment.rewards.correct.function=environment",
        f"environment.rewards.short.function={own}/brevity.py:brevity",
        "environment.rewards.short.weight=0.2",
        f"hooks.tracker={own}/reward_file.py:make",
    ]
    train(quick_start, prefect_api, *words, "trainer.max_training_steps=1")
    train(quick_start, prefect_api, *words)
    lines = lines_of(quick_start, "own")
    assert [line.step for line in lines] == [1, 2]
    for line in lines:
        metrics = line.metrics
        composed = metrics["environment/reward/correct"] + 0.2 * metrics["environment/reward/short"]
        assert metrics["reward/mean"] == pytest.approx(composed, abs=1e-5)
        assert 0.8 < metrics["policy/bent_ratio"] < 1.25
    rewards = (quick_start / "runs" / "exports" / "own" / "rewards.txt").read_text().split()
    assert rewards[-2:] == ["2", str(lines[1].metrics["reward/mean"])]
    # The steps were made by two processes, and with them by two Rays.
    store = RunStore.open(quick_start / "runs" / "checkpoints" / "own")
    assert [record.fence for record in store.records("update")] == [1, 2]

    (own / "brevity.py").write_text((own / "brevity.py").read_text() + "\n")
    refused = train(quick_start, prefect_api, *words, "trainer.max_training_steps=3", code=2)
    assert f"run 'own' was made with another {own}/brevity.py" in refused
