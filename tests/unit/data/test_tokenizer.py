"""Tokenizers and model folders: what is missing is said before anything loads."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_core.data.tokenizer import check_model_path, load_tokenizer, prompt_token_ids
from skyrl_core.errors import ConfigurationError
from skyrl_core.testing.tiny_model import build_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab="0123456789+= ")


def test_pads_on_the_left_with_its_padding_token(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<pad>"
    # Vocabulary: <pad> 0, then 8 special tokens in all, so "0" is 8 and "1" is 9.
    assert tokenizer(["1", "10"], padding=True)["input_ids"] == [[0, 9], [9, 8]]


def test_loads_the_same_as_transformers_own_choice_without_importing_torch(folder: Path) -> None:
    code = (
        "import sys; from skyrl_core.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)

    from transformers import AutoTokenizer

    ours, auto = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(auto)
    assert ours.get_vocab() == auto.get_vocab()
    assert ours.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    assert ours.special_tokens_map == auto.special_tokens_map
    assert ours.chat_template == auto.chat_template


def edit(folder: Path, target: Path, change: Callable[[dict[str, object]], None]) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    change(config)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def test_pads_with_the_end_of_text_where_there_is_no_padding_token_and_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def drop(config: dict[str, object]) -> None:
        del config["pad_token"]

    with caplog.at_level(logging.INFO, logger="skyrl_core.data.tokenizer"):
        tokenizer = load_tokenizer(str(edit(folder, tmp_path, drop)))
    assert tokenizer.pad_token == "<eos>"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert "no padding token" in caplog.text


def test_neither_padding_nor_end_of_text_is_an_error(folder: Path, tmp_path: Path) -> None:
    def drop(config: dict[str, object]) -> None:
        del config["pad_token"], config["eos_token"]

    with pytest.raises(ConfigurationError, match="neither a padding nor an end-of-text token"):
        load_tokenizer(str(edit(folder, tmp_path, drop)))


def test_asking_for_the_slow_implementation_where_there_is_none_warns(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tokenizer(str(folder), use_fast=False)
    assert "only the fast implementation" in caplog.text


def test_a_prompt_ends_with_the_words_that_open_the_answer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    messages = ({"role": "user", "content": "1+2="},)
    # <bos> 1, <user> 5, "1" 9, "+" 18, "2" 10, "=" 19, <assistant> 6
    assert prompt_token_ids(tokenizer, messages) == [1, 5, 9, 18, 10, 19, 6]


def test_a_template_and_its_variables_replace_the_tokenizers_own(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    template = "{{ messages[0]['content'] }}{{ ending }}"
    ids = prompt_token_ids(
        tokenizer, [{"role": "user", "content": "7"}], chat_template=template, chat_template_kwargs={"ending": "="}
    )
    assert ids == [15, 19]


def test_no_template_at_all_is_an_error_that_names_the_key(folder: Path, tmp_path: Path) -> None:
    bare = edit(folder, tmp_path, lambda config: None)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match=r"no chat template: .*generator\.chat_template"):
        prompt_token_ids(load_tokenizer(str(bare)), [{"role": "user", "content": "7"}])


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no tokenizer: looked for one of tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("load", [check_model_path, load_tokenizer])
def test_a_path_that_is_not_there_is_not_sent_to_the_hub(load: Callable[[str], object], tmp_path: Path) -> None:
    for path in (str(tmp_path / "gone"), "a/b/c", "./model", "~nobody/model"):
        with pytest.raises(ConfigurationError, match="does not exist"):
            load(path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match="is a file"):
        load(str(tmp_path / "model.gguf"))


def test_a_broken_tokenizer_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no tokenizer can be loaded from"):
        load_tokenizer(str(tmp_path))


def test_hub_names_are_left_to_the_hub() -> None:
    check_model_path("Qwen/Qwen2.5-1.5B-Instruct")
    check_model_path("gpt2")


def test_a_model_folder_needs_a_configuration_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        check_model_path(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="must hold a JSON object, not a list"):
        check_model_path(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigurationError, match=r"holds no weights: looked for \*\.safetensors"):
        check_model_path(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_model_path(str(tmp_path))


def test_every_shard_of_an_index_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    (tmp_path / "m-1.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigurationError, match=r"lacks m-2\.safetensors, which model\.safetensors\.index\.json names"
    ):
        check_model_path(str(tmp_path))
    (tmp_path / "m-2.safetensors").write_bytes(b"")
    check_model_path(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(ConfigurationError, match="has no weight_map"):
        check_model_path(str(tmp_path))


def test_checking_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from skyrl_core.data.tokenizer import check_model_path; check_model_path('a/b'); "
        "import skyrl_core.data.dataset, skyrl_core.data.loader, skyrl_core.recipes.ensure; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets', 'pyarrow', 'skyrl_gym')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
