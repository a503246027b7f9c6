"""What a store holds: its runs, how far each came, their checkpoints with scores, aliases and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_core.checkpoint.aliases import FOLDER as ALIASES
from skyrl_core.checkpoint.aliases import list_aliases
from skyrl_core.checkpoint.discovery import list_checkpoints, read_manifest
from skyrl_core.checkpoint.manifest import CheckpointManifest
from skyrl_core.checkpoint.pins import pinned_steps
from skyrl_core.checkpoint.scores import CheckpointScore, scores_of
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import StoreError

RUN_DOCUMENT, CONFIG_DOCUMENT, STATE_DOCUMENT = "run.json", "config.yaml", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How far a run came, as its last writer left it. `starts` counts the processes that worked on it."""

    finished: bool = False
    starts: int = 0
    total_steps: int | None = None
    flow_run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One complete checkpoint. `bytes` counts its files."""

    run: str
    step: int
    uri: str
    manifest: CheckpointManifest
    scores: tuple[CheckpointScore, ...] = ()
    aliases: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.manifest.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run of a store, with its checkpoints by ascending step."""

    name: str
    uri: str
    document: Mapping[str, Any]
    state: RunState
    checkpoints: tuple[CheckpointEntry, ...] = field(default=())


def list_runs(root: str | Path) -> list[str]:
    """Names of the runs in a store. Raises StoreError when it cannot be listed."""
    storage = open_storage(root)
    try:
        names = [name for name in storage.names("") if name != ALIASES and not name.startswith(".")]
        return [name for name in names if storage.size(f"{name}/{RUN_DOCUMENT}") is not None]
    except OSError as error:
        raise StoreError(f"the runs in {storage.uri} cannot be listed: {error}") from error


def read_state(store: RunStore) -> RunState:
    """The run's state document; a run without one has not begun its first step."""
    content = store.read_json(STATE_DOCUMENT) or {}
    return RunState(**{name: content[name] for name in RunState.__slots__ if name in content})


def read_run(root: str | Path, name: str) -> RunEntry:
    """One run with its checkpoints. Raises StoreError or CheckpointError when something cannot be read."""
    uri = open_storage(root).uri_of(name)
    store = RunStore.open(uri)
    pins = pinned_steps(uri)
    named: dict[int, list[str]] = {}
    for move in list_aliases(root):
        if move.run == name:
            named.setdefault(move.step, []).append(move.alias)
    entries = []
    for found in list_checkpoints(uri):
        manifest = read_manifest(found)
        entries.append(
            CheckpointEntry(
                run=name,
                step=found.step,
                uri=found.uri,
                manifest=manifest,
                scores=tuple(scores_of(uri, found.step, manifest.content_digest)),
                aliases=tuple(named.get(found.step, ())),
                pinned=found.step in pins,
            )
        )
    document = store.read_json(RUN_DOCUMENT) or {}
    return RunEntry(name=name, uri=uri, document=document, state=read_state(store), checkpoints=tuple(entries))
