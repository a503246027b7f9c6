"""Aliases (`best`, `production`): names that point at one checkpoint among all runs of a store, with its lineage.

Under the folder that holds the runs:

    _aliases/production/move_00000003.json      the third move; the highest is where the alias points

A move is a file that is created and never changed: of two that compete one wins, and the history stays.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from skyrl_core.checkpoint.code_version import code_version
from skyrl_core.checkpoint.discovery import checkpoint_at, checkpoint_folder
from skyrl_core.checkpoint.manifest import CheckpointManifest
from skyrl_core.checkpoint.scores import CheckpointScore
from skyrl_core.data.digests import canonical_json, parse_json
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import ConfigurationError, StoreError

FOLDER = "_aliases"
_MOVE = re.compile(r"move_(\d{8,})\.json")
_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasMove:
    """Where an alias points since its `move`-th move, and how that checkpoint came to be.

    `promoted_by` is the code version that moved it; `code_version` the one that trained the checkpoint. `score` and
    `identity` are those of the evaluation that moved it, None and "" for a move by hand.
    """

    alias: str
    move: int
    run: str
    step: int
    content_digest: str
    config_digest: str
    dataset_fingerprint: str
    code_version: str
    metric: str = ""
    score: float | None = None
    identity: str = ""
    evaluation: Mapping[str, float] | None = None
    reason: str = ""
    promoted_by: str = ""
    moved_at: str = ""

    @property
    def checkpoint(self) -> str:
        """`run/global_step_N`, relative to the folder that holds the runs."""
        return f"{self.run}/{checkpoint_folder(self.step)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether an alias moved, and why or why not, in words for people. `target` is where it points now."""

    alias: str
    moved: bool
    reason: str
    target: AliasMove | None


def read_alias(root: str | Path, alias: str) -> AliasMove | None:
    """Where an alias points; None when it was never moved. Raises StoreError when that cannot be read."""
    storage = open_storage(root)
    newest = _newest(storage, _checked(alias))
    return _read(storage, alias, newest) if newest else None


def alias_history(root: str | Path, alias: str) -> list[AliasMove]:
    """Every move of an alias, the first one first."""
    storage = open_storage(root)
    return [_read(storage, alias, move) for move in range(1, _newest(storage, _checked(alias)) + 1)]


def list_aliases(root: str | Path) -> list[AliasMove]:
    """Where every alias of the store points, by name."""
    storage = open_storage(root)
    try:
        names = [name for name in storage.names(FOLDER) if _NAME.fullmatch(name)]
    except OSError as error:
        raise StoreError(f"the aliases in {storage.uri} cannot be listed: {error}") from error
    return [move for name in names if (move := read_alias(root, name)) is not None]


def aliased_steps(root: str | Path, run: str) -> set[int]:
    """The steps of a run that an alias points at: retention leaves them alone."""
    return {move.step for move in list_aliases(root) if move.run == run}


def move_alias(root: str | Path, alias: str, run: str, step: int, *, reason: str) -> AliasMove:
    """Point an alias at a checkpoint by hand. Raises CheckpointError when there is no complete checkpoint."""
    storage = open_storage(root)
    manifest = _manifest(storage, run, step)
    while True:
        move = _described(alias, _newest(storage, _checked(alias)) + 1, run, manifest, reason=reason)
        if _create(storage, move):
            return move


def promote(
    root: str | Path,
    alias: str,
    score: CheckpointScore,
    *,
    metric: str,
    min_score: float | None = None,
    min_gain: float = 0.0,
) -> Decision:
    """Move an alias to an evaluated checkpoint when its score beats where the alias points now.

    It has to exceed the present score by more than `min_gain`, under the same evaluation identity (other prompts or
    sampling say nothing about which is better), and to reach `min_score`. Raises ConfigurationError when the evaluation
    has no such metric, CheckpointError when the checkpoint is gone.
    """
    value = score.metrics.get(metric)
    if value is None:
        near = ", ".join(sorted(name for name in score.metrics if name.endswith(metric.rpartition("/")[2])))
        raise ConfigurationError(f"the evaluation has no metric {metric!r}; of this kind it has: {near or 'none'}")
    storage = open_storage(root)
    manifest = _manifest(storage, score.run, score.step)
    if manifest.content_digest != score.content_digest:
        return Decision(alias=alias, moved=False, reason="the step was trained anew since", target=None)
    while True:
        newest = _newest(storage, _checked(alias))
        current = _read(storage, alias, newest) if newest else None
        refusal = _refusal(current, score, metric, value, min_score, min_gain)
        if refusal is not None:
            return Decision(alias=alias, moved=False, reason=refusal, target=current)
        before = f"{current.checkpoint} had {current.score:.4f}" if current and current.score is not None else "first"
        reason = f"{metric} {value:.4f} ({before})"
        move = _described(
            alias, newest + 1, score.run, manifest, reason=reason, metric=metric, score=value, evaluation=score
        )
        if _create(storage, move):
            return Decision(alias=alias, moved=True, reason=reason, target=move)


def _refusal(
    current: AliasMove | None,
    score: CheckpointScore,
    metric: str,
    value: float,
    min_score: float | None,
    min_gain: float,
) -> str | None:
    if min_score is not None and value < min_score:
        return f"{metric} {value:.4f} is below {min_score:.4f}"
    if current is None:
        return None
    if current.content_digest == score.content_digest:
        return f"it points at {current.checkpoint} already"
    if current.score is None or current.identity != score.identity or current.metric != metric:
        return (
            f"{current.checkpoint} was not evaluated in the same way (prompts, sampling, or metric): evaluate it so, "
            "or move the alias by hand with `skyrl-flows promote`"
        )
    if value - current.score <= min_gain:
        needed = f" by more than {min_gain:g}" if min_gain else ""
        return f"{metric} {value:.4f} does not beat {current.score:.4f} of {current.checkpoint}{needed}"
    return None


def _described(
    alias: str,
    move: int,
    run: str,
    manifest: CheckpointManifest,
    *,
    reason: str,
    metric: str = "",
    score: float | None = None,
    evaluation: CheckpointScore | None = None,
) -> AliasMove:
    return AliasMove(
        alias=alias,
        move=move,
        run=run,
        step=manifest.step,
        content_digest=manifest.content_digest,
        config_digest=manifest.config_digest,
        dataset_fingerprint=manifest.dataset_fingerprint,
        code_version=manifest.code_version,
        metric=metric,
        score=score,
        identity=evaluation.identity if evaluation is not None else "",
        evaluation=dict(evaluation.metrics) if evaluation is not None else None,
        reason=reason,
        promoted_by=code_version(),
        moved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _manifest(storage: Storage, run: str, step: int) -> CheckpointManifest:
    return checkpoint_at(storage.uri_of(f"{run}/{checkpoint_folder(step)}"), verify="size")[1]


def _checked(alias: str) -> str:
    if not _NAME.fullmatch(alias):
        raise ConfigurationError(f"{alias!r} is no alias: use lowercase letters, digits and dashes, a letter first")
    return alias


def _newest(storage: Storage, alias: str) -> int:
    try:
        matches = (_MOVE.fullmatch(name) for name in storage.names(f"{FOLDER}/{alias}"))
        return max((int(match[1]) for match in matches if match), default=0)
    except OSError as error:
        raise StoreError(f"the alias {alias} in {storage.uri} cannot be read: {error}") from error


def _path(alias: str, move: int) -> str:
    return f"{FOLDER}/{alias}/move_{move:08d}.json"


def _create(storage: Storage, move: AliasMove) -> bool:
    try:
        return storage.create(_path(move.alias, move.move), canonical_json(asdict(move), indent=1) + b"\n")
    except OSError as error:
        raise StoreError(f"the alias {move.alias} in {storage.uri} cannot be moved: {error}") from error


def _read(storage: Storage, alias: str, move: int) -> AliasMove:
    path = _path(alias, move)
    try:
        return AliasMove(**parse_json(storage.read(path)))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{storage.uri_of(path)} cannot be read: {error}") from error
