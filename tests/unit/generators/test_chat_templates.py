"""Named and own chat templates."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_core.config.generator import ChatTemplateConfig
from skyrl_core.errors import ConfigurationError
from skyrl_core.generators.templates import chat_template

CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "<think>t1</think>\n\na1"},
    {"role": "user", "content": "q2"},
]
LAST = {"role": "assistant", "content": "<think>t2</think>a2"}


def _render(tokenizer: Any, name: str, chat: list[dict[str, str]], *, prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        chat,
        chat_template=chat_template(ChatTemplateConfig(name_or_path=name)),
        tokenize=False,
        add_generation_prompt=prompt,
    )
    return text


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_no_name_means_the_tokenizers_own():
    assert chat_template(ChatTemplateConfig()) is None


@pytest.mark.parametrize("name", ["chatml", "qwen3_with_thinking"])
def test_thinking_is_kept_in_every_turn(tokenizer: Any, name: str):
    expected = _turn("user", "q1") + _turn("assistant", CHAT[1]["content"]) + _turn("user", "q2")
    assert _render(tokenizer, name, CHAT, prompt=True) == expected + "<|im_start|>assistant\n"
    assert _render(tokenizer, name, CHAT, prompt=False) == expected


def test_thinking_of_earlier_turns_is_dropped_and_that_of_the_last_kept(tokenizer: Any):
    expected = _turn("user", "q1") + _turn("assistant", "a1") + _turn("user", "q2")
    name = "qwen3_without_thinking"
    assert _render(tokenizer, name, CHAT, prompt=True) == expected + "<|im_start|>assistant\n"
    assert _render(tokenizer, name, [*CHAT, LAST], prompt=False) == expected + _turn("assistant", LAST["content"])


def test_a_file_is_read_as_it_is(tmp_path: Path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    assert chat_template(ChatTemplateConfig(source="file", name_or_path=str(file))) == "{{ messages }}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ChatTemplateConfig(name_or_path="qwen3"), "'qwen3' is no template; there are chatml, qwen3_with_thinking"),
        (ChatTemplateConfig(source="file", name_or_path="/does/not/exist.jinja"), "cannot be read"),
    ],
)
def test_unknown_templates_are_configuration_errors(config: ChatTemplateConfig, message: str):
    with pytest.raises(ConfigurationError, match=message):
        chat_template(config)
