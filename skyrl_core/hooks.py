"""Finds what the configuration names as `module:attribute`."""

import importlib
from collections.abc import Callable
from typing import Any

from skyrl_core.errors import ConfigurationError


def load_hook(name: str | None, key: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that `key` names, or `default` when it is not set.

    Raises:
        ConfigurationError: the module cannot be imported, or has no such callable.
    """
    if name is None:
        return default
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigurationError(
            f"{key}={name}: module {module_name} cannot be imported: {error}. It must be installed, or lie in the "
            "folder the run is started from."
        ) from error
    except AttributeError as error:
        raise ConfigurationError(f"{key}={name}: module {module_name} has no {attribute}") from error
    if not callable(found):
        raise ConfigurationError(f"{key}={name} is not callable")
    return found  # type: ignore[no-any-return]
