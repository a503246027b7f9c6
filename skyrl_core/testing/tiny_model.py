"""A tiny Qwen3 with a character tokenizer and a chat template, built in a folder in well under a second."""

import string
from pathlib import Path

DEFAULT_VOCAB = string.digits + string.ascii_letters + " +-*/=().,;:!?#\n"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tiny_tokenizer(path: str | Path, *, vocab: str = DEFAULT_VOCAB) -> Path:
    """Save a fast tokenizer with one token per character of `vocab`; other characters become `<unk>`.

    Ids 0 to 7 are `SPECIAL_TOKENS`, character i of `vocab` has id 8 + i. Returns the folder.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(vocab)) != len(vocab):
        raise ValueError(f"vocab holds a character twice: {vocab!r}")
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *vocab))}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    folder = Path(path)
    fast.save_pretrained(folder)
    return folder


def build_tiny_model(
    path: str | Path,
    *,
    vocab: str = DEFAULT_VOCAB,
    tied: bool = True,
    seed: int = 0,
    hidden_size: int = 32,
    layers: int = 2,
    max_position_embeddings: int = 512,
) -> Path:
    """Save a random Qwen3 (fp32, a few ten thousand parameters) with `build_tiny_tokenizer`'s tokenizer in `path`.

    The weights depend on `seed` alone and leave the global torch generator as it was. `tied` shares the embedding with
    the output head. The weights' spread is wide enough that its distributions are far from uniform. Returns the folder.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = build_tiny_tokenizer(path, vocab=vocab)
    config = Qwen3Config(
        vocab_size=len(SPECIAL_TOKENS) + len(vocab),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder
