"""Chat templates in place of the tokenizer's own: by name, or from a Jinja file."""

from pathlib import Path

from skyrl_core.config.generator import ChatTemplateConfig
from skyrl_core.errors import ConfigurationError

_TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _marked_chatml(assistant_text: str) -> str:
    """ChatML with what the assistant generates (its text and end of turn) between generation tags."""
    return (
        "{% for message in messages %}"
        "{% if message['role'] != 'assistant' %}" + _TURN + "{% else %}"
        "{{ '<|im_start|>assistant\\n' }}"
        "{% generation %}{{ " + assistant_text + " + '<|im_end|>' }}{% endgeneration %}"
        "{{ '\\n' }}"
        "{% endif %}{% endfor %}" + _GENERATION_PROMPT
    )


# Plain roles in ChatML, without the thinking blocks and default system prompts that model templates inject. The qwen3
# ones are SkyRL's names: they keep the thinking of every turn, or only that of a final assistant message. Deviation:
# ours write the assistant's opening words when a generation prompt is asked for, SkyRL's leave them out.
_TEMPLATES = {
    "chatml": "{% for message in messages %}" + _TURN + "{% endfor %}" + _GENERATION_PROMPT,
    "qwen3_with_thinking": _marked_chatml("message['content']"),
    "qwen3_without_thinking": _marked_chatml(
        "(message['content'] if loop.last else message['content'].split('</think>')[-1].lstrip('\\n'))"
    ),
}


def chat_template(config: ChatTemplateConfig) -> str | None:
    """The Jinja text that the configuration chooses; None for the tokenizer's own.

    Raises ConfigurationError for an unknown name or a file that cannot be read.
    """
    if config.name_or_path is None:
        return None
    if config.source == "file":
        try:
            return Path(config.name_or_path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"generator.chat_template.name_or_path={config.name_or_path} cannot be read: {error}"
            ) from error
    if config.name_or_path not in _TEMPLATES:
        raise ConfigurationError(
            f"generator.chat_template.name_or_path={config.name_or_path!r} is no template; there are "
            f"{', '.join(sorted(_TEMPLATES))}; for a file set generator.chat_template.source=file"
        )
    return _TEMPLATES[config.name_or_path]
