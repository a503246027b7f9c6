"""TensorBoard event files, read back with TensorBoard's own reader."""

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

from skyrl_core.tracking.multi import MultiTracker
from skyrl_core.tracking.tensorboard_backend import TensorBoardBackend


@pytest.fixture(autouse=True)
def _file_names_sort_in_the_order_of_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one second are told apart by a counter of the process, which its reader sorts as text (10 before 9)."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def tracker(run_dir: Path) -> MultiTracker:
    return MultiTracker([TensorBoardBackend(run_dir, run_dir / "trackers")])


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_scalars_stand_at_their_steps(tmp_path: Path) -> None:
    run = tracker(tmp_path)
    for step in range(3):
        run.log({"loss": step / 4, "reward/avg_raw_reward": 0.5}, step)
    run.finish(True)
    assert points(tmp_path, "loss") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert points(tmp_path, "reward/avg_raw_reward") == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_a_continued_run_has_every_point_once(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    for step in (1, 2):
        first.log({"loss": step / 4}, step)
    # Killed here: nothing is closed. Every recorded step is offered again.
    second = tracker(tmp_path)
    for step in (1, 2, 3):
        second.log({"loss": step / 4}, step)
    second.finish(True)
    first.finish(False)
    assert points(tmp_path, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_a_step_written_in_part_before_a_kill_is_written_whole_once(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    first.log({"kl": 0.5, "loss": 0.25}, 1)
    first.finish(True)
    # What a kill in the middle of step 2 leaves: one of its two scalars on disk, the mark still at step 1.
    torn = SummaryWriter(str(tmp_path / "tensorboard"), filename_suffix=".torn")
    torn.add_scalar("kl", 9.0, 2)
    torn.close()
    second = tracker(tmp_path)
    for step in (1, 2):
        second.log({"kl": step / 2, "loss": step / 4}, step)
    second.finish(True)
    assert points(tmp_path, "kl") == [(1, 0.5), (2, 1.0)]
    assert points(tmp_path, "loss") == [(1, 0.25), (2, 0.5)]


def test_event_files_that_were_deleted_are_written_anew(tmp_path: Path) -> None:
    first = tracker(tmp_path)
    first.log({"loss": 0.25}, 1)
    first.finish(True)
    shutil.rmtree(tmp_path / "tensorboard")
    second = tracker(tmp_path)
    for step in (1, 2):
        second.log({"loss": step / 4}, step)
    second.finish(True)
    assert points(tmp_path, "loss") == [(1, 0.25), (2, 0.5)]


def test_a_failure_is_a_text_at_the_last_step(tmp_path: Path) -> None:
    run = tracker(tmp_path)
    run.log({"loss": 1.0}, 4)
    try:
        raise ValueError("NaN in `loss`")
    except ValueError as error:
        run.log_exception(error, "update step 5")
    run.finish(False)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Tensors("exception/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 4
    assert text.startswith("**update step 5** failed: ValueError: NaN in `loss`\n\n    Traceback")
    assert 'raise ValueError("NaN in `loss`")' in text
