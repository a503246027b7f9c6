"""Prompts: SkyRL's rows checked, filtered by their length in the template that is used, and named for good."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from skyrl_core.data import dataset as dataset_module
from skyrl_core.data.dataset import PromptDataset
from skyrl_core.data.tokenizer import load_tokenizer
from skyrl_core.errors import ConfigurationError, DatasetError
from skyrl_core.testing.tiny_model import build_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # A chat of one user message becomes <bos><user>CONTENT<assistant>: its length in characters plus 3.
    return load_tokenizer(str(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def row(content: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], **columns}


def save(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(item) for item in rows), encoding="utf-8")
    return str(path)


def test_rows_become_prompts_and_environments_get_every_other_column(tmp_path: Path, tokenizer: Any) -> None:
    full = row(
        "1+1=",
        env_class="gsm8k",
        data_source="sums",
        reward_spec={"method": "rule", "ground_truth": "2"},
        extra_info={"index": 7},
        hint="add",
    )
    data = PromptDataset([save(tmp_path / "train.jsonl", [full, row("2")])], tokenizer, default_env_class="aime")
    first, second = data.prompts
    assert first.messages == ({"role": "user", "content": "1+1="},)
    assert (first.uid, first.env_class, first.data_source) == ("train:0", "gsm8k", "sums")
    assert first.env_extras == {
        "data_source": "sums",
        "reward_spec": {"method": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
        "hint": "add",
    }
    assert (second.uid, second.env_class, second.data_source, second.env_extras) == ("train:1", "aime", "unknown", {})
    assert len(data) == 2
    assert data[1] is second
    assert list(data) == [first, second]
    assert data.env_classes == {"gsm8k", "aime"}


def test_parquet_and_jsonl_of_the_same_rows_are_the_same_dataset(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        row("1", env_class="aime", extra_info={"index": 0, "note": "x"}),
        row("2", env_class="aime", extra_info={"index": 1}),
    ]
    lines = save(tmp_path / "train.jsonl", rows)
    table = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    one, other = (PromptDataset([source], tokenizer, max_prompt_length=9) for source in (lines, str(table)))
    assert one.prompts == other.prompts
    assert one.fingerprint == other.fingerprint


def test_the_filter_counts_the_template_and_keeps_the_limit_itself(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = save(tmp_path / "train.jsonl", [row("1" * length, env_class="e") for length in (4, 5, 6, 1)])
    with caplog.at_level(logging.INFO, logger="skyrl_core.data.dataset"):
        data = PromptDataset([source], tokenizer, max_prompt_length=8)
    assert [prompt.uid for prompt in data] == ["train:0", "train:1", "train:3"]
    assert data[1].messages[0]["content"] == "11111"
    assert (data.counts.read, data.counts.kept, data.counts.limit) == (4, 3, 8)
    assert f"3 of the 4 rows in {source} have prompts of at most 8 tokens" in caplog.text


def test_the_filter_measures_with_the_template_and_variables_that_rollouts_will_use(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = save(tmp_path / "train.jsonl", [row("12", env_class="e"), row("123", env_class="e")])
    template = "{{ messages[0]['content'] * times }}"
    data = PromptDataset(
        [source], tokenizer, max_prompt_length=8, chat_template=template, chat_template_kwargs={"times": 4}
    )
    assert [prompt.uid for prompt in data] == ["train:0"]


def test_several_files_keep_their_order_and_names(tmp_path: Path, tokenizer: Any) -> None:
    first = save(tmp_path / "gsm8k/train.jsonl", [row("1", env_class="e")])
    second = save(tmp_path / "math/train.jsonl", [row("2", env_class="e"), row("3", env_class="e")])
    data = PromptDataset([first, second], tokenizer)
    assert [prompt.uid for prompt in data] == ["gsm8k/train.jsonl:0", "math/train.jsonl:0", "math/train.jsonl:1"]


def test_a_uid_column_names_the_rows(tmp_path: Path, tokenizer: Any) -> None:
    source = save(tmp_path / "t.jsonl", [row("1", uid="a", env_class="e"), row("2", uid=7, env_class="e")])
    assert [prompt.uid for prompt in PromptDataset([source], tokenizer)] == ["a", "7"]


def test_a_uid_that_occurs_twice_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    source = save(tmp_path / "t.jsonl", [row("1", uid="a", env_class="e"), row("2", uid="a", env_class="e")])
    with pytest.raises(DatasetError, match="uid 'a' occurs twice, in rows 0 and 1"):
        PromptDataset([source], tokenizer)


@pytest.mark.parametrize(
    ("broken", "column", "said"),
    [
        ({"question": "1"}, "prompt", "missing; the row has question"),
        ({"prompt": "1+1="}, "prompt", "must be a list of messages .* got str"),
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt": ["1+1="]}, "prompt", "message 0 must be an object with role and content, got str"),
        ({"prompt": [{"content": "1"}]}, "prompt", "message 0 has no role"),
        ({"prompt": [{"role": "user", "content": "1"}, {"role": "user"}]}, "prompt", "message 1 has no content"),
        (row("1", env_class=3), "env_class", "must name an environment, got 3"),
        (row("1"), "env_class", r"got None; or set environment\.env_class"),
        (row("1", env_class="e", uid=1.5), "uid", "must be a text or an integer, got 1.5"),
        (row("1", env_class="e", data_source=["x"]), "data_source", r"must be a text, got \['x'\]"),
        (row("1", env_class="e", reward_spec="2"), "reward_spec", "must be an object with fields, got str"),
    ],
)
def test_a_malformed_row_is_named_by_file_row_and_column(
    tmp_path: Path, tokenizer: Any, broken: dict[str, Any], column: str, said: str
) -> None:
    source = save(tmp_path / "t.jsonl", [row("1", env_class="e"), broken])
    with pytest.raises(DatasetError, match=said) as caught:
        PromptDataset([source], tokenizer)
    assert str(caught.value).startswith(f"{source}, row 1 (the first is 0), column {column!r}: ")


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path, tokenizer: Any) -> None:
    source = save(tmp_path / "t.jsonl", [row("1", env_class="e"), row("2", env_class="e")])
    template = "{% if messages[0]['content'] == '2' %}{{ raise_exception('no twos') }}{% endif %}1"
    with pytest.raises(DatasetError, match="the chat template fails on row t:1, column 'prompt': no twos"):
        PromptDataset([source], tokenizer, max_prompt_length=8, chat_template=template)


def test_a_tokenizer_without_a_template_is_no_fault_of_the_data(tmp_path: Path) -> None:
    bare = SimpleNamespace(chat_template=None, name_or_path="some/model")
    with pytest.raises(ConfigurationError, match="some/model has no chat template"):
        PromptDataset([save(tmp_path / "t.jsonl", [row("1", env_class="e")])], bare, max_prompt_length=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_an_empty_file_is_refused(tmp_path: Path, tokenizer: Any, name: str) -> None:
    (tmp_path / name).write_text("[]" if name.endswith("json") else "\n")
    with pytest.raises(DatasetError, match=f"{name} has no rows"):
        PromptDataset([str(tmp_path / name)], tokenizer)
    with pytest.raises(DatasetError, match="no data sources"):
        PromptDataset([], tokenizer)


def test_none_left_after_the_filter_says_counts_and_limit(tmp_path: Path, tokenizer: Any) -> None:
    source = save(tmp_path / "t.jsonl", [row("11", env_class="e")] * 3)
    with pytest.raises(DatasetError) as caught:
        PromptDataset([source], tokenizer, max_prompt_length=4)
    assert str(caught.value) == (
        f"no prompt is left: 0 of the 3 rows in {source} have prompts of at most 4 tokens; "
        "raise trainer.max_prompt_length"
    )


def test_fewer_rows_than_a_batch_says_counts_and_limit(tmp_path: Path, tokenizer: Any) -> None:
    source = save(tmp_path / "t.jsonl", [row("1" * length, env_class="e") for length in (1, 2, 9)])
    with pytest.raises(DatasetError) as caught:
        PromptDataset([source], tokenizer, max_prompt_length=8, min_rows=3)
    assert str(caught.value) == (
        f"trainer.train_batch_size is 3, but 2 of the 3 rows in {source} have prompts of at most 8 tokens"
    )
    assert len(PromptDataset([source], tokenizer, max_prompt_length=8, min_rows=2)) == 2
    with pytest.raises(DatasetError, match=r"is 4, but 3 rows in .*, no length limit"):
        PromptDataset([source], tokenizer, min_rows=4)


def test_the_fingerprint_changes_with_content_order_and_filter_only(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(str(number), env_class="e", reward_spec={"a": 1, "b": number}) for number in range(4)]
    reordered_keys = [{**item, "reward_spec": dict(reversed(item["reward_spec"].items()))} for item in rows]
    changed = [*rows[:3], row("3", env_class="e", reward_spec={"a": 1, "b": 9})]

    def fingerprint(folder: str, content: list[dict[str, Any]], **settings: Any) -> str:
        return PromptDataset([save(tmp_path / folder / "t.jsonl", content)], tokenizer, **settings).fingerprint

    first = fingerprint("a", rows)
    assert first == fingerprint("elsewhere", reordered_keys)
    others = [
        fingerprint("b", changed),
        fingerprint("c", rows[::-1]),
        fingerprint("d", rows[:3]),
        fingerprint("e", rows, max_prompt_length=8),
        fingerprint("f", rows, chat_template="{{ messages[0]['content'] }}"),
    ]
    assert len({first, *others}) == 6


def test_worker_processes_measure_the_same_lengths(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "t.jsonl", [row("1" * (number % 7), env_class="e") for number in range(40)])
    alone = PromptDataset([source], tokenizer, max_prompt_length=6, num_workers=2)
    started: list[int] = []
    pool = dataset_module.ProcessPoolExecutor

    def counting(workers: int, **options: Any) -> Any:
        started.append(workers)
        return pool(workers, **options)

    monkeypatch.setattr(dataset_module, "ROWS_WORTH_A_PROCESS", 20)
    monkeypatch.setattr(dataset_module, "ProcessPoolExecutor", counting)
    together = PromptDataset([source], tokenizer, max_prompt_length=6, num_workers=8)
    assert started == [2]
    assert together.prompts == alone.prompts
    # Contents of 0 to 3 characters fit beside the template's three tokens: 24 of 40 rows have number % 7 <= 3.
    assert len(alone) == 24
