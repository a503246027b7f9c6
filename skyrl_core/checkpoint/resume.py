"""Where a run starts from: nothing, its own past, or a checkpoint that was named."""

from pathlib import Path

from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.data.references import CheckpointRef
from skyrl_core.errors import ConfigurationError


def starting_point(root: str, *, mode: str | None, path: str | None, name: str, started: bool) -> CheckpointRef | None:
    """The foreign checkpoint that a run begins with, or None: it begins with the start model, or goes on by itself.

    `started` tells that the run has a past. Raises ConfigurationError when `resume_mode=none` would overwrite it,
    CheckpointError when the named checkpoint is none.
    """
    if mode in (None, "none"):
        if started:
            raise ConfigurationError(
                f"run {name!r} at {root} has results already and trainer.resume_mode=none would begin it anew: choose "
                "another trainer.run_name, or trainer.resume_mode=latest to continue it"
            )
        return None
    if mode == "from_path" and path is not None:
        return checkpoint_at(Path(path).expanduser())[0]
    return None
