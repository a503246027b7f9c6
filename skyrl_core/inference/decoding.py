"""Batched autoregressive decoding with a key-value cache, without Python work per row and token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import IntArray
from skyrl_core.inference.sampling import next_tokens, row_uniforms

# A row that has ended is computed along until this share of the rows has ended: copying the cache costs more.
_DROP_SHARE = 0.25

StopCheck = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedBatch:
    """token_ids [B, M] (int64), logprobs [B, M] (fp32), lengths [B], stopped [B] (False: cut at max_generate_length).

    Columns from a row's length on are padding.
    """

    token_ids: IntArray
    logprobs: NDArray[np.float32]
    lengths: IntArray
    stopped: NDArray[np.bool_]


@dataclass(slots=True)
class _Rows:
    """The rows still being computed: their place in the batch and everything indexed by row."""

    place: Tensor
    alive: Tensor
    position: Tensor
    uniforms: Tensor
    mask: Tensor | None
    seen: Tensor | None

    def select(self, kept: Tensor) -> None:
        self.place, self.alive, self.position = self.place[kept], self.alive[kept], self.position[kept]
        self.uniforms = self.uniforms[kept]
        self.mask = None if self.mask is None else self.mask[kept]
        self.seen = None if self.seen is None else self.seen[kept]


@torch.inference_mode()
def decode_batch(
    model: nn.Module,
    prompts: Sequence[IntArray],
    seeds: Sequence[int],
    sampling: SamplingParams,
    *,
    stop_ids: Sequence[int],
    stop_check: StopCheck | None,
    pad_id: int,
) -> DecodedBatch:
    """Sample one completion per prompt, all rows in one batch.

    Equal prompts are read once and their cache is shared out. A row ends with a token of `stop_ids` (kept in the
    output), when `stop_check` (ids [A, t] → bool [A]) says so, or after `sampling.max_generate_length` tokens. The same
    arguments give the same bits: what is computed depends on nothing else.
    """
    device = next(model.parameters()).device
    count, limit = len(prompts), sampling.max_generate_length
    tokens = torch.full((count, limit), pad_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros((count, limit), dtype=torch.float32, device=device)
    lengths = torch.full((count,), limit, dtype=torch.int64, device=device)
    stopped = torch.zeros(count, dtype=torch.bool, device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)

    logits, cache, rows = _prefill(model, prompts, seeds, sampling, pad_id, device)
    width = max(len(prompt) for prompt in prompts)
    for column in range(limit):
        ids, chosen = next_tokens(logits, rows.uniforms[:, column], sampling, rows.seen)
        # Rows that ended earlier are still computed here: their draws go nowhere.
        place = rows.place[rows.alive]
        tokens[place, column], logprobs[place, column] = ids[rows.alive], chosen[rows.alive]
        ended = torch.isin(ids, stops)
        if stop_check is not None:
            ended |= stop_check(tokens[rows.place, : column + 1])
        ended &= rows.alive
        stopped[rows.place[ended]] = True
        lengths[rows.place[ended]] = column + 1
        rows.alive &= ~ended
        remaining = int(rows.alive.sum())
        if remaining == 0 or column + 1 == limit:
            break
        if rows.seen is not None:
            rows.seen.scatter_(1, ids[:, None], True)
        if remaining <= (1 - _DROP_SHARE) * len(ids):
            kept = rows.alive.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows.select(kept)
            ids = ids[kept]
        mask = None if rows.mask is None else rows.mask[:, : width + column + 1]
        logits = model(
            input_ids=ids[:, None],
            attention_mask=mask,
            position_ids=(rows.position + column)[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return DecodedBatch(
        token_ids=tokens.cpu().numpy(),
        logprobs=logprobs.cpu().numpy(),
        lengths=lengths.cpu().numpy(),
        stopped=stopped.cpu().numpy(),
    )


def _prefill(
    model: nn.Module,
    prompts: Sequence[IntArray],
    seeds: Sequence[int],
    sampling: SamplingParams,
    pad_id: int,
    device: torch.device,
) -> tuple[Tensor, DynamicCache, _Rows]:
    """Read every distinct prompt once, padded on the left; returns the first logits [B, V], the cache, and the rows."""
    distinct: dict[bytes, int] = {}
    sources = [distinct.setdefault(prompt.tobytes(), len(distinct)) for prompt in prompts]
    unique = [np.frombuffer(key, dtype=np.int64) for key in distinct]
    width = max(len(prompt) for prompt in unique)
    ids = np.full((len(unique), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(unique), width), dtype=np.int64)
    for row, prompt in enumerate(unique):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    attention = torch.from_numpy(mask).to(device)
    padded = bool((mask == 0).any())
    cache = DynamicCache(config=model.config)
    input_ids = torch.from_numpy(ids).to(device)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention if padded else None,
        position_ids=(attention.cumsum(dim=-1) - 1).clamp_(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    index = torch.tensor(sources, dtype=torch.int64, device=device)
    if len(unique) < len(prompts):
        cache.batch_select_indices(index)
        logits, attention, input_ids = logits[index], attention[index], input_ids[index]
    seen = None
    if sampling.repetition_penalty != 1.0:
        # Padding must not count as seen: it is written to a column of its own, which is then cut off.
        vocabulary = logits.shape[-1]
        marks = torch.where(attention.bool(), input_ids, vocabulary)
        seen = torch.zeros((len(prompts), vocabulary + 1), dtype=torch.bool, device=device)
        seen = seen.scatter_(1, marks, True)[:, :vocabulary].contiguous()
    grown = None
    if padded:
        ones = attention.new_ones((len(prompts), sampling.max_generate_length))
        grown = torch.cat([attention, ones], dim=1)
    rows = _Rows(
        place=torch.arange(len(prompts), device=device),
        alive=torch.ones(len(prompts), dtype=torch.bool, device=device),
        position=attention.sum(dim=-1),
        uniforms=torch.from_numpy(row_uniforms(seeds, sampling.max_generate_length)).to(device),
        mask=grown,
        seen=seen,
    )
    return logits, cache, rows
