"""Loads a configuration from a YAML file and `key=value` words, and says everything that is wrong with it at once."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skyrl_core.config.availability import missing_features
from skyrl_core.config.problems import Problem, raise_problems
from skyrl_core.config.renamed import ENVIRONMENT_FLAGS
from skyrl_core.config.root import SkyRLConfig
from skyrl_core.config.schema import describe, leaves, sections
from skyrl_core.config.tree import follow_aliases, merged, put, read_tree
from skyrl_core.config.values import plain, show
from skyrl_core.config.yaml_text import Entry, Tree, YamlTextError, read_yaml, write_yaml

_KEY = re.compile(r"^[A-Za-z_]\w*(\.[\w+-]+)*$")


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> SkyRLConfig:
    """The configuration from defaults, then the file, then the words; later wins.

    Raises one ConfigurationError with a line for everything that is wrong: unknown keys with the nearest valid ones,
    wrong values with what is accepted, broken rules between keys; NotAvailableYetError when all of it is right but
    asks for features that this version lacks.
    """
    problems = _environment_problems(os.environ)
    tree: Tree = {}
    for source in (_file_tree(path, problems), _word_tree(overrides, problems)):
        follow_aliases(source, problems)
        for name, entry in source.items():
            tree[name] = merged(tree.get(name), entry)
    config = _build(tree, problems)
    raise_problems(problems)
    assert config is not None
    return config


def config_from_yaml(text: str) -> SkyRLConfig:
    """The configuration that `dump_yaml` wrote. Raises ConfigurationError; rules between keys are not checked again."""
    problems: list[Problem] = []
    tree = _document(text, "the stored configuration", problems)
    data, places = read_tree(tree, problems)
    config = _validated(data, places, problems)
    raise_problems(problems)
    assert config is not None
    return config


def dump_yaml(config: SkyRLConfig) -> str:
    """The whole configuration as YAML, which `load_config` reads back to an equal one."""
    return write_yaml(plain(config))


def _build(tree: Tree, problems: list[Problem]) -> SkyRLConfig | None:
    """Validate what was read; add rules between keys and missing features to what is wrong already."""
    data, places = read_tree(tree, problems)
    config = _validated(data, places, problems)
    if config is None:
        return None
    problems += [
        Problem(text=problem.text, path=problem.path, where=places.get(problem.path, ""), unavailable=True)
        for problem in missing_features(config)
    ]
    # Rules compare keys; with some of them wrong or missing they would blame the wrong one.
    if all(problem.unavailable for problem in problems):
        problems += [Problem(text=message) for message in config.broken_rules()]
    return config


def _validated(data: dict[str, Any], places: Mapping[str, str], problems: list[Problem]) -> SkyRLConfig | None:
    """The model of `data`; its wrong values become problems and are left out, so that the rest is still checked."""
    try:
        return SkyRLConfig.model_validate(data)
    except ValidationError as error:
        wrong: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            path, keys = _path_of(detail["loc"])
            wrong.setdefault(path, _value_problem(path, keys, detail, data, places))
        problems += wrong.values()
        pruned = data
        for path in wrong:
            pruned = _without(pruned, path.split("."))
        if pruned == data:
            return None
        return _validated(pruned, places, problems)


def _path_of(loc: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """The key that a pydantic location belongs to, and what lies inside its value."""
    path = ""
    for position, part in enumerate(loc):
        candidate = f"{path}.{part}" if path else str(part)
        if candidate in leaves():
            return candidate, loc[position + 1 :]
        if candidate not in sections():
            return path, loc[position:]
        path = candidate
    return path, ()


def _value_problem(
    path: str, keys: tuple[int | str, ...], detail: Any, data: dict[str, Any], places: Mapping[str, str]
) -> Problem:
    where = places.get(path, "")
    inner = ".".join(str(key) for key in keys)
    if detail["type"] == "missing":
        return Problem(
            text=f"{path}.{inner} is needed: give it, or leave {path} out" if inner else f"{path} is needed", path=path
        )
    if path in leaves() and dict in leaves()[path].kinds and inner:
        reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
        return Problem(text=f"{path}.{inner}: {reason[:1].lower()}{reason[1:]}", path=path, where=where)
    given: Any = data
    for name in path.split("."):
        given = given.get(name) if isinstance(given, dict) else None
    wanted = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else ""
    if not wanted:
        wanted = f"expected {describe(leaves()[path].field)}" if path in leaves() else "expected a section of keys"
    return Problem(text=f"{path}={show(given)}: {wanted}", path=path, where=where)


def _without(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    name, *rest = names
    if name not in data:
        return data
    if not rest or not isinstance(data[name], dict):
        return {key: value for key, value in data.items() if key != name}
    return data | {name: _without(data[name], rest)}


def _file_tree(path: str | Path | None, problems: list[Problem]) -> Tree:
    if path is None:
        return {}
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.append(Problem(text=f"the configuration file {file} does not exist"))
    except UnicodeDecodeError:
        problems.append(Problem(text=f"the configuration file {file} is not UTF-8 text"))
    except OSError as error:
        problems.append(Problem(text=f"the configuration file {file} cannot be read: {error.strerror}"))
    else:
        return _document(text, str(file), problems)
    return {}


def _document(text: str, name: str, problems: list[Problem]) -> Tree:
    try:
        entry = read_yaml(text, f"line {{line}} of {name.replace('{', '{{').replace('}', '}}')}")
    except YamlTextError as error:
        what = "is not valid YAML" if error.syntax else "cannot be used"
        problems.append(Problem(text=f"{name} {what} in line {error.line}: {error}"))
        return {}
    if entry is None:
        return {}
    if not isinstance(entry.value, dict):
        problems.append(Problem(text=f"{name} must hold keys and values, such as 'trainer:' with indented keys below"))
        return {}
    return entry.value


def _word_tree(words: Sequence[str], problems: list[Problem]) -> Tree:
    tree: Tree = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith(("+", "~")):
            bare = key.lstrip("+~")
            text = f"{word}: leave out the '{key[0]}'; keys below engine_init_kwargs and its like are set as any other"
            problems.append(Problem(text=text, path=bare))
            continue
        if not equals or not _KEY.match(key):
            problems.append(Problem(text=f"{word!r} is not of the form key=value, such as trainer.epochs=2"))
            continue
        where = f"word {word}"
        try:
            entry = read_yaml(value, where.replace("{", "{{").replace("}", "}}"))
        except YamlTextError as error:
            reason = f"{value!r} is not a YAML value, quote it: {error}" if error.syntax else str(error)
            problems.append(Problem(text=f"{key}: {reason}", path=key))
            continue
        put(tree, key, entry if entry is not None else _null_entry(where))
    return tree


def _null_entry(where: str) -> Entry:
    entry = read_yaml("null", where.replace("{", "{{").replace("}", "}}"))
    assert entry is not None
    return entry


def _environment_problems(environment: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(text=f"the environment variable {name} is set, which SkyRL reads and this does not: {remedy}")
        for name, remedy in ENVIRONMENT_FLAGS.items()
        if name in environment
    ]
