"""The mark that says how far a backend was fed."""

from pathlib import Path

import pytest

from skyrl_core.tracking.high_water import HighWaterMark


def test_the_mark_is_kept_across_openings(tmp_path: Path) -> None:
    path = tmp_path / "trackers" / "console.json"
    mark = HighWaterMark(path, "console")
    assert mark.step == -1
    mark.advance(0)
    mark.advance(7)
    assert HighWaterMark(path, "console").step == 7


def test_a_mark_of_another_target_is_ignored(tmp_path: Path) -> None:
    HighWaterMark(tmp_path / "m.json", "run-a").advance(7)
    assert HighWaterMark(tmp_path / "m.json", "run-b").step == -1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x", "target": "t"}', "{}", '{"target": "t"}'])
def test_a_damaged_mark_starts_over_and_says_so(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.json").write_text(content)
    assert HighWaterMark(tmp_path / "m.json", "t").step == -1
    assert "m.json is unreadable" in caplog.text
