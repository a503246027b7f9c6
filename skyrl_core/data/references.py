"""Small references that cross Prefect in place of tokens and tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One committed file: path relative to its record, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """The committed output of one stage of one step: proof that it was done, and from what.

    `inputs_digest` is the digest of everything the output depends on; a stage asked again for the same inputs returns
    this record instead of working. `summary` holds small results only (counts, metrics), never token ids.
    `recorded` is True on records that were found rather than made by the current call; it is not stored.
    `pruned` is True when the files were dropped because no retained checkpoint needs them any more; the summary stays.
    """

    stage: str
    step: int
    inputs_digest: str
    digest: str
    files: tuple[FileEntry, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    created_at: str = ""
    fence: int = 0
    recorded: bool = False
    pruned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Where a complete checkpoint stands."""

    uri: str
    step: int
    policy_version: int
