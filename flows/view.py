"""What the terminal shows while a run goes on: a live status on a terminal, one plain line a step anywhere else."""

import contextlib
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from skyrl_core.tracking.names import ACCURACY, GREEDY, REWARD, STAGES, TOKENS_PER_SECOND
from skyrl_core.tracking.summary import duration

Mode = Literal["auto", "live", "plain", "off"]

_RECENT = 10


class RunView:
    """Follows a run stage by stage. Everything is called from the flow process's main thread.

    Make it with `RunView.open`. Each method states a fact; what is shown of it depends on the mode.
    """

    def __init__(
        self,
        *,
        mode: Literal["live", "plain", "off"],
        console: Console,
        run_name: str,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._mode = mode
        self._run_name = run_name
        self._clock = clock
        self._total = total_steps
        self._done = 0
        self._epoch: int | None = None
        self._latest: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._retries = 0
        self._recorded = 0
        self._stage: tuple[str, int, int, float] | None = None
        self._step_began: float | None = None
        self._step_is_fresh = False
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._median: float | None = None
        self._spinner = Spinner("dots")

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        mode: Mode,
        total_steps: int | None,
        run_name: str,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[Self]:
        """Show a run until the block ends. `auto` is live on a terminal and plain otherwise.

        `total_steps` may be None while the dataset is not loaded; `plan` tells it later.
        """
        console = console or Console()
        shown: Literal["live", "plain", "off"] = (
            ("live" if console.is_terminal else "plain") if mode == "auto" else mode
        )
        view = cls(mode=shown, console=console, run_name=run_name, total_steps=total_steps, clock=clock)
        if shown != "live":
            yield view
            return
        before = _terminal_streams()
        with Live(get_renderable=view.status, console=console, refresh_per_second=4), _logs_above_live(before):
            yield view

    def plan(self, total_steps: int, done_steps: int = 0) -> None:
        """How many steps the run has in all, and how many an earlier start has done."""
        self._total, self._done = total_steps, done_steps
        if done_steps:
            self.note(f"continuing after step {done_steps} of {total_steps}")

    def shorten(self, total_steps: int) -> None:
        """The run will have fewer steps than was planned."""
        self._total = total_steps

    def stage(self, name: str, step: int, attempt: int = 1) -> None:
        """A stage begins; `attempt` above 1 is a retry."""
        now = self._clock()
        if attempt > 1:
            self._retries += 1
            self.note(f"{name} step {step}: attempt {attempt}")
        if self._step_began is None and step > self._done:  # set-up and evaluations belong to no step
            self._step_began = now
        self._stage = (name, step, attempt, now)

    def stage_done(self, name: str, seconds: float, recorded: bool) -> None:
        """A stage ended; `recorded` says that its committed output was found rather than made.

        Set-up stages (step 0) get a line each, since a run may spend minutes there.
        """
        if self._stage is not None and self._stage[1] == 0 and name not in STAGES:
            self._print(f"{name}: {duration(seconds)}")
        self._stage = None
        if recorded:
            self._recorded += 1
        else:
            self._step_is_fresh = True
        self._latest[f"timing/{name}"] = seconds

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete; its metrics carry the names that metrics.jsonl uses."""
        now = self._clock()
        taken = None
        if self._step_began is not None and self._step_is_fresh:
            taken = now - self._step_began
            self._recent.append(taken)
            self._median = statistics.median(self._recent)
        self._stage, self._step_began, self._step_is_fresh = None, None, False
        self._done = step
        self._latest.update(metrics)
        self._print(self._step_line(step, taken))

    def epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self._epoch = epoch

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; `step` is the step whose weights were evaluated, 0 before training."""
        self._latest.update({name: metrics[name] for name in (ACCURACY, GREEDY) if name in metrics})
        self._evaluated_at = step
        shown = [f"accuracy {metrics[ACCURACY]:.3f}"] if ACCURACY in metrics else []
        if GREEDY in metrics:
            shown.append(f"greedy {metrics[GREEDY]:.3f}")
        self._print(f"evaluation of step {step}: {', '.join(shown) or 'no score'}")

    def note(self, text: str) -> None:
        """Something the reader should know: "engine 0 died: rebuilding"."""
        self._print(text)

    def seconds_left(self) -> float | None:
        """Estimate from the median of the last ten steps that were worked on; None before the first."""
        if self._median is None or self._total is None:
            return None
        return self._median * max(self._total - self._done, 0)

    def status(self) -> RenderableType:
        """The live part at the foot of the terminal."""
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total or 1, completed=self._done if self._total else 0, width=24)
        left = self.seconds_left()
        head.add_row(
            Text(self._run_name, style="bold"),
            Text(f"step {self._done} of {self._total if self._total is not None else '?'}"),
            Text("" if self._epoch is None else f"epoch {self._epoch}"),
            bar,
            Text("" if left is None else f"about {duration(left)} left"),
        )
        return Group(head, self._numbers(), self._stage_line())

    def _numbers(self) -> Text:
        parts = []
        if REWARD in self._latest:
            parts.append(f"reward {self._latest[REWARD]:.3f}")
        if ACCURACY in self._latest:
            parts.append(f"accuracy {self._latest[ACCURACY]:.3f} (step {self._evaluated_at})")
        if TOKENS_PER_SECOND in self._latest:
            parts.append(f"{self._latest[TOKENS_PER_SECOND]:,.0f} tokens/s")
        if self._retries:
            parts.append(f"{self._retries} {'retry' if self._retries == 1 else 'retries'}")
        if self._recorded:
            parts.append(f"{self._recorded} {'stage' if self._recorded == 1 else 'stages'} from the record")
        return Text("  ".join(parts) or "no step finished yet", style="" if parts else "dim")

    def _stage_line(self) -> RenderableType:
        if self._stage is None:
            return Text("between stages", style="dim")
        name, step, attempt, began = self._stage
        retry = f"  attempt {attempt}" if attempt > 1 else ""
        where = f" step {step}" if step else ""
        self._spinner.update(text=Text(f"{name}{where}  {duration(self._clock() - began)}{retry}"))
        return self._spinner

    def _step_line(self, step: int, taken: float | None) -> str:
        total = "?" if self._total is None else str(self._total)
        parts = [f"step {step:>{len(total)}} of {total}"]
        if self._epoch is not None:
            parts.append(f"epoch {self._epoch}")
        parts.append(f"reward {_number(self._latest.get(REWARD), '.3f', 6)}")
        parts.append(f"accuracy {_number(self._latest.get(ACCURACY), '.3f', 5)}")
        parts.append(f"{_number(self._latest.get(TOKENS_PER_SECOND), ',.0f', 7)} tokens/s")
        parts.append(f"{duration(taken) if taken is not None else 'recorded':>12}")
        left = self.seconds_left()
        parts.append(f"left {duration(left) if left is not None else '-'}")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        if self._mode != "off":
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None, form: str, width: int) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def _terminal_streams() -> dict[int, Literal["stdout", "stderr"]]:
    """The identities of the streams that lead to the terminal now."""
    return {
        id(sys.__stdout__): "stdout",
        id(sys.stdout): "stdout",
        id(sys.__stderr__): "stderr",
        id(sys.stderr): "stderr",
    }


@contextlib.contextmanager
def _logs_above_live(before: Mapping[int, Literal["stdout", "stderr"]]) -> Iterator[None]:
    """Lead log handlers that hold one of the streams `before` to what the live display has put in its place.

    Handlers keep the stream they were made with; left so, their lines would be drawn into the live part.
    """
    moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for item in loggers for handler in getattr(item, "handlers", ())}
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in before:
            moved.append((handler, handler.stream))
            _lead(handler, getattr(sys, before[id(handler.stream)]))
    try:
        yield
    finally:
        for handler, stream in moved:
            _lead(handler, stream)


def _lead(handler: "logging.StreamHandler[TextIO]", stream: TextIO) -> None:
    handler.setStream(stream)
    console = getattr(handler, "console", None)  # Prefect's handler prints through a rich console of its own
    if isinstance(console, Console):
        console.file = cast(TextIO, _Opaque(stream)) if hasattr(stream, "rich_proxied_file") else stream


class _Opaque:
    """A live display's stream, without the attribute by which other consoles find the terminal behind it."""

    def __init__(self, stream: TextIO) -> None:
        self.write = stream.write
        self.flush = stream.flush
        self.isatty = stream.isatty
        self.encoding = stream.encoding
