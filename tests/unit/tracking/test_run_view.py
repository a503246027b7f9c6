"""The terminal view: plain lines in files, a live foot on terminals."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from flows.view import RunView


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_step(view: RunView, clock: Clock, step: int, seconds: float, *, recorded: bool = False) -> None:
    view.stage("generate", step)
    clock.now += seconds
    view.stage_done("generate", seconds, recorded)
    view.step_done(step, {"reward/avg_raw_reward": step / 8, "generate/tokens_per_second": 1234.4})


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out), out


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, record=True)


def test_a_file_gets_one_aligned_line_a_step(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("auto", 12, "night-1", console=console, clock=clock) as view:
        view.epoch(1)
        for step in range(1, 12):
            run_step(view, clock, step, 2.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "step  1 of 12  epoch 1  reward  0.125  accuracy     -    1,234 tokens/s         2.0 s  left 22.0 s"
    )
    assert lines[10].startswith("step 11 of 12  epoch 1  reward  1.375")
    assert len(lines) == 11
    assert len({line.index("left") for line in lines}) == 1


def test_a_file_gets_no_escape_codes_and_no_wrapping(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("auto", None, "night-1", console=console, clock=clock) as view:
        view.note("engine 0 died [exit code -9]: " + "x" * 300)
    assert out.getvalue() == "engine 0 died [exit code -9]: " + "x" * 300 + "\n"


def test_off_prints_nothing(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("off", 2, "night-1", console=console, clock=clock) as view:
        view.note("hello")
        view.evaluation(0, {"eval/all/avg_score": 0.5})
        run_step(view, clock, 1, 1.0)
    assert out.getvalue() == ""


def test_the_estimate_is_the_median_of_the_last_ten_worked_steps(clock: Clock) -> None:
    console, _ = plain()
    with RunView.open("plain", 100, "night-1", console=console, clock=clock) as view:
        view.plan(100, 5)
        assert view.seconds_left() is None
        run_step(view, clock, 6, 0.01, recorded=True)
        assert view.seconds_left() is None
        for step, seconds in enumerate([100.0, 100.0, 100.0, *[3.0] * 4, 50.0, *[5.0] * 5], start=7):
            run_step(view, clock, step, seconds)
        # The last ten: 3 3 3 3 5 5 5 5 5 50, median 5; 81 of 100 steps are left after step 19.
        assert view.seconds_left() == pytest.approx(5.0 * 81)


def test_set_up_and_evaluations_are_not_part_of_a_steps_time(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("plain", None, "night-1", console=console, clock=clock) as view:
        view.stage("trainer", 0)
        clock.now += 60.0
        view.stage_done("trainer", 60.0, False)
        view.plan(3)
        view.stage("evaluate", 0)
        clock.now += 30.0
        view.stage_done("evaluate", 30.0, False)
        view.evaluation(0, {"eval/all/avg_score": 0.25, "eval/all/greedy_score": 0.5})
        run_step(view, clock, 1, 2.0)
        view.stage("evaluate", 1)
        clock.now += 30.0
        view.stage_done("evaluate", 30.0, False)
        run_step(view, clock, 2, 4.0)
        assert view.seconds_left() == pytest.approx(3.0)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["trainer: 1 min 00 s", "evaluation of step 0: accuracy 0.250, greedy 0.500"]
    assert "  2.0 s  left 4.0 s" in lines[2]
    assert "accuracy 0.250" in lines[2]


def test_a_step_taken_whole_from_the_record_says_so(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("plain", 2, "night-1", console=console, clock=clock) as view:
        run_step(view, clock, 1, 0.1, recorded=True)
    assert "recorded  left -" in out.getvalue()


def test_a_continued_run_says_where_it_stands(clock: Clock) -> None:
    console, out = plain()
    with RunView.open("plain", None, "night-1", console=console, clock=clock) as view:
        view.plan(40, 12)
    assert out.getvalue() == "continuing after step 12 of 40\n"


def test_the_live_foot_shows_step_numbers_and_stage(clock: Clock) -> None:
    console = terminal()
    with RunView.open("auto", None, "night-1", console=console, clock=clock) as view:
        view.plan(40, 10)
        view.epoch(2)
        run_step(view, clock, 11, 2.0)
        view.evaluation(11, {"eval/all/avg_score": 0.625})
        view.stage("update", 12, 2)
        view.stage_done("generate", 0.1, True)
        view.stage("update", 12, 3)
        clock.now += 5.0
        shown = Console(file=io.StringIO(), width=120, record=True)
        shown.print(view.status())
        first, second, third = shown.export_text().splitlines()
    assert first.startswith("night-1  step 11 of 40  epoch 2  ")
    assert first.rstrip().endswith("about 58.0 s left")
    assert second.rstrip() == (
        "reward 1.375  accuracy 0.625 (step 11)  1,234 tokens/s  2 retries  1 stage from the record"
    )
    assert third.rstrip().endswith("update step 12  5.0 s  attempt 3")


def test_lines_and_other_prints_stand_above_the_live_foot(clock: Clock) -> None:
    console = terminal()
    with RunView.open("auto", 2, "night-1", console=console, clock=clock) as view:
        view.note("engine 0 died: rebuilding")
        print("printed by a library")
        run_step(view, clock, 1, 2.0)
    text = console.export_text()
    for line in ("engine 0 died: rebuilding", "printed by a library", "step 1 of 2  reward"):
        assert line in text
    assert text.index("printed by a library") < text.index("step 1 of 2  reward")


@pytest.fixture
def old_handler() -> Iterator[logging.StreamHandler]:  # type: ignore[type-arg]
    """A handler of the kind libraries install at import: bound to the stream of that moment, with its own console."""
    handler = logging.StreamHandler(sys.stderr)
    handler.console = Console(file=sys.stderr)  # type: ignore[attr-defined]
    logger = logging.getLogger("a.library")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_log_handlers_made_earlier_print_above_the_live_foot_and_get_their_stream_back(
    clock: Clock,
    old_handler: logging.StreamHandler,  # type: ignore[type-arg]
) -> None:
    stream = old_handler.stream
    console = terminal()
    with RunView.open("live", 2, "night-1", console=console, clock=clock):
        assert old_handler.stream is sys.stderr is not stream
        logging.getLogger("a.library").warning("a warning from a library")
        old_handler.console.print("from its own console")  # type: ignore[attr-defined]
    assert old_handler.stream is stream
    assert old_handler.console.file is stream  # type: ignore[attr-defined]
    text = console.export_text()
    assert "a warning from a library" in text
    assert "from its own console" in text


def test_the_terminal_is_given_back_when_the_run_fails(clock: Clock) -> None:
    before = sys.stdout
    with (
        pytest.raises(RuntimeError, match="boom"),
        RunView.open("live", 2, "n", console=terminal(), clock=clock),
    ):
        raise RuntimeError("boom")
    assert sys.stdout is before
