"""What `data.recipe` asks for: data and model made on the spot when the paths of the configuration are missing."""

import os
from pathlib import Path

from skyrl_core.config import SkyRLConfig
from skyrl_core.recipes.arithmetic import MODEL_FOLDER, TEST_FILE, TRAIN_FILE, ensure_arithmetic
from skyrl_core.recipes.progress import progress_bar


def recipe_missing(config: SkyRLConfig) -> bool:
    """True when the configuration names a recipe and a path that it makes and that is not there. Imports nothing heavy.

    The recipe's folder is the one of the first training file. A missing path elsewhere is not the recipe's to make: the
    usual checks name it.
    """
    if config.data.recipe is None or not config.data.train_data:
        return False
    folder = _folder(config)
    products = {folder / name for name in (TRAIN_FILE, TEST_FILE, MODEL_FOLDER)}
    model = config.trainer.policy.model.path
    named = {_absolute(path) for path in (*config.data.train_data, *config.data.val_data, *([model] if model else []))}
    return any(not path.exists() for path in named & products)


def prepare_recipe(config: SkyRLConfig) -> None:
    """Make the recipe's folder, saying so. Does nothing where it is complete.

    Raises ConfigurationError when the folder holds something else or lost files.
    """
    if config.data.recipe is None:
        return
    folder = _folder(config)
    visible = config.flow.show != "off"
    if visible:
        print(f"Data: making the {config.data.recipe} problems and a small model in {_shown(folder)}", flush=True)
    with progress_bar("warming up the model", visible=visible) as progress:
        ensure_arithmetic(folder, progress=progress)


def _folder(config: SkyRLConfig) -> Path:
    return _absolute(config.data.train_data[0]).parent


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _shown(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
