"""The console logger."""

from pathlib import Path

import pytest

from skyrl_core.tracking.console_backend import ConsoleBackend


def test_a_step_is_one_line_with_sorted_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleBackend(tmp_path).log({"reward/avg_raw_reward": 0.4375, "policy/kl": 1.5e-7}, 12)
    assert capsys.readouterr().out == "step 12  policy/kl=1.5e-07  reward/avg_raw_reward=0.4375\n"


def test_a_continued_run_does_not_print_old_steps_again(tmp_path: Path) -> None:
    ConsoleBackend(tmp_path).log({"loss": 1.0}, 12)
    assert ConsoleBackend(tmp_path).logged_through == 12


def test_a_failure_goes_to_standard_error_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise MemoryError("out of memory in rank 1")
        except MemoryError as cause:
            raise RuntimeError("worker init failed") from cause
    except RuntimeError as error:
        ConsoleBackend(tmp_path).log_exception(error, "set-up")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("set-up failed\nTraceback")
    assert "MemoryError: out of memory in rank 1" in shown.err
    assert shown.err.rstrip().endswith("RuntimeError: worker init failed")
