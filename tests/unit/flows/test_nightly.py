"""Which night goes on, and what a new one starts from."""

import json
from pathlib import Path

import pytest

from flows.nightly import unfinished_night


def night(root: Path, name: str, *, created: str, finished: bool, starts: int = 1) -> None:
    folder = root / name
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_name": name, "created_at": created}))
    state = {"finished": finished, "starts": starts, "total_steps": 4, "flow_run_id": ""}
    (folder / "state.json").write_text(json.dumps(state))


def test_the_newest_night_goes_on_when_it_is_not_finished(tmp_path: Path) -> None:
    assert unfinished_night(str(tmp_path), "nightly", 3) is None
    night(tmp_path, "nightly-20260101-020000", created="2026-01-01T02:00:00+00:00", finished=False)
    night(tmp_path, "other-20260103-020000", created="2026-01-03T02:00:00+00:00", finished=False)
    assert unfinished_night(str(tmp_path), "nightly", 3) == "nightly-20260101-020000"
    night(tmp_path, "nightly-20260102-020000", created="2026-01-02T02:00:00+00:00", finished=True)
    assert unfinished_night(str(tmp_path), "nightly", 3) is None


def test_a_night_that_was_started_too_often_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    night(tmp_path, "nightly-20260101-020000", created="2026-01-01T02:00:00+00:00", finished=False, starts=3)
    assert unfinished_night(str(tmp_path), "nightly", 4) == "nightly-20260101-020000"
    assert unfinished_night(str(tmp_path), "nightly", 3) is None
    assert "was started 3 times and is not finished: it is given up" in caplog.text
