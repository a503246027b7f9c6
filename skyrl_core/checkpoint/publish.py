"""Write a checkpoint so that a kill at any byte leaves the previous one whole and newest, or the new one complete."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_core.checkpoint.code_version import code_version
from skyrl_core.checkpoint.discovery import (
    POINTER,
    aside_folder,
    checkpoint_folder,
    complete_at_step,
    read_pointer,
)
from skyrl_core.checkpoint.manifest import MANIFEST, CheckpointManifest, encode_manifest
from skyrl_core.data.digests import sha256_of_stream
from skyrl_core.data.lease import verify_fence
from skyrl_core.data.references import CheckpointRef, FileEntry
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import CheckpointError


class CheckpointWriter:
    """One save. Give `directory` to every process that writes a part, then `commit` in one; or `abort`.

    On file systems with rename the directory is aside, renamed into place once complete. On object stores the files
    are written in place and the manifest makes them a checkpoint; a former checkpoint of the same step is copied aside
    first. Either way the pointer is published last and the former checkpoint removed after it.

    As a context manager it aborts when the block raises.
    """

    def __init__(self, root: str | Path | Storage, step: int, *, fence: int | None = None) -> None:
        """`root` is the run's folder; `fence` the token of this run's lease (None: no other writer is possible).

        Raises CheckpointError when the folder cannot be made, LeaseLostError when a newer writer exists.
        """
        self._storage = open_storage(root)
        self._step = step
        self._fence = fence
        self._attempt = secrets.token_hex(6)
        self._place = checkpoint_folder(step)
        self._replaced = aside_folder(step, self._attempt, "replaced")
        self._partial = aside_folder(step, self._attempt, "partial") if self._storage.can_rename else self._place
        with self._errors("begun"):
            self._verify_writer()
            if not self._storage.can_rename:
                self._clear_place()
            self._storage.make_folder(self._partial)

    @property
    def directory(self) -> str:
        """Absolute address of the folder to write into, from any process that shares the storage."""
        return self._storage.uri_of(self._partial)

    def commit(
        self,
        *,
        policy_version: int,
        config_digest: str,
        dataset_fingerprint: str,
        data_position: Mapping[str, Any],
        world_size: int,
        run_name: str,
        metrics: Mapping[str, float] | None = None,
        algorithm_state: Mapping[str, float] | None = None,
    ) -> CheckpointRef:
        """Make everything in `directory` the checkpoint of the step, and the newest one of the run.

        A complete checkpoint of the step with the same files stands; another one is replaced, without a moment in which
        the step has none. Raises CheckpointError when nothing was written or the storage fails, LeaseLostError when a
        newer writer exists: then nothing was published.
        """
        with self._errors("committed"):
            files = self._entries()
            manifest = CheckpointManifest(
                step=self._step,
                policy_version=policy_version,
                files=files,
                config_digest=config_digest,
                dataset_fingerprint=dataset_fingerprint,
                data_position=dict(data_position),
                world_size=world_size,
                code_version=code_version(),
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                run_name=run_name,
                metrics=dict(metrics or {}),
                algorithm_state=dict(algorithm_state or {}),
            )
            published = self._publish(manifest)
            self._publish_pointer()
            self._storage.remove_tree(self._replaced)
        return CheckpointRef(
            uri=self._storage.uri_of(self._place), step=self._step, policy_version=published.policy_version
        )

    def abort(self) -> None:
        """Remove what was written. Raises CheckpointError when the storage fails; the next start cleans up then."""
        with self._errors("aborted"):
            self._storage.remove_tree(self._partial)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {self._step} in {self._storage.uri} cannot be {what}: {error}"
            ) from error

    def _verify_writer(self) -> None:
        if self._fence is not None:
            verify_fence(self._storage, self._fence)

    def _entries(self) -> tuple[FileEntry, ...]:
        names = [name for name in self._storage.files(self._partial) if name != MANIFEST]
        if not names:
            raise CheckpointError(f"no process wrote anything into {self.directory}: there is nothing to commit")
        return tuple(self._entry(name) for name in names)

    def _entry(self, name: str) -> FileEntry:
        with self._storage.open(f"{self._partial}/{name}") as stream:
            size, sha256 = sha256_of_stream(stream)
        return FileEntry(path=name, size=size, sha256=sha256)

    def _publish(self, manifest: CheckpointManifest) -> CheckpointManifest:
        if not self._storage.can_rename:
            self._verify_writer()
            self._storage.publish(f"{self._place}/{MANIFEST}", encode_manifest(manifest))
            return manifest
        self._storage.sync_tree(self._partial)
        self._storage.publish(f"{self._partial}/{MANIFEST}", encode_manifest(manifest))
        existing = complete_at_step(self._storage, self._step, verify="full") if self._occupied() else None
        self._verify_writer()
        if existing is not None and existing[0] == self._place and same_files(existing[1], manifest):
            self._storage.remove_tree(self._partial)
            return existing[1]
        broken = aside_folder(self._step, self._attempt, "deleting")
        if self._occupied():
            whole = existing is not None and existing[0] == self._place
            self._storage.move_folder(self._place, self._replaced if whole else broken)
        self._storage.move_folder(self._partial, self._place)
        self._storage.remove_tree(broken)
        return manifest

    def _occupied(self) -> bool:
        return self._place in self._storage.names("")

    def _publish_pointer(self) -> None:
        if read_pointer(self._storage) != self._step:
            self._verify_writer()
            self._storage.publish(POINTER, str(self._step).encode("ascii"))

    def _clear_place(self) -> None:
        """Object stores: empty the step's folder, after a complete former checkpoint in it was copied aside."""
        existing = complete_at_step(self._storage, self._step, verify="size")
        if existing is not None and existing[0] == self._place:
            copy_checkpoint(self._storage, self._place, self._replaced)
        remove_checkpoint(self._storage, self._place)


def same_files(left: CheckpointManifest, right: CheckpointManifest) -> bool:
    """True when both restore the same state, byte for byte."""
    return left.content_digest == right.content_digest


def copy_checkpoint(storage: Storage, source: str, target: str) -> None:
    """Copy a checkpoint, its manifest last, so that the copy is complete or none."""
    names = [name for name in storage.files(source) if name != MANIFEST]
    for name in [*names, MANIFEST]:
        storage.copy_file(f"{source}/{name}", f"{target}/{name}")


def remove_checkpoint(storage: Storage, folder: str) -> None:
    """Remove a checkpoint, its manifest first, so that a half-removed one is never taken for complete."""
    storage.remove(f"{folder}/{MANIFEST}")
    storage.remove_tree(folder)
