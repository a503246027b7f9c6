"""metrics.jsonl: one line of JSON a step, never torn, never doubled, rebuilt from committed results after a kill."""

import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from skyrl_core.data.storage import atomic_write_bytes

logger = logging.getLogger(__name__)

_RESERVED = frozenset({"step", "epoch", "non_finite"})
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """The metrics of one step. Step 0 is the evaluation before training."""

    step: int
    epoch: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        clash = sorted(_RESERVED & self.metrics.keys())
        if clash:
            raise ValueError(f"metric names {', '.join(clash)} are taken by metrics.jsonl itself: rename them")

    def to_json(self) -> str:
        """One line without its newline: metrics beside `step` and `epoch`, keys sorted.

        JSON has no NaN: such a value is null, and `non_finite` says for its name which of nan, inf, -inf it was.
        """
        values = {name: float(value) for name, value in self.metrics.items()}
        strange = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        content: dict[str, Any] = {name: None if name in strange else value for name, value in values.items()}
        content |= {"step": int(self.step), "epoch": int(self.epoch)}
        if strange:
            content["non_finite"] = strange
        return json.dumps(content, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; ValueError when `text` is no such line."""
        content = json.loads(text)
        if not isinstance(content, dict) or not {"step", "epoch"} <= content.keys():
            raise ValueError(f"no line of metrics: {text[:80]!r}")
        strange = content.pop("non_finite", {})
        step, epoch = content.pop("step"), content.pop("epoch")
        metrics = {name: _NON_FINITE[strange[name]] if name in strange else value for name, value in content.items()}
        return cls(step=step, epoch=epoch, metrics=metrics)


class MetricsFile:
    """Appends steps in rising order to `path` and rebuilds it from a list of lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_step: int | None = None

    def append(self, line: MetricsLine) -> None:
        """Add a step and make it durable. ValueError unless its step is above the last one in the file."""
        if self._last_step is None:
            self._open()
        if self._last_step is not None and line.step <= self._last_step:
            raise ValueError(f"{self.path} already holds step {self._last_step}: step {line.step} cannot follow it")
        with self.path.open("ab") as file:
            file.write(line.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._last_step = line.step

    def rewrite(self, lines: Iterable[MetricsLine]) -> None:
        """Replace the whole file at once; a kill leaves the old or the new one. Steps must rise."""
        ordered = list(lines)
        for before, after in itertools.pairwise(ordered):
            if after.step <= before.step:
                raise ValueError(f"steps must rise: {after.step} after {before.step}")
        atomic_write_bytes(self.path, b"".join(line.to_json().encode() + b"\n" for line in ordered))
        self._last_step = ordered[-1].step if ordered else None

    def _open(self) -> None:
        """Find the last step; cut a torn last line off, else the next append would be glued to it."""
        if not self.path.exists():
            atomic_write_bytes(self.path, b"")
            return
        whole = read_metrics(self.path)
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            logger.warning("%s ended in the middle of a line; the torn part is removed", self.path)
            os.truncate(self.path, end)
        self._last_step = whole[-1].step if whole else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Every whole line of `path`; a torn last one is left out.

    Raises ValueError naming the line when one before the last is no line of metrics. An absent file has no lines.
    """
    if not path.exists():
        return []
    *whole, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            lines.append(MetricsLine.from_json(text))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return lines
