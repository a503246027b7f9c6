"""Chat templates in place of the tokenizer's own: by name, or from a Jinja file."""

from pathlib import Path

from skyrl_core.config.generator import ChatTemplateConfig
from skyrl_core.errors import ConfigurationError

# Plain roles in ChatML, without the thinking blocks and default system prompts that model templates inject.
_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
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
        except OSError as error:
            raise ConfigurationError(
                f"generator.chat_template.name_or_path={config.name_or_path} cannot be read: {error.strerror}"
            ) from error
    if config.name_or_path not in _TEMPLATES:
        raise ConfigurationError(
            f"generator.chat_template.name_or_path={config.name_or_path!r} is no template; there are "
            f"{', '.join(sorted(_TEMPLATES))}; for a file set generator.chat_template.source=file"
        )
    return _TEMPLATES[config.name_or_path]
