"""The tree of keys, read off the models: every path with its type in words, its default and its meaning."""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

import annotated_types
from pydantic.fields import FieldInfo

from skyrl_core.config.root import SkyRLConfig
from skyrl_core.config.section import Section

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "keys and values"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """One key: its path, what it accepts in words, its default, its meaning, and whether SkyRL lacks it."""

    path: str
    type: str
    default: Any
    description: str
    ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One key that holds a value rather than a section. `kinds` are the Python types that it takes as they are."""

    path: str
    field: FieldInfo
    kinds: frozenset[type]
    item_kinds: frozenset[type]
    default: Any


@cache
def leaves() -> dict[str, Leaf]:
    """All keys that hold values, by path, in declared order."""
    return {leaf.path: leaf for leaf in _walk(SkyRLConfig, SkyRLConfig.model_construct(), "")}


@cache
def sections() -> dict[str, type[Section]]:
    """All sections by path; the root is ""."""
    found: dict[str, type[Section]] = {"": SkyRLConfig}
    pending: list[tuple[str, type[Section]]] = [("", SkyRLConfig)]
    while pending:
        prefix, model = pending.pop()
        for name, field in model.model_fields.items():
            inner = section_of(field)
            if inner is not None:
                found[prefix + name] = inner
                pending.append((f"{prefix}{name}.", inner))
    return found


def list_keys() -> list[KeyInfo]:
    """Every key of the configuration, in declared order."""
    return [
        KeyInfo(
            path=leaf.path,
            type=describe(leaf.field),
            default=leaf.default,
            description=(leaf.field.description or "").removeprefix("ours: "),
            ours=(leaf.field.description or "").startswith("ours: "),
        )
        for leaf in leaves().values()
    ]


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field, also of one that may be null."""
    for part in _parts(field.annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def describe(field: FieldInfo) -> str:
    """What a field accepts, in words: "whole number, at least 1"."""
    words = _describe(field.annotation)
    limits = _limits(field.metadata)
    return f"{words}, {limits}" if limits else words


def _walk(model: type[Section], defaults: Section | None, prefix: str) -> Iterator[Leaf]:
    for name, field in model.model_fields.items():
        inner = section_of(field)
        default = _default_of(field, defaults, name)
        if inner is not None:
            yield from _walk(inner, default if isinstance(default, Section) else None, f"{prefix}{name}.")
        else:
            kinds, items = _kinds(field.annotation)
            yield Leaf(path=prefix + name, field=field, kinds=kinds, item_kinds=items, default=default)


def _default_of(field: FieldInfo, defaults: Section | None, name: str) -> Any:
    # A section's default may differ from its class's (the critic's learning rate). What it did not set itself is
    # taken from the field, where a home folder is still written as "~".
    if defaults is not None and name in defaults.model_fields_set:
        return getattr(defaults, name)
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _parts(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, without Annotated and Union around them."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _parts(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _kinds(annotation: Any) -> tuple[frozenset[type], frozenset[type]]:
    kinds: set[type] = set()
    items: set[type] = set()
    for part in _parts(annotation):
        origin = typing.get_origin(part)
        if origin is Literal:
            kinds.update(type(value) for value in typing.get_args(part))
        elif origin is tuple:
            kinds.add(list)
            items.update(_kinds(typing.get_args(part)[0])[0])
        elif isinstance(origin or part, type):
            kinds.add(origin or part)
    return frozenset(kinds), frozenset(items)


def _describe(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = typing.get_args(annotation)
        limits = _limits(metadata)
        return f"{_describe(inner)}, {limits}" if limits else _describe(inner)
    if origin in (Union, types.UnionType):
        parts = typing.get_args(annotation)
        words = [_describe(part) for part in parts if part is not type(None)]
        return " or ".join(words + ["null"] * (type(None) in parts))
    if origin is Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if origin is tuple:
        first, second = typing.get_args(annotation)
        return f"list of {_describe(first)}" if second is Ellipsis else f"pair of {_describe(first)}"
    return _PLAIN[origin or annotation]


def _limits(metadata: typing.Iterable[Any]) -> str:
    words: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            words.append(_limits(item.metadata))
        elif isinstance(item, annotated_types.Ge):
            words.append(f"at least {item.ge:g}")
        elif isinstance(item, annotated_types.Gt):
            words.append(f"above {item.gt:g}")
        elif isinstance(item, annotated_types.Le):
            words.append(f"at most {item.le:g}")
        elif isinstance(item, annotated_types.Lt):
            words.append(f"below {item.lt:g}")
    return ", ".join(word for word in words if word)
