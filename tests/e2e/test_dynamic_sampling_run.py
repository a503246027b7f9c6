"""A run with dynamic sampling and an adaptive KL coefficient: epochs and steps add up, and a kill changes nothing."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file

from skyrl_core.checkpoint.discovery import list_checkpoints, read_manifest
from skyrl_core.data.run_store import RunStore
from tests.e2e.conftest import Project
from tests.e2e.test_kill_and_resume import learned

PROMPTS = 14
WORDS = [
    "trainer.run_name=k",
    "trainer.epochs=2",
    "trainer.ckpt_interval=1",
    "trainer.max_ckpts_to_keep=-1",
    "trainer.eval_interval=-1",
    "trainer.algorithm.dynamic_sampling.type=filter",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.algorithm.kl_ctrl.type=adaptive",
    "trainer.algorithm.kl_ctrl.horizon=100",
    "environment.env_class=rare_env.py:RareEnv",
]
# Half of the prompts earn nothing whatever is answered: their samples never differ.
RARE_ENV = """
from digit_env import DigitEnv


class RareEnv(DigitEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        index = extras["extra_info"]["index"]
        self.hopeless = index % 2 == 0
        with open("sampled.txt", "a") as file:
            file.write(f"{index}\\n")

    def step(self, action):
        answer = super().step(action)
        return {**answer, "reward": 0.0} if self.hopeless else answer
"""


@pytest.fixture(scope="module")
def new_rare_project(new_project: Callable[[], Project]) -> Callable[[], Project]:
    def make() -> Project:
        project = new_project()
        (project.root / "rare_env.py").write_text(RARE_ENV)
        return project

    return make


@pytest.fixture(scope="module")
def whole(new_rare_project: Callable[[], Project]) -> Project:
    """A project whose run nobody disturbed."""
    project = new_rare_project()
    project.run(*WORDS)
    return project


def draws(store: RunStore, step: int) -> Iterator[int]:
    """The number of prompts in each draw of a step."""
    number = 0
    while (record := store.read_stage(f"plan-{number}" if number else "plan", step)) is not None:
        yield record.summary["prompts"]
        number += 1


def test_every_prompt_is_sampled_once_an_epoch_however_many_a_step_takes(whole: Project) -> None:
    store = RunStore.open(whole.root / "checkpoints" / "k")
    lines = whole.metrics("k")
    assert [line.step for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) < 8, "dynamic sampling took no more prompts than a plain run would"
    # One line for each of the four samples of a prompt, draw after draw.
    sampled = (whole.root / "sampled.txt").read_text().split()
    epoch = 4 * PROMPTS
    for start in (0, epoch):
        assert Counter(sampled[start : start + epoch]) == dict.fromkeys(map(str, range(PROMPTS)), 4)
    for line in lines:
        counts = list(draws(store, line.step))
        assert line.metrics["dynamic_sampling/batches"] == len(counts)
        assert line.metrics["dynamic_sampling/sampled_prompts"] == sum(counts)
        # The step trains on as many prompts as its first draw has, none of them without a difference.
        assert line.metrics["reward/zero_variance_share"] == 0.0
    position = read_manifest(list_checkpoints(store.uri)[-1]).data_position
    assert 4 * (position["epoch"] * PROMPTS + position["offset_samples"]) == len(sampled)


def test_the_adaptive_coefficient_goes_from_step_to_step_and_into_checkpoints(whole: Project) -> None:
    """β ← β·(1 + clip(KL/target - 1, ±0.2)·trajectories/100); 4 trajectories a prompt."""
    store = RunStore.open(whole.root / "checkpoints" / "k")
    lines = whole.metrics("k")
    coefficients = [line.metrics["reward/kl_coefficient"] for line in lines]
    states = [read_manifest(ref).algorithm_state["value"] for ref in list_checkpoints(store.uri)]
    assert coefficients == [0.01, *states[:-1]]
    for line, before, after in zip(lines, coefficients, states, strict=True):
        error = min(max(line.metrics["reward/kl"] / 0.1 - 1.0, -0.2), 0.2)
        trajectories = 4 * next(draws(store, line.step))
        assert after == pytest.approx(before * (1.0 + error * trajectories / 100))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["generate-1.committed@step=1:kill-flow", "score.begin@step=3:kill-flow"])
def test_a_run_killed_between_draws_continues_bit_for_bit(
    fault: str, whole: Project, new_rare_project: Callable[[], Project]
) -> None:
    project = new_rare_project()
    killed = project.start(*WORDS, faults=fault)
    output, _ = killed.communicate(timeout=900)
    assert killed.returncode == -signal.SIGKILL, output
    project.run(*WORDS)
    lines = project.metrics("k")
    assert learned(lines) == learned(whole.metrics("k"))
    last = f"global_step_{lines[-1].step}"
    for file in (whole.root / "checkpoints" / "k" / last / "policy").glob("*.safetensors"):
        found = load_file(project.root / "checkpoints" / "k" / last / "policy" / file.name)
        assert all(torch.equal(tensor, found[name]) for name, tensor in load_file(file).items())


@pytest.mark.slow
def test_a_batch_that_never_fills_stops_with_counts_and_goes_on_under_a_higher_bound(
    new_rare_project: Callable[[], Project],
) -> None:
    project = new_rare_project()
    bound = "trainer.algorithm.dynamic_sampling.max_sample_batches"
    process = project.start(*WORDS, f"{bound}=1", "trainer.max_training_steps=1")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 1, output
    assert "prompts whose samples differ in reward after 1 batches (4 prompts sampled" in output
    store = RunStore.open(project.root / "checkpoints" / "k")
    first = store.read_stage("generate", 1)
    project.run(*WORDS, f"{bound}=9", "trainer.max_training_steps=1")
    again = store.read_stage("generate", 1)
    assert first is not None
    assert again is not None
    assert (again.digest, again.fence) == (first.digest, first.fence), "what was sampled was sampled again"
