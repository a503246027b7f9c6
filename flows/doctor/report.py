"""Findings, and how checks are run: all at once, each for a bounded time, none able to stop another."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from skyrl_core.errors import SkyRLError
from skyrl_core.tracking.redact import redacted

Status = Literal["ok", "warn", "fail"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. `advice` says what to do; empty when nothing is to be done."""

    check: str
    status: Status
    message: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A question with a time limit. `look` returns (status, message, advice), or raises an error of ours: a failure."""

    name: str
    look: Callable[[], tuple[Status, str, str]]
    limit_seconds: float = 30.0


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings, in the order of the checks. A check that does not end in time is a failure that says so."""
    answers: dict[int, tuple[Status, str, str]] = {}

    def answer(index: int, check: Check) -> None:
        answers[index] = _look(check)

    began = time.monotonic()
    # Daemons: a check that hangs must not keep the command from ending.
    threads = [
        threading.Thread(target=answer, args=(index, check), name=f"doctor {check.name}", daemon=True)
        for index, check in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    findings = []
    for index, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        thread.join(max(0.0, began + check.limit_seconds - time.monotonic()))
        late: tuple[Status, str, str] = (
            "fail",
            f"no answer within {check.limit_seconds:g} s",
            "it hangs or is overloaded: look at its log, restart it",
        )
        status, message, advice = answers.get(index, late)
        message, advice = redacted([message, advice])
        findings.append(Finding(check=check.name, status=status, message=message, advice=advice))
    return findings


def _look(check: Check) -> tuple[Status, str, str]:
    try:
        return check.look()
    except SkyRLError as error:
        return "fail", str(error), ""
    except Exception as error:  # a check that breaks is a finding, too
        return "fail", f"the check itself failed: {type(error).__name__}: {error}", "please report this"


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a check."""
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(mark, finding.check, Text(finding.message), Text(finding.advice))
    return table
