"""Several backends behind one tracker: each gets what it lacks, and none stops the run."""

from collections.abc import Mapping

import pytest

from skyrl_core.tracking.multi import MultiTracker


class Recorder:
    """A backend that holds steps up to a given one and may refuse to work."""

    def __init__(self, name: str, logged_through: int = -1, broken: bool = False) -> None:
        self.name = name
        self.logged_through = logged_through
        self.broken = broken
        self.place: str | None = None
        self.steps: list[int] = []
        self.failures: list[tuple[BaseException, str]] = []
        self.ends: list[bool] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no route to tracker")
        self.steps.append(step)
        self.logged_through = step

    def log_exception(self, error: BaseException, where: str) -> None:
        if self.broken:
            raise ConnectionError("no route to tracker")
        self.failures.append((error, where))

    def finish(self, ok: bool) -> None:
        if self.broken:
            raise ConnectionError("no route to tracker")
        self.ends.append(ok)


def test_after_a_restart_each_backend_takes_only_the_steps_it_lacks() -> None:
    ahead, behind, empty = Recorder("ahead", 3), Recorder("behind", 1), Recorder("empty")
    tracker = MultiTracker([ahead, behind, empty])
    for step in range(5):
        tracker.log({"loss": 1.0}, step)
    assert (ahead.steps, behind.steps, empty.steps) == ([4], [2, 3, 4], [0, 1, 2, 3, 4])


def test_a_failing_backend_costs_a_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder("broken", broken=True), Recorder("sound")
    tracker = MultiTracker([broken, sound])
    error = ValueError("NaN in loss")
    tracker.log({"loss": 1.0}, 1)
    tracker.log_exception(error, "update step 2")
    tracker.finish(False)
    assert sound.steps == [1]
    assert sound.failures == [(error, "update step 2")]
    assert sound.ends == [False]
    assert caplog.text.count("tracker broken did not take") == 3
    assert "ConnectionError: no route to tracker" in caplog.text


def test_finishing_twice_closes_once() -> None:
    backend = Recorder("one")
    tracker = MultiTracker([backend])
    tracker.finish(True)
    tracker.finish(False)
    assert backend.ends == [True]


def test_metrics_that_come_too_late_for_their_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    backend = Recorder("one")
    tracker = MultiTracker([backend])
    tracker.log({"loss": 1.0}, 4)
    tracker.log({"loss": 1.0}, 4)
    assert caplog.text == ""
    tracker.log({"eval/score": 0.5}, 4)
    assert "step 4 was reported already: eval/score not tracked" in caplog.text
    assert backend.steps == [4]


def test_links_name_the_backends_that_have_a_place() -> None:
    page, silent = Recorder("page"), Recorder("silent")
    page.place = "https://tracker.test/run"
    assert MultiTracker([page, silent]).links() == {"page": "https://tracker.test/run"}
