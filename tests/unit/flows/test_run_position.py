"""Where a run stands: its data after steps of several draws, and what the algorithm carries from step to step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from flows.run import Run, open_run
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.config import load_config
from skyrl_core.data.carriers import Prompt
from skyrl_core.data.loader import PromptLoader
from skyrl_core.errors import ConfigurationError
from tasks.setup import Datasets


class Rows:
    """Ten prompts."""

    fingerprint = "f" * 64

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(uid=str(index), messages=(), env_class="e")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [
        f"trainer.ckpt_path={tmp_path}/checkpoints",
        f"trainer.export_path={tmp_path}/exports",
        "trainer.run_name=r",
        "trainer.epochs=2",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
    ]


def attach(run: Run) -> Run:
    rows = Rows()
    run.attach_data(Datasets(cast(Any, rows), None), PromptLoader(rows, 2, run.config.trainer.seed))
    return run


def close(run: Run, step: int) -> None:
    run.close_step(step, 1, {}, 0.0)


def uids(run: Run, step: int, draw: int) -> list[str]:
    return [prompt.uid for prompt in run.loader.batch(step + draw)]


def test_steps_of_several_draws_shorten_the_run_and_not_the_epoch(words: list[str]) -> None:
    """Ten prompts, two a draw: ten planned steps in two epochs. Steps of 2, 3 and 1 draws leave 4 of them."""
    with open_run(load_config(None, words)) as run:
        attach(run)
        assert (run.total_steps, run.planned_steps) == (10, 10)
        seen: list[str] = []
        for step, draws in ((1, 2), (2, 3), (3, 1)):
            seen += [uid for draw in range(draws) for uid in uids(run, step, draw)]
            assert run.plan(step, draws - 1).stage == ("plan" if draws == 1 else f"plan-{draws - 1}")
            run.consume(step, draws)
            close(run, step)
        assert sorted(seen[:10]) == sorted(str(index) for index in range(10))
        assert (run.epoch_of(4), run.total_steps, run.planned_steps) == (2, 7, 10)
        following = uids(run, 4, 0)
    with open_run(load_config(None, words)) as again:
        attach(again)
        assert (again.done_step, again.total_steps, again.planned_steps) == (3, 7, 10)
        assert uids(again, 4, 0) == following
        # The last step may take more than is left of the last epoch; the run then ends with it.
        again.consume(4, 6)
        assert again.total_steps == 4


def test_the_algorithms_state_is_that_of_the_steps_record_or_of_the_checkpoint_it_began_with(
    words: list[str], tmp_path: Path
) -> None:
    facts = {"config_digest": "c", "dataset_fingerprint": Rows.fingerprint, "world_size": 1, "run_name": "other"}
    with CheckpointWriter(tmp_path / "other", 5) as writer:
        (Path(writer.directory) / "weights.bin").write_bytes(b"w")
        position = {"epoch": 0, "offset_samples": 4, "step": 5, "fingerprint": Rows.fingerprint}
        saved = writer.commit(
            policy_version=5,
            data_position={**position, "dataset_size": 10, "seed": 42},
            algorithm_state={"value": 0.25},
            **facts,
        )
    start = [*words, "trainer.resume_mode=from_path", f"trainer.resume_path={saved.uri}"]
    with open_run(load_config(None, start)) as run:
        attach(run)
        assert run.algorithm_state(5) == {"value": 0.25}
        assert run.planned_steps == 5 + 3 + 5
        run.store.write_stage(
            "score", 6, "d", files={}, summary={"metrics": {}, "algorithm_state": {"value": 0.5}}, seconds=0.0
        )
        assert run.algorithm_state(6) == {"value": 0.5}
        close(run, 6)
    with open_run(load_config(None, start)) as again:
        attach(again)
        assert again.algorithm_state(again.done_step) == {"value": 0.5}
        assert again.planned_steps == 5 + 3 + 5


def test_a_fresh_run_carries_nothing(words: list[str]) -> None:
    with open_run(load_config(None, words)) as run:
        assert run.algorithm_state(0) == {}


@pytest.fixture
def own_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(code: str) -> Path:
        path = tmp_path / "own.py"
        path.write_text(code)
        return path

    return write


def test_a_run_is_not_continued_with_another_version_of_its_own_file(
    words: list[str], own_file: Callable[[str], Path]
) -> None:
    path = own_file("def f(): ...\n")
    named = [*words, f"trainer.algorithm.policy_loss_type={path}:f"]
    for _ in range(2):
        with open_run(load_config(None, named)):
            pass
    own_file("def f(): return 1\n")
    with (
        pytest.raises(ConfigurationError, match=r"run 'r' was made with another .*own\.py: restore the file"),
        open_run(load_config(None, named)),
    ):
        pass
