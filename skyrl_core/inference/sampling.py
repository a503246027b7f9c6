"""From logits to tokens: the processed distribution, and seeded draws from it that do not depend on the batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_core.config.sampling import SamplingParams

# Elements of a [rows, vocabulary] block that is processed at once: float64 copies of it stay below 0.3 GB.
_BLOCK_ELEMENTS = 2**25


def row_uniforms(seeds: Sequence[int], length: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1), float64 [len(seeds), length]: row r, column t belongs to seed r and position t alone.

    Each row is NumPy's Philox 4x64 keyed by its seed (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2,
    3"), so a longer `length` extends a row and never changes it.
    """
    rows = np.empty((len(seeds), length), dtype=np.float64)
    for index, seed in enumerate(seeds):
        rows[index] = np.random.Generator(np.random.Philox(key=seed)).random(length)
    return rows


def processed_logprobs(logits: Tensor, sampling: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Log-probabilities [B, V] (fp32, -inf where excluded) of the distribution that tokens are drawn from.

    Same order as vLLM's `processed_logprobs`: repetition penalty over `seen` [B, V] (bool: tokens of prompt and
    response; Keskar et al. 2019, CTRL), temperature, min-p (Nguyen et al. 2024, arXiv:2407.01082), top-k, top-p
    (Holtzman et al. 2019). With temperature alone this is log_softmax(logits / temperature), the trainer's own.
    At temperature 0 the distribution is the model's (temperature 1) and nothing is cut: the argmax is taken.
    """
    logits = logits.float()
    if seen is not None and sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return torch.log_softmax(logits, dim=-1)
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    cut = False
    if sampling.min_p > 0:
        floor = logprobs.amax(dim=-1, keepdim=True) + float(np.log(sampling.min_p))
        logprobs, cut = logprobs.masked_fill(logprobs < floor, -torch.inf), True
    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs, cut = _keep_top_k(logprobs, sampling.top_k), True
    if sampling.top_p < 1:
        logprobs, cut = _keep_top_p(logprobs, sampling.top_p), True
    return torch.log_softmax(logprobs, dim=-1) if cut else logprobs


def _keep_top_k(logprobs: Tensor, top_k: int) -> Tensor:
    """The `top_k` most likely tokens of each row; of equal ones, the lower ids."""
    kept = torch.sort(logprobs, dim=-1, descending=True, stable=True).indices[:, :top_k]
    mask = torch.ones_like(logprobs, dtype=torch.bool).scatter_(-1, kept, False)
    return logprobs.masked_fill(mask, -torch.inf)


def _keep_top_p(logprobs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches `top_p` (at least one token)."""
    order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    mass = torch.softmax(order.values.double(), dim=-1)
    before = mass.cumsum(dim=-1) - mass
    dropped = before >= top_p
    dropped[:, 0] = False
    mask = torch.zeros_like(dropped).scatter_(-1, order.indices, dropped)
    return logprobs.masked_fill(mask, -torch.inf)


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [B] by inverse CDF: the first token (in id order) whose cumulative probability exceeds the uniform.

    logprobs [B, V] fp32, uniforms [B] float64 in [0, 1). The sum runs in float64 and is scaled by its own total, so the
    rounding of fp32 log-probabilities moves no mass to the tail; a token of probability zero is never chosen, not
    even by a uniform that rounds up to the total.
    """
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    possible = probabilities > 0
    hits = (cumulative > target) & possible
    first = hits.to(torch.uint8).argmax(dim=-1)
    last_possible = possible.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.where(hits.any(dim=-1), first, last_possible)


def next_tokens(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chosen ids [B] (int64) and their log-probabilities [B] (fp32) from logits [B, V] and uniforms [B].

    Rows are processed in blocks that bound the memory; a row's result does not depend on the block it falls in.
    """
    rows, vocabulary = logits.shape
    block = max(1, _BLOCK_ELEMENTS // vocabulary)
    ids, chosen = [], []
    for start in range(0, rows, block):
        piece = slice(start, start + block)
        logprobs = processed_logprobs(logits[piece], sampling, None if seen is None else seen[piece])
        tokens = logprobs.argmax(dim=-1) if sampling.temperature == 0 else draw(logprobs, uniforms[piece])
        ids.append(tokens)
        chosen.append(logprobs.gather(-1, tokens[:, None])[:, 0])
    return torch.cat(ids), torch.cat(chosen)
