"""Turns an exception into the text that trackers and pages show."""

import traceback

MAX_CHARS = 20_000


def traceback_text(error: BaseException, limit: int = MAX_CHARS) -> str:
    """The whole chained traceback; a longer one keeps its end, where the cause stands."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if len(text) <= limit:
        return text
    return f"… {len(text) - limit} characters left out …\n{text[-limit:]}"


def headline(error: BaseException) -> str:
    """`Type: message` on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
