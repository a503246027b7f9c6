"""`skyrl-flows config`: print the resolved configuration, or the list of keys."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from skyrl_core.config import KeyInfo, dump_yaml, list_keys, load_config
from skyrl_core.config.tree import nearest_keys
from skyrl_core.config.values import show
from skyrl_core.errors import ConfigurationError

_TYPE_WIDTH = 26
_DEFAULT_WIDTH = 22
_LEAST_MEANING_WIDTH = 28
_GAP = "  "
_INDENT = "      "


def run(args: argparse.Namespace) -> int:
    """Print YAML to standard output: every key with the value it would have."""
    if args.help_keys is not None:
        print("\n".join(key_table(args.help_keys, shutil.get_terminal_size((120, 24)).columns)))
    else:
        print(dump_yaml(load_config(args.config, args.overrides)), end="")
    return 0


def key_table(prefix: str, width: int) -> Iterator[str]:
    """Lines of a table of the keys that equal `prefix` or stand below it, section by section, `width` columns wide."""
    keys = [key for key in list_keys() if _below(key.path, prefix)]
    if not keys:
        close = nearest_keys(prefix)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigurationError(f"no key begins with {prefix}{hint}")
    by_section: dict[str, list[KeyInfo]] = {}
    for key in keys:
        by_section.setdefault(key.path.rpartition(".")[0], []).append(key)
    for section, members in by_section.items():
        yield f"{section}:"
        name_width = max(len(_name(key)) for key in members)
        meaning_width = width - name_width - _TYPE_WIDTH - _DEFAULT_WIDTH - 3 * len(_GAP)
        for key in members:
            cells = (_name(key), key.type, show(key.default), _meaning(key))
            if meaning_width >= _LEAST_MEANING_WIDTH:
                yield from _row(cells, (name_width, _TYPE_WIDTH, _DEFAULT_WIDTH, meaning_width))
            else:
                yield from _wrap(f"{cells[0].strip()} ({cells[1]}; default {cells[2]})", width, "  ", _INDENT)
                yield from _wrap(cells[3], width, _INDENT, _INDENT)
        yield ""


def _below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix.removesuffix(".") + ".")


def _name(key: KeyInfo) -> str:
    return f"  {key.path.rpartition('.')[2]}"


def _meaning(key: KeyInfo) -> str:
    return f"{key.description} (not in SkyRL)" if key.ours else key.description


def _row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [[cells[0]]]
    for text, width in zip(cells[1:], widths[1:], strict=True):
        columns.append(_wrap(text, width) or [""])
    for line in zip_longest(*columns, fillvalue=""):
        yield _GAP.join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
