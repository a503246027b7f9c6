"""Remembers, in a small file in the run's folder, up to which step a tracking backend has been fed."""

import json
import logging
from pathlib import Path

from skyrl_core.data.storage import atomic_write_bytes
from skyrl_core.tracking.protocol import NOTHING_LOGGED

logger = logging.getLogger(__name__)


class HighWaterMark:
    """The newest step a backend holds, for one tracked run.

    `target` names what was written to (a wandb run id, an event folder): a mark left by another target is ignored. The
    mark moves after the backend's write, so a kill between the two repeats that step rather than losing it.
    """

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        self._step = self._read()

    @property
    def step(self) -> int:
        return self._step

    def advance(self, step: int) -> None:
        """Record that `step` is durable in the backend."""
        atomic_write_bytes(
            self._path, json.dumps({"step": step, "target": self._target}, sort_keys=True).encode() + b"\n"
        )
        self._step = step

    def reset(self) -> None:
        """Forget the mark: what it spoke of is gone."""
        self._path.unlink(missing_ok=True)
        self._step = NOTHING_LOGGED

    def _read(self) -> int:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            target, step = content["target"], int(content["step"])
        except FileNotFoundError:
            return NOTHING_LOGGED
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is unreadable (%s): its tracker is fed from the first step again", self._path, error)
            return NOTHING_LOGGED
        return step if target == self._target else NOTHING_LOGGED
