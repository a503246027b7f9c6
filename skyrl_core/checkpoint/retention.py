"""Delete old checkpoints, and what killed saves left behind."""

import logging
import posixpath
import secrets
from collections.abc import Collection
from pathlib import Path

from skyrl_core.checkpoint.discovery import (
    aside_folder,
    aside_folders,
    checkpoint_folder,
    complete_at_step,
    list_checkpoints,
    read_pointer,
)
from skyrl_core.checkpoint.publish import copy_checkpoint, remove_checkpoint
from skyrl_core.data.lease import verify_fence
from skyrl_core.data.references import CheckpointRef
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import CheckpointError

logger = logging.getLogger(__name__)


def apply_retention(
    root: str | Path | Storage, keep: int, pinned: Collection[int] = (), *, fence: int | None = None
) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints; -1 keeps all. Returns the deleted steps.

    The checkpoint that the pointer names and the `pinned` steps stay, beyond the number. A checkpoint is renamed aside
    before it is deleted (object stores: loses its manifest first), so a half-deleted one never looks complete.
    Incomplete folders are not touched. Raises ValueError for another negative or zero number, CheckpointError when the
    storage fails, LeaseLostError when a newer writer exists.
    """
    if keep == -1:
        return []
    storage = open_storage(root)
    doomed = superfluous(storage, keep, pinned)
    try:
        if fence is not None:
            verify_fence(storage, fence)
        for checkpoint in doomed:
            _delete(storage, checkpoint)
    except OSError as error:
        raise CheckpointError(f"old checkpoints in {storage.uri} cannot be deleted: {error}") from error
    return [checkpoint.step for checkpoint in doomed]


def superfluous(root: str | Path | Storage, keep: int, pinned: Collection[int] = ()) -> list[CheckpointRef]:
    """The checkpoints that `apply_retention` would delete."""
    if keep == -1:
        return []
    if keep < 1:
        raise ValueError(f"keep must be at least 1, or -1 for all, got {keep}")
    storage = open_storage(root)
    complete = list_checkpoints(storage)
    protected = {*(checkpoint.step for checkpoint in complete[-keep:]), *pinned, read_pointer(storage)}
    return [checkpoint for checkpoint in complete if checkpoint.step not in protected]


def clean_leftovers(root: str | Path | Storage, *, fence: int | None = None) -> None:
    """Called by a run's writer before it starts: undo or finish what killed saves and deletions left half done.

    A former checkpoint that was being replaced comes back when its successor was not completed. Raises CheckpointError
    when the storage fails, LeaseLostError when a newer writer exists.
    """
    storage = open_storage(root)
    try:
        if fence is not None:
            verify_fence(storage, fence)
        for name, step, state in list(aside_folders(storage)):
            if state == "replaced":
                _restore_replaced(storage, name, step)
            else:
                storage.remove_tree(name)
    except OSError as error:
        raise CheckpointError(f"leftovers of earlier saves in {storage.uri} cannot be removed: {error}") from error


def _delete(storage: Storage, checkpoint: CheckpointRef) -> None:
    folder = posixpath.basename(checkpoint.uri)
    if not storage.can_rename:
        remove_checkpoint(storage, folder)
        return
    aside = aside_folder(checkpoint.step, secrets.token_hex(6), "deleting")
    storage.move_folder(folder, aside)
    storage.remove_tree(aside)


def _restore_replaced(storage: Storage, replaced: str, step: int) -> None:
    folder = checkpoint_folder(step)
    complete = complete_at_step(storage, step, verify="size")
    if complete is None or complete[0] != replaced:
        remove_checkpoint(storage, replaced)
        return
    logger.warning("%s was being replaced when its writer was killed: it is put back", storage.uri_of(folder))
    if not storage.can_rename:
        remove_checkpoint(storage, folder)
        copy_checkpoint(storage, replaced, folder)
        remove_checkpoint(storage, replaced)
        return
    if folder in storage.names(""):
        broken = aside_folder(step, secrets.token_hex(6), "deleting")
        storage.move_folder(folder, broken)
        storage.move_folder(replaced, folder)
        storage.remove_tree(broken)
    else:
        storage.move_folder(replaced, folder)
