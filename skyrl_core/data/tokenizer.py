"""Loading tokenizers, turning chats into prompt tokens, and a light check of model folders before anything loads."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_core.data.carriers import Message
from skyrl_core.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?\Z")


def load_tokenizer(path: str, *, use_fast: bool = True, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer in a local folder, or of a Hugging Face model name, padding on the left.

    A tokenizer without a padding token pads with its end-of-text token, and the log says so. `use_fast=False` asks for
    the Python implementation; transformers 5 keeps one implementation of each tokenizer, so where it has no other the
    fast one is used, with a warning. Raises ConfigurationError when the path holds no tokenizer.
    """
    folder = _local_folder(path)
    if folder is not None and not _any_file(folder, TOKENIZER_FILES) and not trust_remote_code:
        raise ConfigurationError(f"{path} holds no tokenizer: looked for one of {', '.join(TOKENIZER_FILES)}")

    try:
        tokenizer = _load(path, folder, trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsers and the hub client raise
        raise ConfigurationError(f"no tokenizer can be loaded from {path}: {_one_line(error)}") from error
    if tokenizer.is_fast and not use_fast:
        log.warning("%s: transformers has only the fast implementation of this tokenizer; it is used", path)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(f"the tokenizer of {path} has neither a padding nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
        log.info("%s has no padding token: padding with its end-of-text token %r", path, tokenizer.eos_token)
    return tokenizer


def prompt_token_ids(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids [P] of a chat, with the words that open the assistant's turn at the end.

    The length filter and the generators both call this, so what is measured is what is sent. `chat_template` (Jinja
    text) replaces the tokenizer's own. Raises ConfigurationError when there is no template at all.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ConfigurationError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: choose one with generator.chat_template"
        )
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        chat_template=chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **(chat_template_kwargs or {}),
    )
    return [int(token) for token in ids]


def check_model_path(path: str) -> None:
    """A cheap look at a model folder, without loading anything: is there a config.json, and are there weights?

    Names that can be Hugging Face models are left to the hub. Raises ConfigurationError that says what was looked for.
    """
    folder = _local_folder(path)
    if folder is None:
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigurationError(f"{path} is no model folder: it has no config.json")
    _read_object(config)
    index = next((folder / name for name in INDEX_FILES if (folder / name).is_file()), None)
    if index is not None:
        shards = _read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigurationError(f"{index} has no weight_map: it does not say where the weights are")
        missing = sorted({str(name) for name in shards.values() if not (folder / str(name)).is_file()})
        if missing:
            raise ConfigurationError(f"{path} lacks {', '.join(missing)}, which {index.name} names")
    elif not _any_file(folder, WEIGHT_PATTERNS):
        raise ConfigurationError(f"{path} holds no weights: looked for {' and '.join(WEIGHT_PATTERNS)}")


def _local_folder(path: str) -> Path | None:
    """The folder that `path` names, or None when it can only be a hub name; ConfigurationError when it is neither."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ConfigurationError(f"{path} is a file: a folder in Hugging Face format is needed")
    if not _HUB_NAME.match(path):
        raise ConfigurationError(f"{path} does not exist: it is neither a model folder nor a Hugging Face model name")
    return None


def _load(path: str, folder: Path | None, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """The tokenizer by transformers' generic class where the folder was saved by it, else by its AutoTokenizer.

    Both give the same, but AutoTokenizer imports every part of torch first, which takes seconds in each of the
    processes that load one.
    """
    described = folder / "tokenizer_config.json" if folder is not None else None
    if described is not None and described.is_file():
        settings = _read_object(described)
        if settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder or path), trust_remote_code=trust_remote_code)


def _any_file(folder: Path, patterns: Iterable[str]) -> bool:
    return any(found.is_file() for pattern in patterns for found in folder.glob(pattern))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
