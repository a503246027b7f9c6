"""Which trackers a configuration starts, and what it may not ask for."""

import logging
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.config import SkyRLConfig
from skyrl_core.errors import ConfigurationError
from skyrl_core.tracking import build
from skyrl_core.tracking.build import build_tracker, check_trackers, tracker_names


def config(logger: Any) -> SkyRLConfig:
    return SkyRLConfig.model_validate({"trainer": {"logger": logger}})


def test_one_name_or_several() -> None:
    assert tracker_names(config("tensorboard")) == ("tensorboard",)
    assert tracker_names(config(["console", "tensorboard"])) == ("console", "tensorboard")


def test_an_unknown_tracker_names_those_that_exist() -> None:
    odd = config("console").model_copy(
        update={"trainer": config("console").trainer.model_copy(update={"logger": "carrier-pigeon"})}
    )
    with pytest.raises(ConfigurationError, match=r"'carrier-pigeon'.*wandb, tensorboard, console"):
        check_trackers(odd)


def test_a_tracker_named_twice_is_refused() -> None:
    twice = config("console").model_copy(
        update={"trainer": config("console").trainer.model_copy(update={"logger": ("console", "console")})}
    )
    with pytest.raises(ConfigurationError, match="named twice"):
        check_trackers(twice)


def test_several_backends_are_fed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = build_tracker(config(["console", "tensorboard"]), run_name="r", run_dir=tmp_path)
    tracker.log({"loss": 0.5}, 1)
    tracker.finish(True)
    assert "step 1  loss=0.5" in capsys.readouterr().out
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"trainer\.logger=tensorboard cannot write to .*occupied"):
        build_tracker(config("tensorboard"), run_name="r", run_dir=tmp_path / "occupied")


def test_backends_started_before_one_that_cannot_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ends: list[bool] = []

    class First:
        name = "console"
        logged_through = -1

        def finish(self, ok: bool) -> None:
            ends.append(ok)

    def refuse(_run: object) -> None:
        raise ConfigurationError("no login")

    monkeypatch.setitem(build._BUILDERS, "console", lambda _run: First())
    monkeypatch.setitem(build._BUILDERS, "tensorboard", refuse)
    with pytest.raises(ConfigurationError, match="no login"):
        build_tracker(config(["console", "tensorboard"]), run_name="r", run_dir=tmp_path)
    assert ends == [False]
