"""The run's page in the Prefect UI: progress, a dashboard with the curves, and what failed and what to do."""

import base64
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.utilities.context import get_task_and_flow_run_ids

from skyrl_core.tracking.failure_text import headline, traceback_text
from skyrl_core.tracking.metrics_file import MetricsLine
from skyrl_core.tracking.names import ACCURACY, GREEDY, REWARD, STEP_SECONDS, TOKENS_PER_SECOND
from skyrl_core.tracking.plots import render_png, seconds_by_stage
from skyrl_core.tracking.summary import duration

logger = logging.getLogger(__name__)

_LAST_STEPS = 10
_SAMPLE_CHARS = 4000
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", REWARD, ".3f"),
    ("accuracy", ACCURACY, ".3f"),
    ("greedy", GREEDY, ".3f"),
    ("KL", "policy/kl", ".4f"),
    ("tokens/s", TOKENS_PER_SECOND, ",.0f"),
    ("seconds", STEP_SECONDS, ".1f"),
)


class RunArtifacts:
    """The artifacts of one flow run, each made once and then updated in place.

    Make it inside the flow run that the artifacts belong to: epoch subflows may use it and still write to that page.
    A Prefect API that does not answer costs a warning, never the run.
    """

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._flow_run_id = get_task_and_flow_run_ids()[1]
        self._ids: dict[str, UUID] = {}

    def publish_progress(self, step: int, total: int) -> None:
        """A progress bar: `step` of `total` training steps."""
        percent = round(100 * step / total, 1) if total else 100.0
        self._publish("progress", "progress", percent, f"{self._run_name}: step {step} of {total}")

    def publish_curves(self, lines: Sequence[MetricsLine], links: Mapping[str, str] | None = None) -> None:
        """The dashboard: curves, the last steps, seconds by stage, and where the run's files are."""
        text = dashboard_markdown(self._run_name, lines, links or {})
        self._publish("dashboard", "markdown", text, f"{self._run_name}: curves and last steps")

    def publish_failure(self, stage: str, step: int, error: BaseException, next_action: str) -> None:
        """What failed, with its traceback, and what happens or is to be done next."""
        text = failure_markdown(stage, step, error, next_action)
        self._publish("failure", "markdown", text, f"{self._run_name}: {stage} step {step} failed")

    def _publish(self, what: str, kind: str, data: Any, description: str) -> None:
        key = artifact_key(what, self._run_name)
        try:
            with get_client(sync_client=True) as client:
                if key in self._ids:
                    # Not client.update_artifact: it also stores the whole content in an event, at every update.
                    update = ArtifactUpdate(data=data, description=description)
                    client.request(
                        "PATCH",
                        "/artifacts/{id}",
                        json=update.model_dump(mode="json", exclude_unset=True),
                        path_params={"id": self._ids[key]},
                    )
                    return
                made = ArtifactCreate(
                    key=key, type=kind, data=data, description=description, flow_run_id=self._flow_run_id
                )
                self._ids[key] = client.create_artifact(made).id
        except Exception as error:  # a page that cannot be drawn must not end a training run
            logger.warning("artifact %s was not published: %s: %s", key, type(error).__name__, error)


def artifact_key(what: str, run_name: str) -> str:
    """`dashboard-<run>`: lowercase letters, digits and dashes only, as Prefect demands."""
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', run_name.lower()).strip('-') or 'run'}"


def dashboard_markdown(run_name: str, lines: Sequence[MetricsLine], links: Mapping[str, str]) -> str:
    """The dashboard's text with the curves as an embedded picture; stays under 100 kB however long the run is."""
    picture = base64.b64encode(render_png(lines, title=run_name, dpi=72)).decode()
    parts = [f"![reward, accuracy and time by stage](data:image/png;base64,{picture})", _last_steps(lines)]
    totals = seconds_by_stage(lines)
    if totals:
        whole = sum(totals.values())
        rows = [(stage, duration(seconds), f"{seconds / whole:.0%}") for stage, seconds in totals.items()]
        parts.append("### Time by stage\n\n" + _table(("stage", "time", "share"), rows))
    if links:
        parts.append("### Where things are\n\n" + "\n".join(f"- {name}: {_place(to)}" for name, to in links.items()))
    return "\n\n".join(parts) + "\n"


def failure_markdown(stage: str, step: int, error: BaseException, next_action: str) -> str:
    """Stage, error, what comes next, the sample that caused it, and the traceback; the last two as code blocks."""
    where = f"{stage}, step {step}" if step else stage
    parts = [f"## Failed: {where}", f"`{headline(error).replace('`', chr(39))}`", f"**Next:** {next_action}"]
    sample = getattr(error, "sample", None)
    if sample:
        parts.append("### Sample")
        parts += [f"{name}:\n\n{_code(text[:_SAMPLE_CHARS])}" for name, text in sample.items()]
    return "\n\n".join([*parts, "### Traceback", _code(traceback_text(error))]) + "\n"


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _last_steps(lines: Sequence[MetricsLine]) -> str:
    shown = lines[-_LAST_STEPS:]
    columns = [column for column in _COLUMNS if any(column[1] in line.metrics for line in shown)]
    rows = [
        (str(line.step), str(line.epoch), *(_cell(line.metrics.get(metric), form) for _, metric, form in columns))
        for line in reversed(shown)
    ]
    return "### Last steps\n\n" + _table(("step", "epoch", *(label for label, _, _ in columns)), rows)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ruler, *rows))


def _place(target: str) -> str:
    return f"<{target}>" if target.startswith(("http://", "https://")) else f"`{target}`"
