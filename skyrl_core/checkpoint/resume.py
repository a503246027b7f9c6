"""Where a run starts from: nothing, its own past, or a checkpoint that was named."""

from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.data.references import CheckpointRef
from skyrl_core.errors import ConfigurationError


def starting_point(
    root: str, *, mode: str | None, path: str | None, name: str, started: bool, started_from: str | None = None
) -> CheckpointRef | None:
    """The foreign checkpoint that a run begins with, or None: it begins with the start model.

    `started` tells that the run has a past, which then began with `started_from`. Raises ConfigurationError when the
    mode would overwrite or rewrite that past, CheckpointError when the named checkpoint is none.
    """
    if mode in (None, "none"):
        if started:
            raise ConfigurationError(
                f"run {name!r} at {root} has results already and trainer.resume_mode=none would begin it anew: choose "
                "another trainer.run_name, or trainer.resume_mode=latest to continue it"
            )
        return None
    if mode == "from_path" and path is not None:
        named = checkpoint_at(path)[0]
        if started and named.uri != started_from:
            raise ConfigurationError(
                f"run {name!r} at {root} began with {started_from or 'the start model'} and cannot go on from "
                f"{named.uri}: choose another trainer.run_name to branch off there, or trainer.resume_mode=latest"
            )
        return named
    return checkpoint_at(started_from)[0] if started_from is not None else None
