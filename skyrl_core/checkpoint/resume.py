"""Decide where a run starts: fresh, or at which checkpoint; and refuse what would mix two different runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_core.checkpoint.discovery import checkpoint_at, latest_checkpoint, read_manifest
from skyrl_core.checkpoint.manifest import CheckpointManifest
from skyrl_core.data.references import CheckpointRef
from skyrl_core.data.run_store import RUN_DOCUMENT, RunStore
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import ConfigurationError, DatasetError

Differences = Callable[[CheckpointRef | None], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeDecision:
    """Where a run starts. `reason` is a sentence for the log and the run's page.

    `resumed_from` is the address of another run's checkpoint that this run began with; record it in the run's document.
    """

    checkpoint: CheckpointRef | None
    manifest: CheckpointManifest | None
    reason: str
    resumed_from: str | None = None

    @property
    def step(self) -> int:
        """The last step that is contained in the state to start from; 0 for a fresh start."""
        return 0 if self.manifest is None else self.manifest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What must be equal for one run to continue another's state."""

    config_digest: str
    dataset_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What a run's folder already holds."""

    checkpoint: CheckpointRef | None
    last_step: int | None
    config_digest: str | None
    dataset_fingerprint: str | None
    resumed_from: str | None

    @property
    def has_results(self) -> bool:
        return self.checkpoint is not None or self.last_step is not None


def choose_resume(
    root: str | Path,
    mode: str,
    *,
    path: str | Path | None = None,
    identity: RunIdentity,
    differences: Differences,
    allow_changed_data: bool = False,
) -> ResumeDecision:
    """Where the run in `root` starts under SkyRL's `trainer.resume_mode`. Reads only.

    - `latest`: at the newest complete checkpoint of the run; without one it starts fresh and says so. Recorded stages
      without a checkpoint are replayed from the start model.
    - `from_path`: at exactly the checkpoint in `path`. A run that began so and has results goes on at its own newest
      checkpoint, so that the same command continues it.
    - `none`: fresh; refused when the run name has results already.

    Files are verified by checksum. The run's document `run.json` (keys `config_digest`, `dataset_fingerprint`,
    `resumed_from`) speaks for a run that has no checkpoint yet. `differences` is called only to word a refusal: it gets
    the checkpoint (None: the run itself) and returns lines such as `trainer.policy.optimizer_config.lr: 1e-5, now 1e-6`.

    Raises ConfigurationError for a mode or path that cannot work or another configuration, DatasetError for a changed
    dataset unless allowed, CorruptCheckpointError naming the file when the checkpoint in `path` is broken.
    """
    recorded = _read_recorded(root)
    if mode == "none":
        return _start_fresh(root, recorded)
    if mode == "from_path":
        decision = _from_path(root, path, recorded)
    elif mode == "latest":
        decision = _continue(root, recorded)
    else:
        raise ConfigurationError(f"trainer.resume_mode is {mode!r}; it must be none, latest, or from_path")
    if decision.manifest is not None:
        saved = decision.manifest
        what = f"the checkpoint {decision.checkpoint.uri if decision.checkpoint else root}"
        _check_config(what, saved.config_digest, identity, lambda: differences(decision.checkpoint))
        _check_dataset(what, saved.dataset_fingerprint, identity, allow_changed_data)
    elif recorded.has_results:
        what = f"the run in {root}"
        _check_config(what, recorded.config_digest, identity, lambda: differences(None))
        _check_dataset(what, recorded.dataset_fingerprint, identity, allow_changed_data)
    return decision


def _read_recorded(root: str | Path) -> _Recorded:
    store = RunStore.open(root)
    document = store.read_json(RUN_DOCUMENT) or {}
    return _Recorded(
        checkpoint=latest_checkpoint(root, verify="full"),
        last_step=store.last_step(),
        config_digest=document.get("config_digest"),
        dataset_fingerprint=document.get("dataset_fingerprint"),
        resumed_from=document.get("resumed_from"),
    )


def _start_fresh(root: str | Path, recorded: _Recorded) -> ResumeDecision:
    if recorded.has_results:
        raise ConfigurationError(
            f"trainer.resume_mode=none, but the run in {root} has results already ({_results(recorded)}): they would be "
            "overwritten. Choose another trainer.run_name, or continue it with trainer.resume_mode=latest"
        )
    return ResumeDecision(
        checkpoint=None, manifest=None, reason="starts from the initial model: trainer.resume_mode=none"
    )


def _continue(root: str | Path, recorded: _Recorded) -> ResumeDecision:
    if recorded.checkpoint is not None:
        return ResumeDecision(
            checkpoint=recorded.checkpoint,
            manifest=read_manifest(recorded.checkpoint),
            reason=f"continues after step {recorded.checkpoint.step} from {recorded.checkpoint.uri}",
            resumed_from=recorded.resumed_from,
        )
    if recorded.resumed_from is not None:
        return _take(recorded.resumed_from, f"no checkpoint of its own yet in {root}: ", recorded.resumed_from)
    if recorded.last_step is not None:
        reason = (
            f"starts from the initial model: no complete checkpoint in {root} yet; stages recorded up to step "
            f"{recorded.last_step} are replayed"
        )
    else:
        reason = f"starts from the initial model: nothing to resume in {root}"
    return ResumeDecision(checkpoint=None, manifest=None, reason=reason)


def _from_path(root: str | Path, path: str | Path | None, recorded: _Recorded) -> ResumeDecision:
    if path is None or not str(path):
        raise ConfigurationError("trainer.resume_mode=from_path needs trainer.resume_path, the folder of a checkpoint")
    storage = open_storage(path)
    if recorded.has_results:
        own_newest = recorded.checkpoint is not None and recorded.checkpoint.uri == storage.uri
        if own_newest or recorded.resumed_from == storage.uri:
            return _continue(root, recorded)
        raise ConfigurationError(
            f"trainer.resume_path is {path}, but the run in {root} has results of its own already "
            f"({_results(recorded)}): they would be overwritten. Choose another trainer.run_name, or continue the run "
            "with trainer.resume_mode=latest"
        )
    if not storage.names(""):
        raise ConfigurationError(f"trainer.resume_path is {path}: there is no such folder, or it is empty")
    return _take(storage.uri, "", storage.uri)


def _take(uri: str, prefix: str, resumed_from: str) -> ResumeDecision:
    checkpoint, manifest = checkpoint_at(uri, verify="full")
    reason = f"{prefix}continues after step {checkpoint.step} from {checkpoint.uri}"
    return ResumeDecision(checkpoint=checkpoint, manifest=manifest, reason=reason, resumed_from=resumed_from)


def _check_config(
    what: str, saved: str | None, identity: RunIdentity, differences: Callable[[], Sequence[str]]
) -> None:
    if saved is None or saved == identity.config_digest:
        return
    lines = "".join(f"\n  {line}" for line in differences()) or "\n  (the saved configuration is not known)"
    raise ConfigurationError(
        f"{what} was made with another configuration:{lines}\n"
        "Put these keys back to go on with it, or choose another trainer.run_name to start another run"
    )


def _check_dataset(what: str, saved: str | None, identity: RunIdentity, allowed: bool) -> None:
    if saved is None or saved == identity.dataset_fingerprint or allowed:
        return
    raise DatasetError(
        f"{what} was made with another training dataset (fingerprint {saved[:12]}, now "
        f"{identity.dataset_fingerprint[:12]}): its position in the data means nothing here. Put the dataset back, or set "
        "trainer.allow_changed_data=true to go on with the changed one"
    )


def _results(recorded: _Recorded) -> str:
    steps = [
        step for step in (recorded.last_step, recorded.checkpoint and recorded.checkpoint.step) if step is not None
    ]
    return f"up to step {max(steps)}"
