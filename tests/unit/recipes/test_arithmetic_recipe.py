"""The quick start's problems, tokens and model, checked against what a reader would compute by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.data.dataset import PromptDataset
from skyrl_core.data.tokenizer import check_model_path, load_tokenizer, prompt_token_ids
from skyrl_core.environments.registry import make_environment
from skyrl_core.recipes.arithmetic import (
    ArithmeticSettings,
    draw_problems,
    ensure_arithmetic,
    question,
    solution,
    to_rows,
)
from skyrl_core.recipes.arithmetic_model import IGNORED_LABEL, WarmUp, encode_solutions

SMALL = ArithmeticSettings(train_size=30, test_size=10, warm_up=WarmUp(steps=2, batch_size=4, rise_steps=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "arithmetic"
    assert ensure_arithmetic(path, settings=SMALL) is True
    return path


@pytest.mark.parametrize(
    ("problem", "asked", "worked"),
    [
        ((12, 34), "12+34=", "06,04;46"),
        ((38, 45), "38+45=", "13,08;83"),
        ((99, 99), "99+99=", "18,19;198"),
        ((0, 7), "00+07=", "07,00;7"),
    ],
)
def test_problems_are_worked_units_first(problem: tuple[int, int], asked: str, worked: str) -> None:
    assert question(problem) == asked
    assert solution(problem) == worked


def test_problems_occur_once_and_the_held_out_ones_are_never_trained_on() -> None:
    train, test = draw_problems(ArithmeticSettings())
    assert (len(train), len(test)) == (5120, 200)
    assert len(set(train) | set(test)) == 5320
    assert all(0 <= number <= 99 for problem in train + test for number in problem)
    # Shuffled: the mean first summand of a sorted prefix would be near 26; 5120 random ones have 49.5 +- 0.4.
    assert 47 < sum(first for first, _ in train) / len(train) < 52
    assert draw_problems(ArithmeticSettings()) == (train, test)
    assert draw_problems(ArithmeticSettings(seed=1))[0] != train


def test_every_solution_earns_the_reward() -> None:
    for row in to_rows(draw_problems(SMALL)[0], "train"):
        env = make_environment(row["env_class"], {"reward_spec": row["reward_spec"]})
        assert env.step(row["extra_info"]["solution"])["reward"] == 1.0
        assert env.get_metrics() == {"format": 1.0}


def test_the_files_are_in_skyrls_format(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    train = PromptDataset([str(folder / "train.parquet")], tokenizer, max_prompt_length=8)
    test = PromptDataset([str(folder / "test.parquet")], tokenizer, max_prompt_length=8)
    assert (len(train), len(test)) == (30, 10)
    first, second = draw_problems(SMALL)[0][0]
    prompt = train[0]
    assert prompt.messages == ({"role": "user", "content": f"{first:02d}+{second:02d}="},)
    assert (prompt.uid, prompt.env_class, prompt.data_source) == ("train:0", "arithmetic", "arithmetic")
    assert prompt.env_extras["reward_spec"] == {"method": "rule", "ground_truth": str(first + second)}
    assert prompt.env_extras["extra_info"]["split"] == "train"
    assert not {str(prompt.messages) for prompt in train} & {str(prompt.messages) for prompt in test}


def test_a_chat_is_one_token_a_character(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    user = {"role": "user", "content": "12+34="}
    # <pad> 0 <bos> 1 <eos> 2 <unk> 3 <assistant> 4, digits 5 to 14, then + = , ;
    assert prompt_token_ids(tokenizer, [user]) == [1, 6, 7, 15, 8, 9, 16, 4]
    whole = tokenizer.apply_chat_template(
        [user, {"role": "assistant", "content": "06,04;46"}], tokenize=True, return_dict=False
    )
    assert whole == [1, 6, 7, 15, 8, 9, 16, 4, 5, 11, 17, 5, 9, 18, 9, 11, 2]
    assert tokenizer.decode(whole[8:], skip_special_tokens=True) == "06,04;46"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_warm_up_trains_on_exactly_the_tokens_that_follow_the_prompt(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    examples: list[Any] = [
        ([{"role": "user", "content": "12+34="}], "06,04;46"),
        ([{"role": "user", "content": "99+99="}], "18,19;198"),
    ]
    ids, labels = encode_solutions(tokenizer, examples)
    assert ids.tolist()[0] == [1, 6, 7, 15, 8, 9, 16, 4, 5, 11, 17, 5, 9, 18, 9, 11, 2, 0]
    assert labels.tolist()[0] == [IGNORED_LABEL] * 8 + [5, 11, 17, 5, 9, 18, 9, 11, 2, IGNORED_LABEL]
    chat = [*examples[1][0], {"role": "assistant", "content": examples[1][1]}]
    assert ids.tolist()[1] == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)


def test_the_model_is_a_hugging_face_folder_of_a_small_tied_fp32_qwen3(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    path = folder / "model"
    check_model_path(str(path))
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    # Embedding 19 x 128; per layer 4 x 128 x 128 attention, 3 x 128 x 512 MLP, norms 2 x 128 + 2 x 32; last norm 128.
    assert sum(weight.numel() for weight in model.parameters()) == 19 * 128 + 3 * (65536 + 196608 + 320) + 128
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    generation = json.loads((path / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"], generation["temperature"]) == (2, 0, 1.0)


def test_the_same_settings_make_the_same_files(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    ensure_arithmetic(again, settings=SMALL)
    manifest = json.loads((folder / "recipe.json").read_text())
    assert json.loads((again / "recipe.json").read_text()) == manifest
    assert {"train.parquet", "test.parquet", "model/model.safetensors", "model/tokenizer.json"} <= set(
        manifest["files"]
    )
    assert manifest["settings"]["warm_up"]["steps"] == 2


def test_progress_is_reported_and_torch_is_left_as_it_was(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    ensure_arithmetic(tmp_path / "a", settings=SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == threads


def test_a_second_call_does_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert ensure_arithmetic(folder, settings=SMALL) is False
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
