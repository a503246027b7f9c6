"""Folders that a recipe makes: whole or not there, with a manifest that says what made them."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_core.errors import ConfigurationError

log = logging.getLogger(__name__)

MANIFEST = "recipe.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder, None where there is no folder or an empty one.

    Raises ConfigurationError for a folder of other things, and for one whose files are missing or of another size than
    recorded.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file where a folder is to be made: choose another --output")
    if not any(folder.iterdir()):
        return None
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigurationError(f"{folder} exists and was not made by a recipe: choose another --output")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): int(entry["size"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error!r}): make the folder again with --force") from error
    for name, size in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise ConfigurationError(f"{file} is missing or was changed: make the folder again with --force")
    return dict(manifest)


def make_folder(
    folder: Path, build: Callable[[Path], Mapping[str, Any]], *, force: bool = False
) -> tuple[dict[str, Any], bool]:
    """The manifest of `folder`, and whether it was made now.

    `build(partial)` fills a folder beside it and returns what goes into the manifest; only then does the folder take
    its name, so an interrupted call leaves nothing half-made and what it left aside is removed by the next one. Calls
    at the same time wait for each other. A complete folder is left alone unless `force`, which replaces it by a new one
    (never a folder that no recipe made).
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(leftover)
        if force and (folder / MANIFEST).is_file():
            existing = None
        else:
            existing = read_manifest(folder)
        if existing is not None:
            return existing, False
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        try:
            manifest = {**build(partial), "files": _describe(partial)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            _finish(partial)
            _publish(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return manifest, True


def _publish(partial: Path, folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        os.rename(folder, old)
        os.rename(partial, folder)
        shutil.rmtree(old)
    else:
        os.rename(partial, folder)
    _sync_folder(folder.parent)


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system drops when the process ends, however it ends."""
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares something in %s: waiting for it", parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }


def _finish(folder: Path) -> None:
    """Everything on disk, and readable for others: temporary folders and some libraries' files are private."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            path.chmod(0o755)
            _sync_folder(path)
        else:
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
