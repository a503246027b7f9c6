"""Blanks what looks like a secret in a configuration before it leaves the machine."""

import re
from collections.abc import Mapping
from typing import Any

_SECRET_KEY = re.compile(
    r"(^|[_-])(password|passwd|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|(auth|access|api|bearer|hf|hub|refresh)[_-]?token)($|[_-])|^(token|authorization)$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")

HIDDEN = "[hidden]"


def redacted(value: Any) -> Any:
    """`value` with entries under secret-looking names and user:password@ parts of URLs replaced by `[hidden]`.

    The configuration holds no secrets by design; this catches one put into a free dictionary (engine_init_kwargs).
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _SECRET_KEY.search(str(key)) and isinstance(item, str) and item else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if isinstance(value, str):
        return _USER_INFO.sub(f"{HIDDEN}@", value)
    return value
