"""The nightly run: continue the night that was cut, or begin a new one from what is in production."""

import logging
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from flows.flow_runs import name_flow_run
from flows.parameters import ConfigFile, Overrides
from flows.preflight import make_missing_data
from flows.settings import load_settings, run_configuration
from flows.train import train
from skyrl_core.checkpoint.aliases import read_alias
from skyrl_core.checkpoint.catalog import CONFIG_DOCUMENT, RUN_DOCUMENT, list_runs, read_state
from skyrl_core.checkpoint.export import export_model
from skyrl_core.config import SkyRLConfig
from skyrl_core.config.load import config_from_yaml
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import ConfigurationError

logger = logging.getLogger(__name__)


@flow(name="nightly")
def nightly(
    config: ConfigFile = None,
    overrides: Overrides = (),
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "nightly",
    start_from: str | None = "production",
    max_starts: Annotated[int, Field(ge=1)] = 3,
    timezone: str = "UTC",
) -> dict[str, Any]:
    """Train for a night. A night that was cut goes on under its name with the configuration it began with.

    Args:
        config: YAML file with keys, by its path on the machine that runs the flow. Empty: the defaults.
        overrides: Words `key=value` that win over the file. `skyrl-flows config --help-keys` lists the keys.
        prefix: Nights are called `<prefix>-<date>-<time>`.
        start_from: Alias whose checkpoint a new night begins with. Empty: always the configured model.
        max_starts: A night that was started so often and is not finished is given up.
        timezone: Time zone of the dates in names.
    """
    log = get_run_logger()
    settings = load_settings(config, overrides)
    if settings.trainer.run_name is not None:
        raise ConfigurationError("trainer.run_name is chosen for each night: leave it out and set `prefix`")
    root = settings.trainer.ckpt_path
    with tempfile.TemporaryDirectory() as folder:
        cut = unfinished_night(root, prefix, max_starts)
        if cut is not None:
            log.info("night %s is not finished: it goes on", cut)
            name_flow_run(f"{cut} continued")
            file = run_configuration(open_storage(root).uri_of(cut), Path(folder))
            try:
                return train(config=file, overrides=(f"trainer.run_name={cut}",))
            except ConfigurationError as error:
                log.warning("night %s cannot go on and is given up: %s", cut, error)
        name = f"{prefix}-{_scheduled(timezone):%Y%m%d-%H%M%S}"
        name_flow_run(name)
        words = (*overrides, f"trainer.run_name={name}")
        start = _start_model(settings, start_from)
        if start is not None:
            words += (f"trainer.policy.model.path={start}",)
        log.info("night %s begins with %s", name, start or settings.trainer.policy.model.path)
        return train(config=config, overrides=words)


def unfinished_night(root: str, prefix: str, max_starts: int) -> str | None:
    """The newest night when it is not finished and was not started too often already."""
    nights = [name for name in list_runs(root) if name.startswith(f"{prefix}-")]
    if not nights:
        return None
    stores = {name: RunStore.open(open_storage(root).uri_of(name)) for name in nights}
    newest = max(nights, key=lambda name: (_created(stores[name]), name))
    state = read_state(stores[newest])
    if state.finished:
        return None
    if state.starts >= max_starts:
        logger.warning("night %s was started %d times and is not finished: it is given up", newest, state.starts)
        return None
    return newest


def _created(store: RunStore) -> str:
    document = store.read_json(RUN_DOCUMENT) or {}
    return str(document.get("created_at", ""))


def _scheduled(timezone: str) -> datetime:
    """When this night was due; the same for a run that waited in the queue."""
    due = flow_run.scheduled_start_time
    moment = datetime.fromisoformat(str(due)) if due is not None else datetime.now().astimezone()
    try:
        return moment.astimezone(ZoneInfo(timezone))
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"timezone={timezone}: there is no such time zone") from error


def _start_model(settings: SkyRLConfig, alias: str | None) -> str | None:
    """The alias's checkpoint as a model folder; None when the configured model is to be used."""
    root = settings.trainer.ckpt_path
    target = read_alias(root, alias) if alias else None
    if target is None:
        return None
    storage = open_storage(root)
    text = RunStore.open(storage.uri_of(target.run)).read_text(CONFIG_DOCUMENT)
    if text is None:
        raise ConfigurationError(f"{storage.uri_of(target.run)} has no {CONFIG_DOCUMENT}; alias {alias} points there")
    trained_with = config_from_yaml(text).trainer
    make_missing_data(settings)
    folder = Path(settings.trainer.export_path).expanduser() / target.run / f"global_step_{target.step}" / "policy"
    made = export_model(
        storage.uri_of(target.checkpoint),
        str(trained_with.policy.model.path),
        folder,
        trust_remote_code=settings.trainer.trust_remote_code,
    )
    return str(made)
