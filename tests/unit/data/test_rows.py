"""Rows come back plain, and the same whatever the file format; bad files are named."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from skyrl_core.data.rows import read_rows, source_labels, without_absent
from skyrl_core.errors import DatasetError

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "system", "content": "Be\u2028brief."}, {"role": "user", "content": "1+1="}],
        "env_class": "arithmetic",
        "reward_spec": {"method": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "levels": [1, 2], "source": {"book": "A"}},
    },
    {
        "prompt": [{"role": "user", "content": "2+2="}],
        "env_class": "arithmetic",
        "reward_spec": {"method": "rule", "ground_truth": "4"},
        "extra_info": {"index": 1, "weight": 0.5},
    },
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_nested_chats_are_the_same_plain_rows_from_every_format(tmp_path: Path, suffix: str) -> None:
    rows = read_rows(write(tmp_path / f"train{suffix}", ROWS))
    assert rows == ROWS
    message = rows[0]["prompt"][0]
    assert type(rows[0]["prompt"]) is list
    assert type(message) is dict
    assert type(rows[0]["extra_info"]["levels"]) is list


def test_a_json_file_of_lines_reads_like_an_array(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert read_rows(str(path)) == ROWS


def test_fields_that_parquet_pads_with_none_are_absent_in_every_format(tmp_path: Path) -> None:
    padded = [{"a": {"x": 1, "y": None}, "b": None, "c": [None, {"z": None}]}]
    expected = [{"a": {"x": 1}, "c": [None, {}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(padded[0]), encoding="utf-8")
    assert read_rows(str(path)) == expected
    assert without_absent(padded) == expected


def test_a_parquet_map_becomes_a_dict(tmp_path: Path) -> None:
    column = pyarrow.array([[("x", 1), ("y", 2)]], type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({"extra_info": column}), tmp_path / "m.parquet")
    assert read_rows(str(tmp_path / "m.parquet")) == [{"extra_info": {"x": 1, "y": 2}}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"PAR1 no parquet", "no readable parquet"),
        ("a.jsonl", b'{"prompt": []}\n{"prompt": [}\n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"x": NaN}\n', "line 1 is not JSON: NaN"),
        ("a.json", b'[{"x": 1}, 7]', "row 1 must be an object, not int"),
        ("a.json", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_malformed_file_is_named_with_the_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=said) as caught:
        read_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["gone.parquet", "gone.json", "gone.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError, match=f"{name} does not exist"):
        read_rows(str(tmp_path / name))


def test_remote_files_are_read_through_fsspec() -> None:
    import fsspec

    with fsspec.open("memory://rows/train.jsonl", "wb") as file:
        file.write(json.dumps(ROWS[1]).encode())
    assert read_rows("memory://rows/train.jsonl") == [ROWS[1]]


def test_a_hub_dataset_is_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    padded = [
        {**row, "extra_info": {"levels": None, "source": None, "weight": None, **row["extra_info"]}} for row in ROWS
    ]
    built = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(padded), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"team/sums": built}[name])
    assert read_rows("team/sums") == ROWS
    assert read_rows("team/sums:test") == ROWS[:1]
    with pytest.raises(DatasetError, match=r"team/sums has no split 'dev'; it has test, train"):
        read_rows("team/sums:dev")
    with pytest.raises(DatasetError, match="dataset team/other cannot be loaded"):
        read_rows("team/other")


@pytest.mark.parametrize(
    ("sources", "labels"),
    [
        (["/data/gsm8k/train.parquet"], ["train"]),
        (["/d/a.parquet", "/d/b.json"], ["a", "b"]),
        (["/d/gsm8k/train.parquet", "/d/math/train.parquet"], ["gsm8k/train.parquet", "math/train.parquet"]),
        (["/d/train.parquet", "/d/train.json"], ["train.parquet", "train.json"]),
        (["x/s/train.json", "y/s/train.json", "z/a.json"], ["x/s/train.json", "y/s/train.json", "a"]),
        (["team/sums:train", "sums/train.json"], ["team/sums:train", "train"]),
    ],
)
def test_sources_are_labelled_by_what_tells_them_apart(sources: list[str], labels: list[str]) -> None:
    assert source_labels(sources) == labels


@pytest.mark.parametrize("sources", [["a.json", "a.json"], ["/d/a.json", "d/a.json"]])
def test_a_source_given_twice_is_refused(sources: list[str]) -> None:
    with pytest.raises(DatasetError, match="given twice"):
        source_labels(sources)
