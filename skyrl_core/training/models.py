"""Load a causal language model, shard it over the ranks with FSDP2, and compute its token log-probabilities."""

import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from skyrl_core.errors import ConfigurationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to load and shard one model.

    `key` is the configuration key that named the model, for messages. `trainable` keeps fp32 master weights; a model
    that is only evaluated is loaded in the dtype it computes in. `bf16` applies on CUDA; the CPU computes in fp32.
    """

    key: str
    trainable: bool
    bf16: bool = True
    flash_attention: bool = True
    gradient_checkpointing: bool = False
    use_reentrant: bool = False
    trust_remote_code: bool = False
    reshard_after_forward: bool | int = True
    config_overrides: dict[str, Any] = field(default_factory=dict)


def load_sharded_model(path: str, options: ModelOptions, mesh: DeviceMesh, device: torch.device) -> PreTrainedModel:
    """The model in the Hugging Face folder `path` (or of that name), sharded over `mesh`. Called by every rank.

    Every rank reads the whole model into host memory once and keeps its share on `device`.
    Raises ConfigurationError when `path` holds no causal language model that transformers can load.
    """
    bf16 = options.bf16 and device.type == "cuda"
    # Flash attention has no fp32 kernels; under mixed precision it is given bf16 whatever the master weights are.
    attention = choose_attention(options.flash_attention and bf16, device)
    model = _load(path, options, torch.bfloat16 if bf16 and not options.trainable else torch.float32, attention)
    if options.trainable:
        if options.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": options.use_reentrant})
        model.train()
    else:
        model.requires_grad_(False)
        model.eval()
    shard_model(model, mesh, bf16=bf16, reshard_after_forward=options.reshard_after_forward)
    return model


def _load(path: str, options: ModelOptions, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    # Every rank loads; their progress bars would only tear the log.
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=options.trust_remote_code, **options.config_overrides
        )
        _disable_dropout(config, options.key)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigurationError(
            f"{options.key}={path} cannot be loaded as a causal language model ({type(error).__name__}: {error}); "
            "give a folder in Hugging Face format or a model name"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would fill them with random numbers and only warn.
        raise ConfigurationError(
            f"{options.key}={path} lacks {len(missing)} of the model's weights, {missing[0]} among them; give a "
            "complete causal language model"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _disable_dropout(config: Any, key: str) -> None:
    """Set every dropout rate to 0: with dropout the trainer would score tokens under another distribution than the one
    that sampled them, and the probability ratio would not start at 1."""
    rates = {name: rate for name, rate in vars(config).items() if "dropout" in name or name.endswith("pdrop")}
    active = [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0.0]
    for name in active:
        setattr(config, name, 0.0)
    if active:
        logger.info("%s: dropout is off during reinforcement learning (%s)", key, ", ".join(sorted(active)))


def choose_attention(flash: bool, device: torch.device) -> str:
    """`flash_attention_2` where it was asked for, the device is CUDA and the package is installed; else `sdpa`."""
    if flash and device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return "sdpa"


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers says must stay whole: the decoder layers, in order."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, *, bf16: bool, reshard_after_forward: bool | int = True
) -> None:
    """Apply FSDP2 to every decoder layer and to the root, in place.

    Gradients are SUMMED over ranks, not averaged as FSDP does by default: the loss carries the whole minibatch's
    denominator already, so the sum over ranks is the minibatch's gradient for any number of ranks.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32 if bf16 else None
    )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def token_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_width: int,
    temperature: float,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(token | what precedes it) at each response column, under softmax(logits / temperature).

    input_ids[b, t], attention_mask[b, t] (0 = padding), first `prompt_width` columns = prompts, padded on the left.
    Returns logprobs[b, t] float32 (0 at prompt columns) and, when asked for, the entropy of the same distribution
    [b, t] in nats, which carries a gradient only with `entropy_gradient`. Logits exist for response columns only; their
    fp32 softmax is taken `chunk_size` tokens at a time (None: all at once).
    Positions count real tokens, so padding does not change them. Values at padding columns mean nothing.
    """
    rows, width = input_ids.shape
    response = width - prompt_width
    if prompt_width < 1:
        raise ValueError("token_logprobs needs at least one prompt column: the first token has nothing to follow")
    if response == 0:
        zeros = torch.zeros(rows, width, dtype=torch.float32, device=input_ids.device)
        return zeros, zeros.clone() if with_entropy else None
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
        logits_to_keep=response + 1,
        use_cache=False,
    )
    # The logits at column c predict the token at column c + 1.
    logits = output.logits[:, -(response + 1) : -1].flatten(0, 1)
    targets = input_ids[:, prompt_width:].flatten()
    size = len(targets) if chunk_size is None else chunk_size
    pieces = []
    for start in range(0, len(targets), size):
        stop = start + size
        arguments = (logits[start:stop], targets[start:stop], temperature, with_entropy, entropy_gradient)
        if logits.requires_grad and len(targets) > size:
            # Recomputed in the backward pass, so that only one chunk's softmax exists at a time.
            pieces.append(checkpoint(_chunk_logprobs, *arguments, use_reentrant=False))
        else:
            pieces.append(_chunk_logprobs(*arguments))
    logprobs = _place([piece[0] for piece in pieces], rows, prompt_width)
    entropy = _place([piece[1] for piece in pieces], rows, prompt_width) if with_entropy else None
    return logprobs, entropy


def _chunk_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scaled = logits.float() / temperature
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not with_entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs, normaliser - (scaled.softmax(-1) * scaled).sum(-1)


def _place(pieces: list[Any], rows: int, prompt_width: int) -> torch.Tensor:
    return nn.functional.pad(torch.cat(pieces).view(rows, -1), (prompt_width, 0))
