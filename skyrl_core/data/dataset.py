"""The prompts of a run: rows of SkyRL's format, checked, filtered by length, and named once and for all."""

import hashlib
import json
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_core.data.carriers import Message, Prompt
from skyrl_core.data.rows import Row, read_rows, source_labels
from skyrl_core.data.tokenizer import prompt_token_ids
from skyrl_core.errors import DatasetError, SkyRLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# A process costs seconds to start; the template of one row takes a fraction of a millisecond.
ROWS_WORTH_A_PROCESS = 20_000
_CONTENT_COLUMNS = ("prompt", "env_class")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterCounts:
    """How many rows were read, how many the length limit (in tokens, None for no limit) left, from which sources."""

    read: int
    kept: int
    limit: int | None
    sources: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.sources)
        if self.limit is None:
            return f"{self.read} rows in {names}, no length limit"
        return f"{self.kept} of the {self.read} rows in {names} have prompts of at most {self.limit} tokens"


class PromptDataset:
    """Prompts from parquet, json and jsonl files and Hugging Face datasets (`name:split`), in the order of the sources.

    A row has `prompt` (a list of messages with `role` and `content`) and, as far as its environment needs them,
    `env_class`, `data_source`, `reward_spec`, `extra_info` and more. As in SkyRL, environments get every column but
    `prompt` and `env_class` (`Prompt.env_extras`). A row is named by its `uid` column or else by file stem and row
    number (`train:17`, counted from 0 before the filter), which is stable as long as the file is.

    Prompts longer than `max_prompt_length` tokens, measured with the chat template that rollouts will use, are left
    out and counted in `counts`, never truncated.

    Raises DatasetError for missing, malformed or empty sources, uids that occur twice, and fewer than `min_rows`
    rows after the filter (`min_rows_key` is the configuration key that asks for them).
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_prompt_length: int | None = None,
        default_env_class: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_workers: int = 0,
        min_rows: int = 1,
        min_rows_key: str = "trainer.train_batch_size",
    ) -> None:
        if not sources:
            raise DatasetError("no data sources: name at least one file or Hugging Face dataset")
        template = _Template(tokenizer, chat_template, dict(chat_template_kwargs or {}))
        prompts: list[Prompt] = []
        for source, label in zip(sources, source_labels(sources), strict=True):
            rows = read_rows(source)
            if not rows:
                raise DatasetError(f"{source} has no rows")
            prompts += [_to_prompt(row, source, label, index, default_env_class) for index, row in enumerate(rows)]
        _check_uids(prompts)
        kept = prompts
        if max_prompt_length is not None:
            lengths = prompt_lengths(prompts, template, num_workers)
            kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length]
        self.prompts: tuple[Prompt, ...] = tuple(kept)
        self.counts = FilterCounts(read=len(prompts), kept=len(kept), limit=max_prompt_length, sources=tuple(sources))
        log.info("%s", self.counts)
        if not kept:
            raise DatasetError(f"no prompt is left: {self.counts}; raise trainer.max_prompt_length")
        if len(kept) < min_rows:
            raise DatasetError(f"{min_rows_key} is {min_rows}, but {self.counts}")
        self.fingerprint = _fingerprint(kept, template, max_prompt_length)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def env_classes(self) -> frozenset[str]:
        """The environments that the rows name."""
        return frozenset(prompt.env_class for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class _Template:
    """How messages become tokens; picklable, so that worker processes measure with the same."""

    tokenizer: "PreTrainedTokenizerBase"
    chat_template: str | None
    kwargs: dict[str, Any]

    def length(self, prompt: Prompt) -> int:
        try:
            ids = prompt_token_ids(
                self.tokenizer,
                prompt.messages,
                chat_template=self.chat_template,
                chat_template_kwargs=self.kwargs,
            )
        except SkyRLError:
            raise
        except Exception as error:  # a template is a program: it raises what its author and Jinja choose
            raise DatasetError(f"the chat template fails on row {prompt.uid}, column 'prompt': {error}") from error
        return len(ids)

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        return [self.length(prompt) for prompt in prompts]


def prompt_lengths(prompts: Sequence[Prompt], template: _Template, num_workers: int) -> list[int]:
    """Tokens of every prompt, in order, measured in `num_workers` processes where there are rows enough to pay."""
    workers = min(num_workers, len(prompts) // ROWS_WORTH_A_PROCESS)
    if workers < 2:
        return template.lengths(prompts)
    size = -(-len(prompts) // workers)
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    # spawn, because a fork of a process with Ray's or Prefect's threads can hang.
    with ProcessPoolExecutor(len(chunks), mp_context=multiprocessing.get_context("spawn")) as pool:
        return [length for part in pool.map(template.lengths, chunks) for length in part]


def _to_prompt(row: Row, source: str, label: str, index: int, default_env_class: str | None) -> Prompt:
    def malformed(column: str, problem: str) -> DatasetError:
        return DatasetError(f"{source}, row {index} (the first is 0), column {column!r}: {problem}")

    if "prompt" not in row:
        raise malformed("prompt", f"missing; the row has {', '.join(sorted(row)) or 'no columns'}")
    problem = _messages_problem(row["prompt"])
    if problem is not None:
        raise malformed("prompt", problem)
    env_class = row.get("env_class", default_env_class)
    if not isinstance(env_class, str) or not env_class:
        raise malformed("env_class", f"must name an environment, got {env_class!r}; or set environment.env_class")
    uid = row.get("uid", f"{label}:{index}")
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        raise malformed("uid", f"must be a text or an integer, got {uid!r}")
    data_source = row.get("data_source", "unknown")
    if not isinstance(data_source, str):
        raise malformed("data_source", f"must be a text, got {data_source!r}")
    for column in ("reward_spec", "extra_info"):
        if not isinstance(row.get(column, {}), Mapping):
            raise malformed(column, f"must be an object with fields, got {type(row[column]).__name__}")
    messages: tuple[Message, ...] = tuple(row["prompt"])
    extras = {column: value for column, value in row.items() if column not in _CONTENT_COLUMNS}
    return Prompt(uid=str(uid), messages=messages, env_class=env_class, env_extras=extras, data_source=data_source)


def _messages_problem(messages: object) -> str | None:
    """What is wrong with a chat, or None. Content may be a list of parts (text, image), as some models take it."""
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else type(messages).__name__
        return f"must be a list of messages such as {{'role': 'user', 'content': '...'}}, got {kind}"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"message {number} must be an object with role and content, got {type(message).__name__}"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            return f"message {number} has no content"
    return None


def _check_uids(prompts: Sequence[Prompt]) -> None:
    seen: dict[str, int] = {}
    for position, prompt in enumerate(prompts):
        if prompt.uid in seen:
            raise DatasetError(
                f"uid {prompt.uid!r} occurs twice, in rows {seen[prompt.uid]} and {position} (counted over all files "
                "from 0): a uid names one row"
            )
        seen[prompt.uid] = position


def _fingerprint(prompts: Sequence[Prompt], template: _Template, limit: int | None) -> str:
    """SHA-256 (hex) over the filter's settings and every row that is kept, in order."""
    digest = hashlib.sha256()
    digest.update(_canonical([limit, template.chat_template, template.kwargs]))
    for prompt in prompts:
        row = [prompt.uid, list(prompt.messages), prompt.env_class, prompt.data_source, dict(prompt.env_extras)]
        digest.update(_canonical(row))
    return digest.hexdigest()


def _canonical(value: object) -> bytes:
    # Dates, decimals and bytes of parquet are written by their repr, which is exact.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr).encode("ascii") + b"\n"
