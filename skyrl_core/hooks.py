"""Factories that build a run: ours, or those that the configuration names."""

from collections.abc import Callable
from typing import Any

from skyrl_core.user_code import load_callable


def load_hook(name: str | None, key: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that `key` names, or `default` when it is not set.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such callable.
    """
    found: Callable[..., Any] = default if name is None else load_callable(name, key)
    return found
