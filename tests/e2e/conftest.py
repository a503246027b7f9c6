"""End-to-end runs: the real command line in processes of its own, on a tiny model that needs no preparation."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_core.testing.tiny_model import build_tiny_model
from skyrl_core.tracking.metrics_file import MetricsLine, read_metrics

COMMAND = [sys.executable, "-m", "flows.cli"]
LAST_STEP = 8
RUN = "trainer.run_name=k"

TINY_CONFIG = """
data:
  train_data: [{root}/train.parquet]
  val_data: [{root}/test.parquet]
  dataloader: {{num_workers: 0}}
trainer:
  policy:
    model: {{path: {root}/model}}
    optimizer_config: {{lr: 1.0e-3, num_warmup_steps: 2, weight_decay: 0.0}}
  placement: {{device: cpu}}
  algorithm: {{use_kl_loss: true, kl_loss_coef: 0.01}}
  bf16: false
  gradient_checkpointing: false
  seed: 7
  epochs: 2
  train_batch_size: 4
  policy_mini_batch_size: 2
  micro_train_batch_size_per_gpu: 8
  micro_forward_batch_size_per_gpu: 8
  eval_batch_size: 16
  eval_interval: 3
  eval_greedy: true
  ckpt_interval: 2
  max_ckpts_to_keep: 2
  max_prompt_length: 32
  logger: [tensorboard]
  ckpt_path: {root}/checkpoints
  export_path: {root}/exports
generator:
  n_samples_per_prompt: 4
  inference_engine: {{backend: transformers}}
  sampling_params: {{max_generate_length: 6, temperature: 1.0}}
  eval_sampling_params: {{max_generate_length: 6, temperature: 1.0}}
environment: {{env_class: "digit_env:DigitEnv"}}
flow: {{show: plain, stage_retry_seconds: 0.2}}
"""

# A reward that a random model earns in parts, so that every step moves the weights: the share of digits in the answer.
DIGIT_ENV = """
from skyrl_gym.envs.base_text_env import BaseTextEnv


class DigitEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action):
        reward = sum(letter.isdigit() for letter in action) / 6
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self):
        return {"answered": 1.0}
"""


def write_problems(path: Path, first: int, count: int) -> None:
    """`count` two-digit additions in SkyRL's dataset format, never the same ones for another `first`."""
    rows = []
    for number in range(first, first + count):
        left, right = number % 100, (number * 37 + 11) % 100
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{left:02d}+{right:02d}="}],
                "data_source": "digits",
                "reward_spec": {"method": "rule", "ground_truth": str(left + right)},
                "extra_info": {"index": number},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def armed(root: Path, faults: str | None) -> dict[str, str]:
    """The environment in which `faults` happen, each once; empty without any."""
    if faults is None:
        return {}
    folder = root / "faults"
    folder.mkdir(exist_ok=True)
    return {"SKYRL_FLOWS_FAULTS": faults, "SKYRL_FLOWS_FAULTS_DIR": str(folder)}


@dataclass(slots=True, kw_only=True)
class Project:
    """A folder with data, model and configuration, and the environment its commands run in."""

    root: Path
    environment: dict[str, str]
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    def start(self, *words: str, faults: str | None = None, command: str = "train") -> "subprocess.Popen[str]":
        """Start `skyrl-flows COMMAND --config … words`; its output goes to the returned process's pipe."""
        environment = self.environment | armed(self.root, faults)
        process = subprocess.Popen(
            [*COMMAND, command, "--config", str(self.config), *words],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *words: str, faults: str | None = None, command: str = "train", timeout: float = 900.0) -> str:
        """Run to the end and return the output; a run that should succeed and does not shows its output."""
        process = self.start(*words, faults=faults, command=command)
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, output
        return output

    def metrics(self, run_name: str) -> list[MetricsLine]:
        return read_metrics(self.root / "exports" / run_name / "metrics.jsonl")

    def summary(self, run_name: str) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.root / "exports" / run_name / "summary.json").read_text())
        return content

    def checkpoint(self, run_name: str, step: int) -> Path:
        return self.root / "checkpoints" / run_name / f"global_step_{step}"


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real Prefect server on SQLite for all end-to-end runs."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_API_URL", "")
        from flows.server import ensure_server

        server = ensure_server()
        server.wait_ready(120.0)
        yield server.api_url
        server.release()


@pytest.fixture(scope="session")
def new_project(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Iterator[Callable[[], Project]]:
    """Makes independent projects; processes that a failed test leaves are ended."""
    made: list[Project] = []

    def make() -> Project:
        root = tmp_path_factory.mktemp("project")
        write_problems(root / "train.parquet", 0, 14)
        write_problems(root / "test.parquet", 50, 8)
        build_tiny_model(root / "model")
        (root / "digit_env.py").write_text(DIGIT_ENV)
        (root / "config.yaml").write_text(TINY_CONFIG.format(root=root))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYRL_FLOWS_")}
        environment |= {"PREFECT_API_URL": prefect_api, "PYTHONUNBUFFERED": "1"}
        environment.pop("RAY_ADDRESS", None)
        made.append(Project(root=root, environment=environment))
        return made[-1]

    yield make
    for project in made:
        for process in project.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.fixture
def project(new_project: Callable[[], Project]) -> Project:
    """One project."""
    return new_project()


@pytest.fixture(scope="session")
def uninterrupted(new_project: Callable[[], Project]) -> Project:
    """A project whose run "k" nobody disturbed."""
    project = new_project()
    project.run(RUN)
    return project


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", timeout: float = 300.0) -> None:
    """Return when `condition` holds; fail when the process ends first or time runs out."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
