"""Evaluations of a run's checkpoints, kept beside them: one document per checkpoint and way of evaluating.

Under the run's folder:

    evaluations/global_step_12/<identity>.json      written once, by whoever evaluated first
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_core.checkpoint.discovery import checkpoint_folder
from skyrl_core.data.digests import canonical_json, parse_json
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import StoreError

FOLDER = "evaluations"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScore:
    """One evaluation of one checkpoint.

    `identity` tells which evaluations may be compared (see evaluation.identity); `content_digest` is the checkpoint's,
    so that a step that was trained anew is not taken for its predecessor. `metrics` are named as in metrics.jsonl,
    `evaluated_by` names the flow run.
    """

    run: str
    step: int
    content_digest: str
    identity: str
    metrics: Mapping[str, float]
    code_version: str
    created_at: str
    evaluated_by: str = ""


def record_score(run_root: str | Path, score: CheckpointScore) -> CheckpointScore:
    """Keep a score; returns the one that stands: an earlier one of the same checkpoint and identity wins.

    Raises StoreError when the store cannot be written.
    """
    storage, path = open_storage(run_root), _path(score.step, score.identity)
    try:
        if storage.create(path, canonical_json(asdict(score), indent=1) + b"\n"):
            return score
        found = find_score(run_root, score.step, score.content_digest, score.identity)
        if found is None:
            storage.publish(path, canonical_json(asdict(score), indent=1) + b"\n")
    except OSError as error:
        raise StoreError(f"{storage.uri_of(path)} cannot be written: {error}") from error
    return found or score


def find_score(run_root: str | Path, step: int, content_digest: str, identity: str) -> CheckpointScore | None:
    """The score of exactly this checkpoint under this identity, or None."""
    found = _read(run_root, _path(step, identity))
    return found if found is not None and found.content_digest == content_digest else None


def scores_of(run_root: str | Path, step: int, content_digest: str) -> list[CheckpointScore]:
    """Every score of a checkpoint, the earliest first."""
    folder = f"{FOLDER}/{checkpoint_folder(step)}"
    try:
        names = [name for name in open_storage(run_root).names(folder) if name.endswith(".json")]
    except OSError as error:
        raise StoreError(f"the evaluations in {run_root} cannot be listed: {error}") from error
    found = [score for name in names if (score := _read(run_root, f"{folder}/{name}")) is not None]
    return sorted(
        (score for score in found if score.content_digest == content_digest), key=lambda score: score.created_at
    )


def _path(step: int, identity: str) -> str:
    return f"{FOLDER}/{checkpoint_folder(step)}/{identity[:24]}.json"


def _read(run_root: str | Path, path: str) -> CheckpointScore | None:
    storage = open_storage(run_root)
    try:
        content: dict[str, Any] = parse_json(storage.read(path))
        return CheckpointScore(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{storage.uri_of(path)} cannot be read: {error}") from error
