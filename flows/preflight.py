"""Everything that can be known to be wrong before a server starts or a model loads."""

from pathlib import Path

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.tokenizer import check_model_path
from skyrl_core.errors import DatasetError
from skyrl_core.tracking.build import check_trackers

_FILE_ENDINGS = (".parquet", ".json", ".jsonl")


def check_before_start(config: SkyRLConfig, *, training: bool = True, files: bool = True) -> None:
    """Raise the first thing that would fail later: unavailable features, trackers, data files, model folders.

    `files` is False while a recipe has yet to make them.

    Raises:
        ConfigurationError: a feature, tracker or model that cannot work.
        DatasetError: a data file that is not there.
    """
    config.check_runnable()
    check_trackers(config)
    if not files:
        return
    if training:
        check_data_files("data.train_data", config.data.train_data)
    if config.trainer.eval_interval > 0 or not training:
        check_data_files("data.val_data", config.data.val_data)
    check_model_path(str(config.trainer.policy.model.path))
    if training and config.trainer.algorithm.use_kl_loss:
        check_model_path(str(config.trainer.ref.model.path))


def check_data_files(key: str, sources: tuple[str, ...]) -> None:
    """Every source that is written as a file must exist; Hugging Face names are left to their library."""
    for source in sources:
        path = Path(source).expanduser()
        if path.suffix in _FILE_ENDINGS and "://" not in source and not path.is_file():
            raise DatasetError(f"{key}: {source} does not exist (looked for {path.absolute()})")
