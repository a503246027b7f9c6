"""Find checkpoints and judge whether they are complete, without ever believing a half-written one.

Under the run's folder:

    latest_ckpt_global_step.txt                 the pointer: the step of the newest checkpoint, published last
    global_step_N/                              a checkpoint; complete when its manifest and all its files are there
    .global_step_N.<attempt>.partial            being written (never looked at)
    .global_step_N.<attempt>.replaced           the former checkpoint of a step that is being written again
    .global_step_N.<attempt>.deleting           being removed (never looked at)
"""

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from skyrl_core.checkpoint.manifest import MANIFEST, CheckpointManifest, decode_manifest
from skyrl_core.data.digests import sha256_of_stream
from skyrl_core.data.references import CheckpointRef, FileEntry
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import CheckpointError, CorruptCheckpointError

logger = logging.getLogger(__name__)

POINTER = "latest_ckpt_global_step.txt"
Verify = Literal["size", "full"]
_FOLDER = re.compile(r"global_step_(\d+)")
_ASIDE = re.compile(r"\.global_step_(\d+)\.[0-9a-f]+\.(partial|replaced|deleting)")


def checkpoint_folder(step: int) -> str:
    """SkyRL's name of a step's checkpoint."""
    return f"global_step_{step}"


def aside_folder(step: int, attempt: str, state: Literal["partial", "replaced", "deleting"]) -> str:
    """Name of a folder that is not, or no longer, the step's checkpoint."""
    return f".global_step_{step}.{attempt}.{state}"


def aside_folders(storage: Storage) -> Iterator[tuple[str, int, str]]:
    """(name, step, state) of every folder that a save, replacement or deletion has set aside."""
    for name in storage.names(""):
        if match := _ASIDE.fullmatch(name):
            yield name, int(match[1]), match[2]


def latest_checkpoint(root: str | Path | Storage, *, verify: Verify = "size") -> CheckpointRef | None:
    """The checkpoint that the pointer names when it is complete, else the newest complete one; None without any.

    A checkpoint is complete when its manifest is whole and every file has its size (and, with `verify="full"`, its
    checksum). Incomplete ones are skipped with a warning that names the file. Raises CheckpointError when the folder
    cannot be read, or a newer version of this program wrote the checkpoint.
    """
    storage = open_storage(root)
    pointed = read_pointer(storage)
    steps = sorted(_folders_by_step(storage), reverse=True)
    if pointed is not None and pointed not in steps:
        logger.warning("%s names step %d, but there is no such checkpoint", storage.uri_of(POINTER), pointed)
    for step in sorted(steps, key=lambda step: step != pointed):
        found = complete_at_step(storage, step, verify=verify)
        if found is not None:
            if pointed is not None and step != pointed:
                logger.warning("falling back to %s: the newest complete checkpoint", storage.uri_of(found[0]))
            return _ref(storage, *found)
    return None


def list_checkpoints(root: str | Path | Storage, *, verify: Verify = "size") -> list[CheckpointRef]:
    """Every complete checkpoint by ascending step. Incomplete ones are left out with a warning naming the file."""
    storage = open_storage(root)
    found = (complete_at_step(storage, step, verify=verify) for step in sorted(_folders_by_step(storage)))
    return [_ref(storage, *item) for item in found if item is not None]


def checkpoint_at(path: str | Path, *, verify: Verify = "full") -> tuple[CheckpointRef, CheckpointManifest]:
    """The checkpoint in exactly this folder.

    Raises CheckpointError when there is none, CorruptCheckpointError naming a file that is missing, short, or altered.
    """
    storage = open_storage(path)
    manifest = check_complete(storage, "", verify=verify)
    return _ref(storage, "", manifest), manifest


def read_manifest(checkpoint: CheckpointRef) -> CheckpointManifest:
    """The manifest of a checkpoint that was found before. Raises as `checkpoint_at` does; files are not checked."""
    return _load_manifest(open_storage(checkpoint.uri), "")


def read_pointer(storage: Storage) -> int | None:
    """The step that the pointer names; None when there is no pointer, or with a warning when it is unreadable."""
    try:
        text = storage.read(POINTER).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{storage.uri_of(POINTER)} cannot be read: {error}") from error
    if not re.fullmatch(r"[0-9]+", text):
        logger.warning("%s holds %r instead of a step; it is ignored", storage.uri_of(POINTER), text[:40])
        return None
    return int(text)


def complete_at_step(storage: Storage, step: int, *, verify: Verify) -> tuple[str, CheckpointManifest] | None:
    """(folder, manifest) of a step's complete checkpoint: its own folder first, else one being replaced."""
    for folder in _folders_by_step(storage).get(step, []):
        try:
            if _lacks_manifest(storage, folder):
                continue
            manifest = check_complete(storage, folder, verify=verify)
        except CorruptCheckpointError as error:
            logger.warning("checkpoint of step %d is incomplete and not used: %s", step, error)
            continue
        if manifest.step != step:
            logger.warning("%s says step %d inside and is not used", storage.uri_of(folder), manifest.step)
            continue
        return folder, manifest
    return None


def check_complete(storage: Storage, folder: str, *, verify: Verify) -> CheckpointManifest:
    """The manifest of a folder all of whose files are there. Raises CorruptCheckpointError naming the file if not."""
    manifest = _load_manifest(storage, folder)
    try:
        for entry in manifest.files:
            _check_file(storage, posixpath.join(folder, entry.path), entry, verify)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {storage.uri_of(folder)} cannot be read: {error}") from error
    return manifest


def _lacks_manifest(storage: Storage, folder: str) -> bool:
    """True, with a warning, for a folder that is no checkpoint at all; quietly for an object store's empty one."""
    path = posixpath.join(folder, MANIFEST)
    try:
        missing = storage.size(path) is None
        # Some object stores go on listing a folder after the last object in it was deleted.
        remains = missing and (storage.can_rename or bool(storage.files(folder)))
    except OSError as error:
        raise CheckpointError(f"{storage.uri_of(path)} cannot be read: {error}") from error
    if remains:
        logger.warning("the save of %s was cut off: %s is missing; it is not used", folder, storage.uri_of(path))
    return missing


def _check_file(storage: Storage, path: str, entry: FileEntry, verify: Verify) -> None:
    size, uri = storage.size(path), storage.uri_of(path)
    if size is None:
        raise CorruptCheckpointError(f"{uri} is missing")
    if size != entry.size:
        raise CorruptCheckpointError(f"{uri} has {size} bytes instead of {entry.size}")
    if verify == "full":
        with storage.open(path) as stream:
            found = sha256_of_stream(stream)
        if found != (entry.size, entry.sha256):
            raise CorruptCheckpointError(f"{uri} was altered: its checksum is not the one it was saved with")


def _load_manifest(storage: Storage, folder: str) -> CheckpointManifest:
    path = posixpath.join(folder, MANIFEST)
    try:
        data = storage.read(path)
    except FileNotFoundError:
        raise _no_manifest(storage, folder) from None
    except OSError as error:
        raise CheckpointError(f"{storage.uri_of(path)} cannot be read: {error}") from error
    return decode_manifest(data, storage.uri_of(path))


def _no_manifest(storage: Storage, folder: str) -> CheckpointError:
    uri, names = storage.uri_of(folder), storage.names(folder)
    if not names:
        return CheckpointError(f"there is no checkpoint at {uri}: no such folder, or it is empty")
    inside = [name for name in names if _FOLDER.fullmatch(name)]
    if inside:
        return CheckpointError(f"{uri} is a run's folder, no checkpoint; name one of its own: {', '.join(inside)}")
    return CorruptCheckpointError(
        f"{storage.uri_of(posixpath.join(folder, MANIFEST))} is missing: the save was cut off, or another program "
        "wrote this folder"
    )


def _folders_by_step(storage: Storage) -> dict[int, list[str]]:
    """The folders that may hold a step's checkpoint, the step's own one first."""
    own: dict[int, list[str]] = {}
    replaced: dict[int, list[str]] = {}
    try:
        names = storage.names("")
    except OSError as error:
        raise CheckpointError(f"{storage.uri} cannot be listed: {error}") from error
    for name in names:
        if match := _FOLDER.fullmatch(name):
            own.setdefault(int(match[1]), []).append(name)
        elif (match := _ASIDE.fullmatch(name)) and match[2] == "replaced":
            replaced.setdefault(int(match[1]), []).append(name)
    return {step: own.get(step, []) + replaced.get(step, []) for step in {*own, *replaced}}


def _ref(storage: Storage, folder: str, manifest: CheckpointManifest) -> CheckpointRef:
    return CheckpointRef(uri=storage.uri_of(folder), step=manifest.step, policy_version=manifest.policy_version)
