"""Cut a training batch into minibatches (one optimizer step each), ranks' shares, and microbatches (one forward each).

No cut changes a result beyond rounding: token weights are taken over the whole minibatch before it is cut.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_core.data.carriers import IntArray, TrainingBatch

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What is decided over a whole minibatch before it is cut, on the CPU.

    rows[n] are row numbers of the training batch, ascending. weights [n, T] are the tokens' shares of the loss, and
    selection [n, T] what the policy loss chose among them, for losses that choose.
    """

    rows: IntArray
    weights: torch.Tensor
    selection: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The rows of one forward pass, padding columns that all of them share cut away.

    rows[b] are row numbers of the training batch and `first_column` is the batch's column that column 0 here was.
    Tensors are [b, t] on the rank's device; `weights` and `selection` are cut out of the minibatch's.
    A filler (`rows` empty) repeats a real row with nothing to train on: it only keeps the ranks' collectives in step.
    """

    rows: IntArray
    first_column: int
    prompt_width: int
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    weights: torch.Tensor
    selection: torch.Tensor | None
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    rollout_logprobs: torch.Tensor | None
    advantages: torch.Tensor | None


def split_minibatches(group_ids: IntArray, prompts_per_minibatch: int) -> list[IntArray]:
    """Row numbers of each minibatch: `prompts_per_minibatch` prompts each, in order of first appearance, every sample
    of a prompt together; the last minibatch may hold fewer prompts."""
    _, first, inverse = np.unique(group_ids, return_index=True, return_inverse=True)
    appearance = np.empty(len(first), dtype=np.int64)
    appearance[np.argsort(first)] = np.arange(len(first))
    minibatch_of_row = appearance[inverse] // prompts_per_minibatch
    return [
        np.flatnonzero(minibatch_of_row == number).astype(np.int64)
        for number in range(math.ceil(len(first) / prompts_per_minibatch))
    ]


def trained_rows(batch: TrainingBatch, rows: IntArray) -> IntArray:
    """Those of `rows` that have a token to train on. The others contribute nothing and need no forward pass."""
    return rows[batch.loss_mask[rows].any(axis=1)]


def share_rows(
    batch: TrainingBatch, rows: IntArray, rank: int, world_size: int, size: int, max_tokens: int = -1
) -> list[IntArray]:
    """This rank's microbatches as row numbers: `size` rows at most or, when `max_tokens` is positive, as many rows as
    fit into that many tokens in all, padding counted; a row that alone has more stands alone.

    Every rank gets the same number of microbatches; an empty array stands for a filler. Rows are dealt from the longest
    to the shortest, in turn over the ranks: neighbours are of like length, so little padding is left, and the ranks
    carry like loads.
    """
    lengths = batch.attention_mask[rows].sum(axis=1)
    by_length = rows[np.argsort(-lengths, kind="stable")]
    dealt = [by_length[other::world_size] for other in range(world_size)]
    # The first rank has the most rows, and every rank cuts at the same places.
    most = len(dealt[0])
    if max_tokens > 0:
        cuts = _cuts_by_tokens(batch, dealt, max_tokens)
    else:
        cuts = [*range(0, most, size), most]
    return [dealt[rank][start:stop] for start, stop in pairwise(cuts)]


def _cuts_by_tokens(batch: TrainingBatch, dealt: list[IntArray], max_tokens: int) -> list[int]:
    """Where to cut the ranks' rows so that on every rank rows times columns stay within `max_tokens`."""
    most = len(dealt[0])
    first = np.zeros((len(dealt), most), dtype=np.int64)
    stop = np.zeros_like(first)
    for rank, rows in enumerate(dealt):
        used = batch.attention_mask[rows] != 0
        first[rank] = batch.prompt_width - 1
        first[rank, : len(rows)] = np.minimum(used.argmax(axis=1), batch.prompt_width - 1)
        stop[rank] = batch.prompt_width
        stop[rank, : len(rows)] = np.maximum(
            batch.attention_mask.shape[1] - used[:, ::-1].argmax(axis=1), batch.prompt_width
        )
    cuts = [0]
    while cuts[-1] < most:
        begin = cuts[-1]
        columns = np.maximum.accumulate(stop[:, begin:], axis=1) - np.minimum.accumulate(first[:, begin:], axis=1)
        areas = columns.max(axis=0) * np.arange(1, most - begin + 1)
        # Areas only grow, so those that fit come first.
        cuts.append(begin + max(int((areas <= max_tokens).sum()), 1))
    return cuts


def make_microbatch(
    batch: TrainingBatch,
    rows: IntArray,
    filler_row: int,
    device: torch.device,
    minibatch: Minibatch | None = None,
) -> Microbatch:
    """The tensors of `rows`, trimmed and on `device`; with no rows, the filler made of `filler_row`.

    `rows` belong to `minibatch`; without one, and in a filler, weights are 0.
    """
    taken = rows if len(rows) else np.array([filler_row], dtype=np.int64)
    attention = batch.attention_mask[taken]
    used = np.flatnonzero(attention.any(axis=0))
    start = min(int(used[0]), batch.prompt_width - 1)
    stop = max(int(used[-1]) + 1, batch.prompt_width)
    columns = slice(start, stop)
    loss_mask = (batch.loss_mask[taken, columns] != 0) & bool(len(rows))

    def tensor(array: NDArray[np.generic] | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array[taken, columns].copy()).to(device)

    def share(whole: torch.Tensor) -> torch.Tensor:
        if not len(rows) or minibatch is None:
            return torch.zeros(loss_mask.shape, dtype=whole.dtype, device=device)
        return whole[np.searchsorted(minibatch.rows, taken), columns].to(device)

    return Microbatch(
        rows=rows,
        first_column=start,
        prompt_width=batch.prompt_width - start,
        input_ids=torch.from_numpy(batch.input_ids[taken, columns].copy()).to(device),
        attention_mask=torch.from_numpy(attention[:, columns].copy()).to(device),
        loss_mask=torch.from_numpy(loss_mask).to(device),
        weights=share(torch.zeros(0) if minibatch is None else minibatch.weights),
        selection=None if minibatch is None or minibatch.selection is None else share(minibatch.selection),
        old_logprobs=tensor(batch.old_logprobs),
        ref_logprobs=tensor(batch.ref_logprobs),
        rollout_logprobs=tensor(batch.rollout_logprobs),
        advantages=tensor(batch.advantages),
    )
