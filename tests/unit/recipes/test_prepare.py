"""`data.recipe` and `skyrl-flows prepare`: what is missing is made, what is there is left alone."""

from pathlib import Path
from typing import Any

import pytest

import flows.commands.prepare
from flows.cli import main
from skyrl_core.config import SkyRLConfig, load_config
from skyrl_core.recipes import ensure
from skyrl_core.recipes.arithmetic import ArithmeticSettings
from skyrl_core.recipes.arithmetic_model import WarmUp
from skyrl_core.recipes.ensure import prepare_recipe, recipe_missing

SHIPPED = Path(__file__).parents[3] / "deployments" / "configs" / "arithmetic.yaml"
SMALL = ArithmeticSettings(train_size=8, test_size=4, warm_up=WarmUp(steps=1, batch_size=2, rise_steps=1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own, and a recipe that takes no time."""

    def small(folder: Any, **options: Any) -> bool:
        return flows.commands.prepare.ensure_arithmetic(folder, settings=SMALL, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ensure, "ensure_arithmetic", small)
    monkeypatch.setattr(flows.commands.prepare, "ArithmeticSettings", lambda: SMALL)
    return tmp_path


def config(*words: str) -> SkyRLConfig:
    return load_config(SHIPPED, list(words))


def test_the_shipped_configuration_finds_what_its_recipe_makes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe_missing(config()) is True
    prepare_recipe(config())
    assert "Data: making the arithmetic problems and a small model in data/arithmetic" in capsys.readouterr().out
    assert recipe_missing(config()) is False
    names = {path.name for path in (here / "data" / "arithmetic").iterdir()}
    assert names == {"train.parquet", "test.parquet", "model", "recipe.json"}


def test_show_off_prints_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_recipe(config("flow.show=off"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert (here / "data" / "arithmetic" / "recipe.json").is_file()


def test_without_a_recipe_nothing_is_made(here: Path) -> None:
    plain = config("data.recipe=null")
    assert recipe_missing(plain) is False
    prepare_recipe(plain)
    assert list(here.iterdir()) == []


def test_paths_that_the_recipe_does_not_make_are_left_to_the_checks(here: Path) -> None:
    prepare_recipe(config())
    assert recipe_missing(config("trainer.policy.model.path=/no/such/model")) is False
    assert recipe_missing(config("data.val_data=[/no/such/test.parquet]")) is False
    elsewhere = "data.train_data=[elsewhere/train.parquet]"
    assert recipe_missing(config(elsewhere)) is True


def test_a_lost_model_is_missing_and_said_to_be(here: Path) -> None:
    from skyrl_core.errors import ConfigurationError

    prepare_recipe(config())
    (here / "data/arithmetic/model").rename(here / "moved")
    assert recipe_missing(config()) is True
    with pytest.raises(ConfigurationError, match="is missing or was changed: make the folder again with --force"):
        prepare_recipe(config())


def test_prepare_makes_the_folder_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "arithmetic"]) == 0
    assert "data/arithmetic: 8 problems to train on, 4 held out, and a small model" in capsys.readouterr().out
    assert recipe_missing(config()) is False
    made = (here / "data/arithmetic/recipe.json").stat().st_mtime_ns
    assert main(["prepare", "arithmetic"]) == 0
    assert "data/arithmetic is there and complete; nothing to do" in capsys.readouterr().out
    assert (here / "data/arithmetic/recipe.json").stat().st_mtime_ns == made
    assert main(["prepare", "arithmetic", "--force"]) == 0
    assert (here / "data/arithmetic/recipe.json").stat().st_mtime_ns != made
    assert main(["prepare", "arithmetic", "--output", "other"]) == 0
    assert (here / "other/model/config.json").is_file()


def test_prepare_never_replaces_a_folder_of_other_things(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("years of work")
    assert main(["prepare", "arithmetic", "--output", "mine", "--force"]) == 2
    assert "mine exists and was not made by a recipe: choose another --output" in capsys.readouterr().err
    assert (here / "mine" / "thesis.txt").is_file()
