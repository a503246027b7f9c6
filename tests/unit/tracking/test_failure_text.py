"""Exceptions as text."""

from skyrl_core.tracking.failure_text import headline, traceback_text


def test_a_long_traceback_keeps_its_end() -> None:
    text = traceback_text(ValueError("x" * 500 + " the cause"), limit=100)
    first, rest = text.split("\n", 1)
    whole = len("ValueError: ") + 500 + len(" the cause")
    assert first == f"… {whole - 100} characters left out …"
    assert len(rest) == 100
    assert rest.endswith("the cause")


def test_a_headline_is_one_line() -> None:
    assert headline(ValueError("first\n  second")) == "ValueError: first second"
    assert headline(KeyboardInterrupt()) == "KeyboardInterrupt"
