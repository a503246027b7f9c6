"""Reads YAML into a tree that remembers where each value stands and how it was written, and writes plain values back.

Scalars follow OmegaConf, which SkyRL uses: YAML 1.1 with `1e-6` as a number and without dates. Two rules of YAML 1.1
that surprise are left out: `010` and `1:30` are text, not 8 and 90.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

_BOOL = re.compile(r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^(?:<<)$")
_INTERPOLATION = re.compile(r"\$\{([^}]*)\}")
_ENVIRONMENT = re.compile(r"^\s*oc\.env:\s*([A-Za-z_]\w*)\s*(?:,(.*))?$", re.DOTALL)
_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:$|_)", re.IGNORECASE)
_MOST_NODES = 20_000
_STANDARD = "tag:yaml.org,2002:"
_TAGS = frozenset({"null", "bool", "int", "float", "str", "map", "seq"})


class _Loader(yaml.SafeLoader):
    """A safe loader with resolvers of its own."""


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("yYnNtTfFoO"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
    _class.add_implicit_resolver("tag:yaml.org,2002:merge", _MERGE, ["<"])


class YamlTextError(ValueError):
    """Text that cannot be used; `line` counts from 1, `syntax` is False when it is YAML but not of the kind we take."""

    def __init__(self, message: str, line: int, *, syntax: bool = False) -> None:
        super().__init__(message)
        self.line = line
        self.syntax = syntax


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value and the text it was written as.

    `retype` is True when the text came from the environment: it is text unless its key wants another type.
    """

    value: Any
    text: str
    plain: bool
    retype: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value of the tree and where it stands: "word a=1" or "line 3 of file.yaml"."""

    value: "dict[str, Entry] | list[Entry] | Scalar"
    where: str


Tree = dict[str, Entry]


class _Reader:
    """Turns the nodes of one document into entries."""

    def __init__(self, loader: _Loader, where: str, environment: Mapping[str, str]) -> None:
        self._loader = loader
        self._where = where
        self._environment = environment
        self._open: set[int] = set()
        self._count = 0

    def entry(self, node: yaml.Node) -> Entry:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > _MOST_NODES or id(node) in self._open:
            raise YamlTextError("anchors that repeat or contain themselves without end", line)
        if node.tag.removeprefix(_STANDARD) not in _TAGS:
            raise YamlTextError(f"values with the tag {node.tag} are not taken", line)
        self._open.add(id(node))
        where = self._where.format(line=line)
        value: dict[str, Entry] | list[Entry] | Scalar
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.entry(item) for item in node.value]
        else:
            assert isinstance(node, yaml.ScalarNode)
            value = self._scalar(node, line)
        self._open.discard(id(node))
        return Entry(value=value, where=where)

    def _mapping(self, node: yaml.MappingNode) -> Tree:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise YamlTextError("a key that is not plain text", key.start_mark.line + 1)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise YamlTextError(f"the key {key.value!r} is given twice", key.start_mark.line + 1)
            seen.add(key.value)
        self._loader.flatten_mapping(node)
        return {key.value: replace(self.entry(value), where=self._line_of(key)) for key, value in node.value}

    def _line_of(self, node: yaml.Node) -> str:
        return self._where.format(line=node.start_mark.line + 1)

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Scalar:
        text = node.value
        plain = node.style is None
        if "${" in text:
            try:
                return Scalar(value=(done := self._resolve(text)), text=done, plain=plain, retype=plain)
            except ValueError as error:
                raise YamlTextError(str(error), line) from None
        try:
            value = self._loader.construct_object(node)
        except ValueError:
            raise YamlTextError(f"{text!r} is no {node.tag.removeprefix(_STANDARD)}", line) from None
        return Scalar(value=value, text=text, plain=plain)

    def _resolve(self, text: str) -> str:
        def substitute(match: re.Match[str]) -> str:
            inner = _ENVIRONMENT.match(match.group(1))
            if inner is None:
                raise ValueError(
                    f"{match.group(0)} is not understood: only ${{oc.env:NAME}} and ${{oc.env:NAME,default}} are"
                )
            name, default = inner.groups()
            if _SECRET.search(name):
                raise ValueError(
                    f"{name} looks like a secret: the configuration is stored beside the run, "
                    "so leave it in the environment"
                )
            value = self._environment.get(name, default)
            if value is None:
                raise ValueError(f"the environment variable {name} of {match.group(0)} is not set")
            return value

        return _INTERPOLATION.sub(substitute, text)


def read_yaml(text: str, where: str, environment: Mapping[str, str] | None = None) -> Entry | None:
    """The document in `text`, or None when it is empty.

    `where` says where a value stands; "{line}" in it becomes the line. Raises YamlTextError on anything but one
    document of plain values.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        return _Reader(loader, where, os.environ if environment is None else environment).entry(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlTextError(error.problem or "a syntax error", mark.line + 1 if mark else 1, syntax=True) from None
    except yaml.YAMLError as error:
        raise YamlTextError(str(error).splitlines()[0], 1, syntax=True) from None


def plain_scalar(text: str) -> Any:
    """What unquoted `text` means in YAML."""
    loader = _Loader(text)
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def write_yaml(value: Any) -> str:
    """Plain values as YAML that `read_yaml` gives back unchanged; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def write_inline(value: Any) -> str:
    """A plain value on one line, as in a `key=value` word."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")
