"""The configuration as flows load it: with access to the store that it names."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_core.checkpoint.catalog import CONFIG_DOCUMENT
from skyrl_core.config import SkyRLConfig, load_config
from skyrl_core.data.run_store import RunStore
from skyrl_core.errors import ConfigurationError
from skyrl_core.runtime.store_access import STORE_PREFIXES


def load_settings(config: str | None, overrides: Sequence[str]) -> SkyRLConfig:
    """Load the configuration and, where `flow.store_block` names a block, take the store's variables from it.

    Raises ConfigurationError for a configuration or a block that cannot be used.
    """
    settings = load_config(config, list(overrides))
    if settings.flow.store_block is not None:
        os.environ.update(store_variables(settings.flow.store_block))
    return settings


def run_configuration(run_root: str, folder: Path) -> str | None:
    """The configuration that a run recorded, as a file in `folder`; None when there is no such run."""
    text = RunStore.open(run_root).read_text(CONFIG_DOCUMENT)
    if text is None:
        return None
    file = folder / CONFIG_DOCUMENT
    file.write_text(text, encoding="utf-8")
    return str(file)


def store_variables(block: str) -> dict[str, str]:
    """The variables in a Prefect `Secret` block: a JSON object such as {"AWS_ACCESS_KEY_ID": …}.

    Raises ConfigurationError that names the block and never shows a value.
    """
    from prefect.blocks.system import Secret
    from prefect.utilities.asyncutils import run_coro_as_sync

    try:
        loaded: Any = run_coro_as_sync(Secret.aload(block))
        value = loaded.get()
    except Exception as error:  # no server, no such block, another type of block
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"flow.store_block={block}: the Secret block cannot be loaded ({reason}); create it on the Prefect server, "
            "or unset the key and give AWS_* variables"
        ) from None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigurationError(
            f"flow.store_block={block}: the block must hold a JSON object of texts, as "
            '{"AWS_ENDPOINT_URL": "…", "AWS_ACCESS_KEY_ID": "…", "AWS_SECRET_ACCESS_KEY": "…"}'
        )
    foreign = sorted(name for name in value if not name.startswith(STORE_PREFIXES))
    if foreign:
        raise ConfigurationError(
            f"flow.store_block={block}: {', '.join(foreign)} is not for the store; only names beginning with "
            f"{' or '.join(STORE_PREFIXES)} are taken"
        )
    return value
