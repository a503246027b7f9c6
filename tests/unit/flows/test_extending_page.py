"""The examples of docs/extending.md do what the page says, as they stand there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flows.preflight import check_own_code
from skyrl_core.algorithms import registry
from skyrl_core.algorithms.advantages.compute import compute_advantages
from skyrl_core.algorithms.types import AdvantageInputs, PolicyLossInputs
from skyrl_core.config import load_config
from skyrl_core.config.hooks import HooksConfig
from skyrl_core.data.carriers import Prompt
from skyrl_core.environments.composition import RewardComposer
from skyrl_core.environments.registry import make_environment
from skyrl_core.hooks import load_hook

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
PREFIX = "trainer.algorithm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's examples as files, outside the repository."""
    folder = tmp_path_factory.mktemp("outside")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL):
        (folder / name).write_text(code)
    yield folder
    registry._estimators.entries.pop("median_baseline", None)


def test_every_example_is_named_on_the_page_and_passes_the_preflight(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "brevity.py",
        "echo.py",
        "median.py",
        "reward_file.py",
        "soft_clip.py",
    ]
    words = [
        f"{PREFIX}.advantage_estimator={folder}/median.py:median_baseline",
        f"{PREFIX}.policy_loss_type={folder}/soft_clip.py:soft_clip",
        f"environment.rewards.short.function={folder}/brevity.py:brevity",
        f"environment.env_class={folder}/echo.py:EchoEnv",
        f"hooks.tracker={folder}/reward_file.py:make",
    ]
    config = load_config(None, words)
    check_own_code(config)
    assert sorted(config.own_code().values()) == sorted(word.partition("=")[2] for word in words)


def test_the_estimator_subtracts_the_median(folder: Path) -> None:
    """Rewards 0, 1, 5 of one prompt: median 1. The masked token gets nothing."""
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([[0.0, 0.0], [0.0, 1.0], [5.0, 0.0]]),
        loss_mask=torch.tensor([[True, True], [True, False], [True, True]]),
        group_ids=torch.zeros(3, dtype=torch.long),
        valid=torch.ones(3, dtype=torch.bool),
    )
    config = load_config(None, [f"{PREFIX}.advantage_estimator={folder}/median.py:median_baseline"])
    result = compute_advantages(inputs, config.trainer.algorithm)
    assert result.advantages.tolist() == [[-1.0, -1.0], [0.0, 0.0], [4.0, 4.0]]


def test_the_loss_bends_the_ratio(folder: Path) -> None:
    """At ratio 1 the loss is -A with the plain gradient; far out the log-ratio goes to eps_clip_high = 0.2."""
    name = f"{folder}/soft_clip.py:soft_clip"
    algorithm = load_config(None, [f"{PREFIX}.policy_loss_type={name}"]).trainer.algorithm
    logprobs = torch.tensor([[-1.0, 9.0]], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.0, -1.0]]),
        advantages=torch.tensor([[2.0, 2.0]]),
        loss_mask=torch.tensor([[True, True]]),
    )
    loss = registry.get_policy_loss(name)(inputs, algorithm).token_loss
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([-2.0, -2.0 * 2.718281828**0.2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-2.0, 0.0])


def test_the_reward_counts_characters(folder: Path) -> None:
    """The words of the page: 1 for the environment's own, and 0.2 · (1 - 5/20) = 0.15."""
    words = re.search(r"^    environment\.rewards.*?(?=\n\n)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert words is not None
    lines = [line.strip().replace("=brevity.py", f"={folder}/brevity.py") for line in words[0].splitlines()]
    compose = RewardComposer(load_config(None, lines).environment.rewards)
    combined = compose(1.0, "12345", Prompt(uid="q", messages=(), env_class="e"), "q/0")
    assert combined.total == pytest.approx(1.15)
    assert combined.metrics == {"reward/correct": 1.0, "reward/short": 0.75}


def test_the_environment_rewards_an_echo(folder: Path) -> None:
    environment = make_environment(f"{folder}/echo.py:EchoEnv", {"word": "tree"})
    assert environment.step(" tree ")["reward"] == 1.0


def test_the_tracker_writes_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    config = load_config(None, ["trainer.logger=console"])
    make = load_hook(f"{folder}/reward_file.py:make", "hooks.tracker", dict)
    tracker = make(config, run_name="r", run_dir=tmp_path, run_key="k")
    tracker.log({"reward/mean": 0.5}, 3)
    tracker.log({"eval/all/avg_score": 0.5}, 3)
    tracker.finish(True)
    assert (tmp_path / "rewards.txt").read_text() == "3 0.5\n"


def test_every_hook_is_on_the_page_with_a_default_that_exists() -> None:
    rows = dict(re.findall(r"^\| `hooks\.(\w+)` \|.*\| `([\w.]+)` \|$", PAGE, flags=re.MULTILINE))
    assert list(rows) == list(HooksConfig.model_fields)
    for name, default in rows.items():
        module, _, attribute = default.rpartition(".")
        assert callable(load_hook(f"{module}:{attribute}", f"hooks.{name}", dict))
