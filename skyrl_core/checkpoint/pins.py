"""Pins: checkpoints that retention must leave alone while somebody works with them.

Under the run's folder:

    pins/global_step_12/<token>.json        who needs the checkpoint, since when
"""

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from skyrl_core.checkpoint.discovery import checkpoint_folder
from skyrl_core.data.digests import canonical_json, parse_json
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import StoreError

logger = logging.getLogger(__name__)

FOLDER = "pins"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


@contextmanager
def pinned(run_root: str | Path, step: int, by: str) -> Iterator[None]:
    """Keep a checkpoint while the block runs. A killed holder leaves its pin; `remove_stale_pins` takes it away.

    Whoever pins checks afterwards that the checkpoint is there: retention may have looked just before.
    """
    storage = open_storage(run_root)
    path = f"{FOLDER}/{checkpoint_folder(step)}/{secrets.token_hex(8)}.json"
    content = {"by": by, "created_at": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        storage.publish(path, canonical_json(content) + b"\n")
    except OSError as error:
        raise StoreError(f"step {step} of {storage.uri} cannot be pinned: {error}") from error
    try:
        yield
    finally:
        try:
            storage.remove(path)
        except OSError as error:
            logger.warning("the pin %s was not removed (%s); a later clean-up does it", storage.uri_of(path), error)


def pinned_steps(run_root: str | Path | Storage) -> set[int]:
    """The steps that somebody works with."""
    return {step for step, _ in _pins(open_storage(run_root))}


def remove_stale_pins(run_root: str | Path | Storage, older_than: timedelta) -> int:
    """Remove pins whose holders cannot live any more; returns how many."""
    storage, removed = open_storage(run_root), 0
    limit = datetime.now(UTC) - older_than
    try:
        for _, path in list(_pins(storage)):
            if _created_at(storage, path) < limit:
                storage.remove(path)
                removed += 1
    except OSError as error:
        raise StoreError(f"the pins of {storage.uri} cannot be cleaned: {error}") from error
    return removed


def _pins(storage: Storage) -> Iterator[tuple[int, str]]:
    try:
        for name in storage.names(FOLDER):
            if match := _STEP_FOLDER.fullmatch(name):
                for pin in storage.names(f"{FOLDER}/{name}"):
                    if pin.endswith(".json"):
                        yield int(match[1]), f"{FOLDER}/{name}/{pin}"
    except OSError as error:
        raise StoreError(f"the pins of {storage.uri} cannot be read: {error}") from error


def _created_at(storage: Storage, path: str) -> datetime:
    """When a pin was set; now for one that vanished or cannot be read, so that it stays."""
    try:
        return datetime.fromisoformat(str(parse_json(storage.read(path))["created_at"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return datetime.now(UTC)
