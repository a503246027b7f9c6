"""The run store: which stages of which steps are done, with their outputs, and the run's small documents.

Layout under the run's folder (a local folder or any fsspec URL):

    run.json, config.yaml, …                                documents
    lease/token_00000001.json                               who may write (see lease.py)
    stages/step_000012/<stage>/record.json                  the commit point of a stage
    stages/step_000012/<stage>/<attempt>/<file>             its files; attempts without a record are leftovers
"""

import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from skyrl_core.data.digests import canonical_json, digest_of, parse_json, sha256_of_bytes, to_plain
from skyrl_core.data.lease import FOLDER as LEASE_FOLDER
from skyrl_core.data.lease import verify_fence
from skyrl_core.data.references import FileEntry, StageRecord
from skyrl_core.data.storage import Storage, atomic_write_bytes, iterate_temporary, open_storage
from skyrl_core.errors import RunBusyError, StoreError

__all__ = ["RunStore", "atomic_write_bytes"]

logger = logging.getLogger(__name__)

STAGES = "stages"
RECORD = "record.json"
RECORD_FORMAT = 1
_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ATTEMPT = re.compile(r"attempt_(\d{6,})_[0-9a-f]+")


class RunStore:
    """One run's store. Opened without a fence it only reads; with one it writes while no newer writer exists.

    Picklable and cheap to rebuild: it holds an address and a number. Credentials of object stores come from the
    environment of the process that uses it.
    """

    def __init__(self, storage: Storage, fence: int | None) -> None:
        self._storage = storage
        self._fence = fence

    @classmethod
    def open(cls, uri: str | Path, *, fence: int | None = None) -> Self:
        """Open the run at `uri`. `fence` is the token of this process's lease; without it the store is read-only
        and its writing methods raise RunBusyError.

        A writer removes what killed writers before it left behind. Raises LeaseLostError when a newer writer exists,
        ConfigurationError for an unusable address, StoreError when it cannot be reached.
        """
        store = cls(open_storage(uri), fence)
        if fence is not None:
            with store._errors("opened"):
                store._verify_writer()
                store._storage.make_folder(STAGES)
                store._clean_leftovers()
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.uri, self._fence)

    @property
    def uri(self) -> str:
        """The absolute address of the run."""
        return self._storage.uri

    @property
    def fence(self) -> int | None:
        """The lease token this store writes with; None when it only reads."""
        return self._fence

    # stages

    def write_stage(
        self,
        stage: str,
        step: int,
        inputs_digest: str,
        *,
        files: Mapping[str, bytes | Path],
        summary: Mapping[str, Any],
        seconds: float,
    ) -> StageRecord:
        """Commit a stage's output: all of it, or, when killed at any byte, nothing.

        When the stage is committed for the same inputs already (a slow first attempt came through after all), that
        commit stands and is returned with `recorded=True`, so that whoever went on with it stays right. A commit of
        other inputs is replaced.

        Raises LeaseLostError when a newer writer exists, StoreError when the store cannot be written, TypeError when
        `summary` holds what JSON cannot.
        """
        fence = self._verify_writer()
        folder = _stage_folder(stage, step)
        attempt = f"attempt_{fence:06d}_{secrets.token_hex(6)}"
        plain_summary = to_plain(summary, where=f"summary of {stage} {step}")
        with self._errors(f"written by {stage} of step {step}"):
            entries = tuple(self._write_file(folder, attempt, name, files[name]) for name in sorted(files))
            record = StageRecord(
                stage=stage,
                step=step,
                inputs_digest=inputs_digest,
                digest=_content_digest(stage, step, inputs_digest, entries),
                files=entries,
                summary=plain_summary,
                seconds=float(seconds),
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                fence=fence,
            )
            self._verify_writer()
            committed = self._commit(record, folder)
            if committed is not record:
                self._storage.remove_tree(f"{folder}/{attempt}")
        return committed

    def read_stage(self, stage: str, step: int) -> StageRecord | None:
        """The committed record of a stage, marked as recorded; None when there is none.

        A record that cannot be parsed counts as none; a warning names its file. Raises StoreError when the store
        cannot be read.
        """
        path = f"{_stage_folder(stage, step)}/{RECORD}"
        with self._errors(f"read for {stage} of step {step}"):
            try:
                data = self._storage.read(path)
            except FileNotFoundError:
                return None
        try:
            return _decode_record(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s cannot be parsed (%s): the stage counts as not done", self._storage.uri_of(path), error)
            return None

    def find_stage(self, stage: str, step: int, inputs_digest: str) -> StageRecord | None:
        """The record of a stage that was done for exactly these inputs, with its files in place; else None.

        Why a record that exists is not used is logged.
        """
        record = self.read_stage(stage, step)
        if record is None:
            return None
        if record.inputs_digest != inputs_digest:
            logger.info(
                "%s of step %d is recorded for other inputs (%.12s, now %.12s): it is done again",
                stage,
                step,
                record.inputs_digest,
                inputs_digest,
            )
            return None
        with self._errors(f"read for {stage} of step {step}"):
            problem = self._missing_file(record)
        if problem is not None:
            logger.warning("%s of step %d is recorded, but %s: it is done again", stage, step, problem)
            return None
        return record

    def read_file(self, record: StageRecord, name: str) -> bytes:
        """One file of a record, verified. Raises StoreError naming the file when it is gone, short, or altered."""
        folder = _stage_folder(record.stage, record.step)
        entry = next((entry for entry in record.files if entry.path.rpartition("/")[2] == name), None)
        if entry is None:
            names = ", ".join(entry.path.rpartition("/")[2] for entry in record.files) or "none"
            raise StoreError(f"{record.stage} of step {record.step} has no file {name!r}; it has: {names}")
        uri = self._storage.uri_of(f"{folder}/{entry.path}")
        if record.pruned:
            raise StoreError(f"{uri} was dropped: it is older than the oldest checkpoint that is kept")
        with self._errors(f"read for {record.stage} of step {record.step}"):
            data = self._storage.read(f"{folder}/{entry.path}")
        if len(data) != entry.size or sha256_of_bytes(data) != entry.sha256:
            raise StoreError(
                f"{uri} was altered after it was committed: {len(data)} bytes instead of {entry.size}, or another "
                "checksum; restore the file, or remove the step's folder so that it is done again"
            )
        return data

    def records(self, stage: str) -> Iterator[StageRecord]:
        """Every committed record of a stage, by step."""
        for step in self._steps():
            record = self.read_stage(stage, step)
            if record is not None:
                yield record

    def steps_with(self, stage: str) -> list[int]:
        """The steps for which a stage is committed, ascending."""
        return [record.step for record in self.records(stage)]

    def drop_from(self, step: int) -> None:
        """Remove everything recorded for `step` and later ones, the latest first. Writer only."""
        self._verify_writer()
        with self._errors(f"cleared from step {step} on"):
            for later in reversed([known for known in self._steps() if known >= step]):
                for stage in self._stages(later):
                    # Without its record a stage was never done: killed from here on, nothing half is believed.
                    self._storage.remove(f"{_stage_folder(stage, later)}/{RECORD}")
                self._storage.remove_tree(_step_folder(later))

    def prune_before(self, step: int) -> None:
        """Drop the files of every step before `step`; records with their summaries stay, marked `pruned`. Writer only.

        `step` is the first step that may have to be replayed: the oldest kept checkpoint's step + 1.
        """
        self._verify_writer()
        with self._errors(f"pruned before step {step}"):
            for earlier in [known for known in self._steps() if known < step]:
                for stage in self._stages(earlier):
                    self._prune(stage, earlier)

    def _prune(self, stage: str, step: int) -> None:
        folder = _stage_folder(stage, step)
        attempts = [name for name in self._storage.names(folder) if _ATTEMPT.fullmatch(name)]
        record = self.read_stage(stage, step) if attempts else None
        if record is not None and record.files and not record.pruned:
            self._storage.publish(f"{folder}/{RECORD}", _encode_record(replace(record, pruned=True)))
        for attempt in attempts:
            self._storage.remove_tree(f"{folder}/{attempt}")

    # documents

    def write_json(self, name: str, value: Any) -> None:
        """Write or replace a document of the run, atomically. Writer only.

        Raises TypeError for what JSON cannot hold.
        """
        self._write_document(name, canonical_json(value, indent=2) + b"\n")

    def read_json(self, name: str) -> Any | None:
        """A document's content; None when there is none. Raises StoreError when it is no JSON."""
        data = self._read_document(name)
        if data is None:
            return None
        try:
            return parse_json(data)
        except ValueError as error:
            raise StoreError(f"{self._storage.uri_of(name)} is no valid JSON: {error}") from error

    def write_text(self, name: str, text: str) -> None:
        """Write or replace a text document of the run, atomically. Writer only."""
        self._write_document(name, text.encode("utf-8"))

    def read_text(self, name: str) -> str | None:
        """A text document; None when there is none."""
        data = self._read_document(name)
        return None if data is None else data.decode("utf-8")

    def _write_document(self, name: str, data: bytes) -> None:
        _check_name(name, "document")
        self._verify_writer()
        with self._errors(f"written ({name})"):
            self._storage.publish(name, data)

    def _read_document(self, name: str) -> bytes | None:
        _check_name(name, "document")
        with self._errors(f"read ({name})"):
            try:
                return self._storage.read(name)
            except FileNotFoundError:
                return None

    # inside

    def _verify_writer(self) -> int:
        if self._fence is None:
            raise RunBusyError(
                f"the run at {self.uri} is open for reading only: this process does not hold its lease; "
                "to write, open it with the lease's token as fence"
            )
        verify_fence(self._storage, self._fence)
        return self._fence

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the run store at {self.uri} cannot be {what}: {error}") from error

    def _write_file(self, folder: str, attempt: str, name: str, source: bytes | Path) -> FileEntry:
        _check_name(name, "file")
        self._storage.make_folder(f"{folder}/{attempt}")
        size, sha256 = self._storage.write(f"{folder}/{attempt}/{name}", source)
        return FileEntry(path=f"{attempt}/{name}", size=size, sha256=sha256)

    def _commit(self, record: StageRecord, folder: str) -> StageRecord:
        """Publish the record, or return the one that stands for the same inputs."""
        for attempt in {entry.path.partition("/")[0] for entry in record.files}:
            self._storage.sync_tree(f"{folder}/{attempt}")
        path, data = f"{folder}/{RECORD}", _encode_record(record)
        if self._storage.create(path, data):
            return record
        existing = self.read_stage(record.stage, record.step)
        same_inputs = existing is not None and existing.inputs_digest == record.inputs_digest
        if existing is not None and same_inputs and self._missing_file(existing) is None:
            return existing
        self._storage.publish(path, data)
        if existing is not None:
            for attempt in {entry.path.partition("/")[0] for entry in existing.files}:
                self._storage.remove_tree(f"{folder}/{attempt}")
        return record

    def _missing_file(self, record: StageRecord) -> str | None:
        """Why the files of a record cannot be used, judged by their sizes; None when they can."""
        if record.pruned:
            return "its files were dropped as older than the oldest kept checkpoint"
        for entry in record.files:
            path = f"{_stage_folder(record.stage, record.step)}/{entry.path}"
            size = self._storage.size(path)
            if size != entry.size:
                found = "missing" if size is None else f"{size} bytes instead of {entry.size}"
                return f"{self._storage.uri_of(path)} is {found}"
        return None

    def _steps(self) -> list[int]:
        with self._errors("listed"):
            matches = (_STEP_FOLDER.fullmatch(name) for name in self._storage.names(STAGES))
            return sorted(int(match[1]) for match in matches if match)

    def _stages(self, step: int) -> list[str]:
        return [name for name in self._storage.names(_step_folder(step)) if _NAME.fullmatch(name)]

    def _clean_leftovers(self) -> None:
        """Remove what earlier, dead writers did not commit. Attempts of this writer's own token are left alone: a
        stage of it may be at work in another process."""
        for folder in ("", LEASE_FOLDER):
            for path in list(iterate_temporary(self._storage, folder)):
                self._storage.remove(path)
        for step in self._steps():
            for stage in self._stages(step):
                self._clean_stage(stage, step)

    def _clean_stage(self, stage: str, step: int) -> None:
        folder = _stage_folder(stage, step)
        for path in list(iterate_temporary(self._storage, folder)):
            self._storage.remove(path)
        matches = [match for match in map(_ATTEMPT.fullmatch, self._storage.names(folder)) if match]
        stale = {match[0] for match in matches if int(match[1]) < (self._fence or 0)}
        if not stale:
            return
        record = self.read_stage(stage, step)
        used = {entry.path.partition("/")[0] for entry in record.files} if record and not record.pruned else set()
        for attempt in sorted(stale - used):
            self._storage.remove_tree(f"{folder}/{attempt}")


def _reopen(kind: type[RunStore], uri: str, fence: int | None) -> RunStore:
    """Unpickling cleans nothing up: another attempt may be at work."""
    return kind(open_storage(uri), fence)


def _step_folder(step: int) -> str:
    if step < 0:
        raise ValueError(f"steps are counted from 0 (before training) and 1, got {step}")
    return f"{STAGES}/step_{step:06d}"


def _stage_folder(stage: str, step: int) -> str:
    _check_name(stage, "stage")
    return f"{_step_folder(step)}/{stage}"


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a {what}'s name: letters, digits, '.', '_' and '-' only")


def _content_digest(stage: str, step: int, inputs_digest: str, entries: tuple[FileEntry, ...]) -> str:
    """What identifies the output: inputs and file contents, not the attempt, its times, or its summary."""
    files = {entry.path.rpartition("/")[2]: entry.sha256 for entry in entries}
    return digest_of({"stage": stage, "step": step, "inputs": inputs_digest, "files": files})


def _encode_record(record: StageRecord) -> bytes:
    content = asdict(record)
    del content["recorded"]
    return canonical_json({"format": RECORD_FORMAT, **content}, indent=1)


def _decode_record(data: bytes) -> StageRecord:
    content = parse_json(data)
    if content.pop("format") != RECORD_FORMAT:
        raise ValueError(f"written in another format than {RECORD_FORMAT}")
    files = tuple(FileEntry(**entry) for entry in content.pop("files"))
    return StageRecord(**content, files=files, recorded=True)
