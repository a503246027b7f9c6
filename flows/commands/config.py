"""`skyrl-flows config`: print the resolved configuration, or the list of keys."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest

from skyrl_core.config import KeyInfo, dump_yaml, list_keys, load_config
from skyrl_core.config.tree import nearest_keys
from skyrl_core.config.values import show
from skyrl_core.errors import ConfigurationError

_TYPE_WIDTH = 26
_DEFAULT_WIDTH = 22
_LEAST_MEANING_WIDTH = 24
_GAP = "  "


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
    for section, group in groupby(keys, key=lambda key: key.path.rpartition(".")[0]):
        members = list(group)
        name_width = max(len(_name(key)) for key in members)
        meaning_width = width - name_width - _TYPE_WIDTH - _DEFAULT_WIDTH - 3 * len(_GAP)
        widths = (name_width, _TYPE_WIDTH, _DEFAULT_WIDTH, max(meaning_width, _LEAST_MEANING_WIDTH))
        yield f"{section}:"
        for key in members:
            meaning = f"{key.description} (not in SkyRL)" if key.ours else key.description
            yield from _row((_name(key), key.type, show(key.default), meaning), widths)
        yield ""


def _below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix.removesuffix(".") + ".")


def _name(key: KeyInfo) -> str:
    return f"  {key.path.rpartition('.')[2]}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [
        [cells[0]],
        *(textwrap.wrap(text, width) or [""] for text, width in zip(cells[1:], widths[1:], strict=True)),
    ]
    for line in zip_longest(*columns, fillvalue=""):
        yield _GAP.join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()
