"""Checks run side by side, each for a bounded time, and none takes the others down."""

import threading

from rich.console import Console

from flows.doctor.report import Check, Finding, findings_table, run_checks
from skyrl_core.errors import ConfigurationError


def test_findings_come_in_the_order_of_the_checks_whatever_ends_first() -> None:
    second_is_done = threading.Event()

    def first() -> tuple[str, str, str]:
        assert second_is_done.wait(30)
        return "ok", "first", ""

    def second() -> tuple[str, str, str]:
        second_is_done.set()
        return "warn", "second", "do this"

    findings = run_checks([Check("a", first), Check("b", second)])
    assert findings == [
        Finding(check="a", status="ok", message="first"),
        Finding(check="b", status="warn", message="second", advice="do this"),
    ]


def test_a_check_that_hangs_is_a_failure_that_names_it_and_its_limit() -> None:
    never = threading.Event()

    def hang() -> tuple[str, str, str]:
        never.wait()
        return "ok", "", ""

    findings = run_checks([Check("Prefect", hang, 0.05), Check("disk", lambda: ("ok", "fine", ""))])
    never.set()
    assert [(found.check, found.status) for found in findings] == [("Prefect", "fail"), ("disk", "ok")]
    assert findings[0].message == "no answer within 0.05 s"


def test_errors_of_ours_and_of_others_are_failures_with_their_words() -> None:
    def ours() -> tuple[str, str, str]:
        raise ConfigurationError("trainer.logger: no such tracker")

    def another() -> tuple[str, str, str]:
        raise RuntimeError("boom")

    found = run_checks([Check("trackers", ours), Check("GPUs", another)])
    assert (found[0].status, found[0].message) == ("fail", "trainer.logger: no such tracker")
    assert (found[1].status, found[1].message) == ("fail", "the check itself failed: RuntimeError: boom")


def test_passwords_in_addresses_are_not_shown() -> None:
    (found,) = run_checks([Check("database", lambda: ("fail", "no route to postgresql://me:hunter2@db/prefect", ""))])
    assert found.message == "no route to postgresql://[hidden]@db/prefect"


def test_the_table_shows_brackets_of_messages_as_they_are() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(findings_table([Finding(check="x", status="fail", message="ray[default] is missing", advice="a")]))
    assert "ray[default] is missing" in console.export_text()
