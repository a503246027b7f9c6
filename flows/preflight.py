"""Everything that can be known to be wrong before a server starts or a model loads."""

from pathlib import Path

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.algorithm_checks import check_algorithm
from skyrl_core.data.tokenizer import check_model_path
from skyrl_core.errors import DatasetError
from skyrl_core.recipes.ensure import prepare_recipe, recipe_missing
from skyrl_core.tracking.build import check_trackers
from skyrl_core.user_code import load_callable

_FILE_ENDINGS = (".parquet", ".json", ".jsonl")


def check_before_start(config: SkyRLConfig, *, training: bool = True, files: bool = True) -> None:
    """Raise the first thing that would fail later: unavailable features, the user's own code, trackers, data files,
    model folders.

    `files` is False while a recipe has yet to make them.

    Raises:
        ConfigurationError: a feature, tracker or model that cannot work.
        DatasetError: a data file that is not there.
    """
    config.check_runnable()
    check_own_code(config)
    check_trackers(config)
    if not files:
        return
    if training:
        check_data_files("data.train_data", config.data.train_data)
    if config.trainer.eval_interval > 0 or not training:
        check_data_files("data.val_data", config.data.val_data)
    check_model_path(str(config.trainer.policy.model.path))
    if training and config.uses_reference:
        check_model_path(str(config.trainer.ref.model.path))


def make_missing_data(config: SkyRLConfig) -> None:
    """Make what `data.recipe` makes and is not there, once everything else is known to be right."""
    if recipe_missing(config):
        check_before_start(config, files=False)
        prepare_recipe(config)


def check_own_code(config: SkyRLConfig) -> None:
    """Load every function of the user's own that the configuration names, and hold algorithms to their own rules.

    Raises ConfigurationError naming key and function when one cannot be loaded, or cannot work with the rest.
    """
    for key, name in config.own_code().items():
        load_callable(name, key)
    algorithm, facts = config.trainer.algorithm, config.algorithm_facts()
    estimator, policy_loss = algorithm.advantage_estimator, algorithm.policy_loss_type
    if ":" not in estimator + policy_loss:
        return
    # Imports torch, which the named algorithms do not need here.
    from skyrl_core.algorithms.registry import estimator_rules, loss_rules

    facts["estimator"], facts["policy_loss"] = estimator_rules(estimator), loss_rules(policy_loss)
    check_algorithm(algorithm, **facts)


def check_data_files(key: str, sources: tuple[str, ...]) -> None:
    """Every source that is written as a file must exist; Hugging Face names are left to their library."""
    for source in sources:
        path = Path(source).expanduser()
        if path.suffix in _FILE_ENDINGS and "://" not in source and not path.is_file():
            raise DatasetError(f"{key}: {source} does not exist (looked for {path.absolute()})")
