"""From written keys to plain data: merges sources, follows renamed keys, finds unknown ones, reads scalars by type."""

import difflib
from typing import Any

from skyrl_core.config.problems import Problem
from skyrl_core.config.renamed import ALIASES, IGNORED, MOVED, REMOVED
from skyrl_core.config.schema import Leaf, leaves, sections
from skyrl_core.config.yaml_text import Entry, Scalar, Tree, plain_scalar

_NULL = Scalar(value=None, text="null", plain=True)


def put(tree: Tree, path: str, entry: Entry) -> None:
    """Set the entry at a dotted path, making the sections above it."""
    *parents, last = path.split(".")
    for name in parents:
        inner = tree.get(name)
        if inner is None or not isinstance(inner.value, dict):
            inner = tree[name] = Entry(value={}, where=entry.where)
        assert isinstance(inner.value, dict)
        tree = inner.value
    tree[last] = merged(tree.get(last), entry)


def merged(below: Entry | None, above: Entry) -> Entry:
    """`above` over `below`: keys of dictionaries come together, everything else is replaced."""
    if below is None or not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    value = dict(below.value)
    for name, entry in above.value.items():
        value[name] = merged(value.get(name), entry)
    return Entry(value=value, where=above.where)


def follow_aliases(tree: Tree, problems: list[Problem]) -> None:
    """Move values from other spellings that SkyRL accepts to the keys they mean; drop what always holds."""
    for old, new in ALIASES.items():
        entry = _take(tree, old)
        if entry is None:
            continue
        if _find(tree, new) is not None:
            problems.append(
                Problem(text=f"{old} and {new} mean the same: give one of them", path=old, where=entry.where)
            )
        else:
            put(tree, new, entry)
    for old, value in IGNORED.items():
        entry = _find(tree, old)
        if entry is not None and isinstance(entry.value, Scalar) and entry.value.value is value:
            _take(tree, old)


def read_tree(tree: Tree, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, str]]:
    """The plain data of a tree, and where each leaf was written. Keys that cannot be used become problems."""
    reader = _TreeReader(problems)
    return reader.section(tree, ""), reader.places


class _TreeReader:
    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self.places: dict[str, str] = {}

    def section(self, tree: Tree, prefix: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, entry in tree.items():
            path = f"{prefix}{name}"
            if path in leaves():
                self.places[path] = entry.where
                data[name] = _leaf_value(entry, leaves()[path])
            elif path in sections() and path:
                value = self._inner_section(entry, path)
                if value is not None or _is_null(entry):
                    data[name] = value
            else:
                self._unknown(path, entry)
        return data

    def _inner_section(self, entry: Entry, path: str) -> dict[str, Any] | None:
        self.places.setdefault(path, entry.where)
        if isinstance(entry.value, dict):
            return self.section(entry.value, f"{path}.")
        if _is_null(entry):
            # In a file, a section whose keys are all commented out reads as null.
            return None if _may_be_null(path) else {}
        text = f"{path} is a section: give its keys, such as {path}.{next(iter(sections()[path].model_fields))}"
        self._problems.append(Problem(text=text, path=path, where=entry.where))
        return None

    def _unknown(self, path: str, entry: Entry) -> None:
        if path not in MOVED and path not in REMOVED and isinstance(entry.value, dict) and entry.value:
            for name, inner in entry.value.items():
                self._unknown(f"{path}.{name}", inner)
            return
        self._problems.append(Problem(text=_unknown_text(path), path=path, where=entry.where))


def _unknown_text(path: str) -> str:
    if path in MOVED:
        return f"{path} is now {MOVED[path]}"
    if path in REMOVED:
        return f"{path} is gone: {REMOVED[path]}"
    close = nearest_keys(path)
    return f"unknown key {path}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def nearest_keys(path: str, count: int = 3) -> list[str]:
    """Valid keys that `path` may have been meant to be, nearest first."""
    name = path.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        own = candidate.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        last = difflib.SequenceMatcher(None, name, own).ratio()
        # A key with a value was written, so a section is meant only when it is much the likest.
        return 0.4 * whole + 0.6 * last - (0.05 if candidate in sections() else 0.0)

    scored = sorted(((likeness(key), key) for key in [*leaves(), *(path for path in sections() if path)]), reverse=True)
    best = scored[0][0]
    return [key for score, key in scored[:count] if score >= 0.62 and score >= best - 0.08]


def _leaf_value(entry: Entry, leaf: Leaf) -> Any:
    value = entry.value
    if isinstance(value, Scalar):
        return _scalar_value(value, leaf.kinds)
    if isinstance(value, list):
        kinds = leaf.item_kinds if list in leaf.kinds else frozenset[type]()
        return [_scalar_value(item.value, kinds) if isinstance(item.value, Scalar) else _free(item) for item in value]
    return _free(entry)


def _scalar_value(scalar: Scalar, kinds: frozenset[type]) -> Any:
    """A scalar as its key wants it: `run_name=42` is text where only text is taken."""
    value = scalar.value
    if isinstance(value, str):
        wants_text = str in kinds or not kinds or dict in kinds
        return plain_scalar(scalar.text) if scalar.retype and not wants_text else value
    fits = value is None or type(value) in kinds or (type(value) is int and float in kinds)
    return scalar.text if scalar.plain and not fits and str in kinds else value


def _free(entry: Entry) -> Any:
    if isinstance(entry.value, dict):
        return {name: _free(inner) for name, inner in entry.value.items()}
    if isinstance(entry.value, list):
        return [_free(inner) for inner in entry.value]
    return entry.value.value


def _is_null(entry: Entry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.value is None


def _may_be_null(path: str) -> bool:
    parent, _, name = path.rpartition(".")
    field = sections()[parent].model_fields[name]
    return not field.is_required() and field.default is None


def _find(tree: Tree, path: str) -> Entry | None:
    entry: Entry | None = Entry(value=tree, where="")
    for name in path.split("."):
        if entry is None or not isinstance(entry.value, dict):
            return None
        entry = entry.value.get(name)
    return entry


def _take(tree: Tree, path: str) -> Entry | None:
    """Remove and return the entry at a path, with the sections that it leaves empty."""
    found = _find(tree, path)
    if found is None:
        return None
    parent, _, name = path.rpartition(".")
    while name:
        above = _find(tree, parent) if parent else Entry(value=tree, where="")
        assert above is not None
        assert isinstance(above.value, dict)
        del above.value[name]
        if above.value:
            break
        parent, _, name = parent.rpartition(".")
    return found
