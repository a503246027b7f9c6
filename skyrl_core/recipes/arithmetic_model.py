"""The quick start's model: a small Qwen3 with a character tokenizer, warmed up on worked additions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_core.data.carriers import Message
from skyrl_core.data.seeds import derive_seed
from skyrl_core.data.tokenizer import prompt_token_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<assistant>")
CHARACTERS = "0123456789+=,;"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
IGNORED_LABEL = -100

Progress = Callable[[int, int], None]
"""Called with steps done and steps in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The supervised run that leaves the model able, but not sure: it knows the way and often slips on it.

    `steps` batches of `batch_size` solutions by AdamW; `rise_steps` of them raise the learning rate to `lr`, where it
    stays. It is not lowered at the end: that would leave weights that the noise of policy gradients throws off at once.
    """

    steps: int = 240
    batch_size: int = 32
    lr: float = 1e-3
    rise_steps: int = 20
    seed: int = 0


def build_tokenizer() -> "PreTrainedTokenizerBase":
    """One token per character, `<unk>` for any other; a chat is `<bos>12+34=<assistant>06,04;46<eos>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<assistant>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: "PreTrainedTokenizerBase", seed: int) -> "Qwen3ForCausalLM":
    """A random Qwen3 of 0.79 million parameters (fp32, tied embeddings) for the tokenizer's vocabulary."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "arithmetic", "weights"))
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **special)
    return model


def encode_solutions(
    tokenizer: "PreTrainedTokenizerBase", examples: Sequence[tuple[Sequence[Message], str]]
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and labels, both [N, L], of chats answered by solutions, padded on the right.

    The prompt is what rollouts send (`prompt_token_ids`), the solution is followed by `<eos>`; labels are IGNORED_LABEL
    but at the solution's tokens, `<eos>` included.
    """
    import torch

    rows = []
    for messages, solution in examples:
        prompt = prompt_token_ids(tokenizer, messages)
        answer = [*tokenizer.encode(solution, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((prompt, answer))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED_LABEL)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def warm_up(
    model: "Qwen3ForCausalLM", ids: "torch.Tensor", labels: "torch.Tensor", settings: WarmUp, progress: Progress
) -> None:
    """Train the model on solutions [N, L] for a fixed number of steps, on one thread so that it repeats exactly."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        draws = torch.Generator().manual_seed(derive_seed(settings.seed, "arithmetic", "warm-up"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0, betas=(0.9, 0.99))
        model.train()
        for step in range(1, settings.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, step / settings.rise_steps)
            rows = torch.randint(len(ids), (settings.batch_size,), generator=draws)
            logits = model(input_ids=ids[rows], use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=IGNORED_LABEL
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress(step, settings.steps)
        model.eval()
    finally:
        torch.set_num_threads(threads)


def save_model(
    folder: Path,
    examples: Sequence[tuple[Sequence[Message], str]],
    settings: WarmUp,
    progress: Progress,
) -> None:
    """Build, warm up and save model and tokenizer in `folder`, in Hugging Face's format."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    ids, labels = encode_solutions(tokenizer, examples)
    warm_up(model, ids, labels, settings, progress)
    with _quiet_saving():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_saving() -> Iterator[None]:
    """One shard of 3 MB needs no progress bar of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
