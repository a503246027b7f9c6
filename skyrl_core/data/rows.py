"""Rows of parquet, json and jsonl files and of Hugging Face datasets, as plain lists, dicts, strings and numbers."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any

from skyrl_core.errors import DatasetError

Row = dict[str, Any]
FILE_KINDS = (".parquet", ".json", ".jsonl")


def is_data_file(source: str) -> bool:
    """True for a path or URL of a data file, False for what must be a Hugging Face dataset name."""
    return _kind(source) in FILE_KINDS


def source_labels(sources: Sequence[str]) -> list[str]:
    """A short name for each source, unique among them and independent of the folder the data lies in.

    A file is named by its stem; where stems collide, by as much of the end of its path as tells the files apart
    (`gsm8k/train.parquet`, `math/train.parquet`). Raises DatasetError for a source that is given twice.
    """
    repeated = [source for source, count in Counter(sources).items() if count > 1]
    if repeated:
        raise DatasetError(f"{repeated[0]} is given twice: every uid would occur twice an epoch")
    candidates = [_names(source) for source in sources]
    labels = [names[0] for names in candidates]
    depth = 0
    while len(set(labels)) < len(labels):
        depth += 1
        count = Counter(labels)
        labels = [
            label if count[label] == 1 else names[min(depth, len(names) - 1)]
            for label, names in zip(labels, candidates, strict=True)
        ]
        if depth > max(len(names) for names in candidates):
            twice = next(label for label, number in Counter(labels).items() if number > 1)
            raise DatasetError(f"{twice} is given twice: every uid would occur twice an epoch")
    return labels


def read_rows(source: str) -> list[Row]:
    """All rows of one source, in its order, with absent values (None) left out of rows and nested dicts.

    Parquet pads the fields that a struct lacks with None, so None is taken for absent in every format: the same data
    gives the same rows whichever file it is in. Raises DatasetError naming the source for a missing, unreadable or
    malformed one.
    """
    kind = _kind(source)
    if kind == ".parquet":
        rows = _parquet_rows(source)
    elif kind in FILE_KINDS:
        rows = _json_rows(source)
    else:
        rows = _hub_rows(source)
    return [without_absent(row) for row in rows]


def without_absent(value: Any) -> Any:
    """`value` with None entries left out of every dict in it; list elements keep their places."""
    if isinstance(value, Mapping):
        return {key: without_absent(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_absent(item) for item in value]
    return value


def _kind(source: str) -> str:
    return PurePosixPath(source).suffix.lower()


def _names(source: str) -> list[str]:
    """Names for a source from short to long: stem, file name, then with one parent folder after the other."""
    if not is_data_file(source):
        return [source]
    path = PurePosixPath(source.replace("\\", "/"))
    parts = [part for part in path.parts if part != "/"]
    return [path.stem, *("/".join(parts[-count:]) for count in range(1, len(parts) + 1))]


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    try:
        if "://" in source:
            import fsspec

            with fsspec.open(source, "rb") as remote:
                yield remote
        else:
            with open(os.path.expanduser(source), "rb") as local:
                yield local
    except FileNotFoundError:
        raise DatasetError(f"{source} does not exist") from None
    except OSError as error:
        raise DatasetError(f"{source} cannot be read: {error}") from error


def _parquet_rows(source: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    with _opened(source) as file:
        try:
            table = pyarrow.parquet.read_table(file)
            rows: list[Row] = table.to_pylist(maps_as_pydicts="strict")
        except (pyarrow.ArrowException, KeyError, ValueError) as error:
            raise DatasetError(f"{source} is no readable parquet file: {error}") from error
    return rows


def _json_rows(source: str) -> list[Row]:
    """A json file holds one array of objects, or, like jsonl, one object a line."""
    with _opened(source) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source} is not UTF-8 text: {error}") from error
    items: list[Any]
    if text.lstrip().startswith("["):
        items = _parse(text, source)
    else:
        # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
        lines = [line for line in enumerate(text.split("\n"), start=1) if line[1].strip()]
        items = [_parse(line, f"{source}, line {number}") for number, line in lines]
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise DatasetError(f"{source}, row {index} must be an object, not {type(item).__name__}: {str(item)[:80]}")
    return items


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _hub_rows(source: str) -> list[Row]:
    import datasets

    name, colon, split = source.partition(":")
    try:
        found = datasets.load_dataset(name)
    except Exception as error:  # datasets raises the errors of every library and service it may use
        reason = " ".join(str(error).split())[:300]
        raise DatasetError(f"dataset {name} cannot be loaded: {type(error).__name__}: {reason}") from error
    split = split if colon else "train"
    if split not in found:
        raise DatasetError(f"dataset {name} has no split {split!r}; it has {', '.join(sorted(map(str, found)))}")
    return [dict(row) for row in found[split]]
