"""Values of a configuration by path, and how they are shown."""

from typing import Any

from skyrl_core.config.section import Section
from skyrl_core.config.yaml_text import write_inline


def plain(value: Any) -> Any:
    """Sections and tuples as dictionaries and lists, ready for YAML or JSON."""
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def value_at(config: Section, path: str) -> Any:
    """The value at a path; None below an optional section that is null."""
    value: Any = config
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def show(value: Any) -> str:
    """A value as one would write it in a `key=value` word."""
    return write_inline(plain(value))
