"""Minibatches by prompt, equal shares for ranks, microbatches without common padding."""

import numpy as np
import pytest
import torch

from skyrl_core.training.batching import Minibatch, make_microbatch, share_rows, split_minibatches, trained_rows


def as_lists(parts):
    return [part.tolist() for part in parts]


def test_minibatches_hold_whole_prompts_in_order_of_appearance():
    groups = np.array([7, 7, 2, 2, 2, 9, 4, 4])
    assert as_lists(split_minibatches(groups, 2)) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert as_lists(split_minibatches(groups, 3)) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert as_lists(split_minibatches(groups, 100)) == [list(range(8))]


def test_samples_of_a_prompt_stay_together_when_they_are_apart_in_the_batch():
    assert as_lists(split_minibatches(np.array([1, 0, 1, 0, 2]), 1)) == [[0, 2], [1, 3], [4]]


def test_rows_are_dealt_from_the_longest_and_every_rank_runs_as_many_microbatches(make_batch):
    lengths = [2, 5, 3, 1, 4]
    batch = make_batch([([9], [10] * n, [1] * n, 1.0, 0) for n in lengths])
    rows = np.arange(5)
    # Longest first: rows 1, 4, 2, 0, 3; rank 0 takes the 1st, 3rd and 5th, rank 1 the 2nd and 4th.
    assert as_lists(share_rows(batch, rows, 0, 2, 2)) == [[1, 2], [3]]
    assert as_lists(share_rows(batch, rows, 1, 2, 2)) == [[4, 0], []]
    assert as_lists(share_rows(batch, rows, 0, 1, 5)) == [[1, 4, 2, 0, 3]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_cover_every_row_once_in_equally_many_microbatches(make_batch, trajectories, world_size, size):
    batch = make_batch(trajectories(seed=1, prompts=3, samples=3))
    shares = [share_rows(batch, np.arange(9), rank, world_size, size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for part in share for row in part) == list(range(9))
    assert all(len(part) <= size for share in shares for part in share)


def test_a_budget_of_tokens_counts_padding_and_lets_a_long_row_stand_alone(make_batch):
    lengths = [2, 5, 3, 1, 4]
    batch = make_batch([([9], [10] * n, [1] * n, 1.0, 0) for n in lengths], left=3, right=2)
    rows = np.arange(5)
    # With its prompt token a row of n has n + 1 columns. Longest first, rows 1, 4, 2, 0, 3 have 6, 5, 4, 3, 2:
    # 1 and 4 take 2·6 = 12; 2 and 0 take 2·4 = 8, with 3 they would take 3·4 = 12.
    assert as_lists(share_rows(batch, rows, 0, 1, 100, 12)) == [[1, 4], [2, 0, 3]]
    assert as_lists(share_rows(batch, rows, 0, 1, 100, 11)) == [[1], [4, 2], [0, 3]]
    assert as_lists(share_rows(batch, rows, 0, 1, 100, 5)) == [[1], [4], [2], [0], [3]]
    # Two ranks hold rows 1, 2, 3 and 4, 0: both cut where the fuller one must.
    assert as_lists(share_rows(batch, rows, 0, 2, 100, 12)) == [[1, 2], [3]]
    assert as_lists(share_rows(batch, rows, 1, 2, 100, 12)) == [[4, 0], []]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", [1, 24, 60, 10_000])
def test_microbatches_stay_within_their_tokens_on_every_rank(make_batch, trajectories, world_size, max_tokens):
    batch = make_batch(trajectories(seed=2, prompts=5, samples=4), left=2, right=3)
    rows = np.arange(20)
    shares = [share_rows(batch, rows, rank, world_size, 1, max_tokens) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for part in share for row in part) == list(range(20))
    for part in (part for share in shares for part in share if len(part) > 1):
        micro = make_microbatch(batch, part, 0, torch.device("cpu"))
        assert micro.input_ids.numel() <= max_tokens


def test_rows_without_a_trained_token_need_no_forward_pass(make_batch):
    batch = make_batch([([9], [10, 11], [0, 0], 1.0, 0), ([9], [10, 11], [0, 1], 1.0, 0)])
    assert trained_rows(batch, np.array([0, 1])).tolist() == [1]


def test_microbatch_cuts_the_padding_its_rows_share(make_batch):
    batch = make_batch(
        [([8, 9], [10, 11], [1, 1], 1.0, 0), ([8], [12], [1], 2.0, 0), ([8] * 5, [13] * 6, [1] * 6, 1.0, 1)]
    )
    weights = torch.arange(3 * 11, dtype=torch.float32).view(3, 11)
    selection = torch.zeros(3, 11, dtype=torch.bool)
    selection[1, 5] = True
    minibatch = Minibatch(rows=np.array([0, 1, 2]), weights=weights, selection=selection)
    micro = make_microbatch(batch, np.array([1, 0]), 2, torch.device("cpu"), minibatch)
    # prompt_width 5 and 11 columns; the two rows use columns 3 to 6.
    assert (micro.first_column, micro.prompt_width) == (3, 2)
    assert micro.input_ids.tolist() == [[0, 8, 12, 0], [8, 9, 10, 11]]
    assert micro.attention_mask.tolist() == [[0, 1, 1, 0], [1, 1, 1, 1]]
    assert micro.loss_mask.tolist() == [[False, False, True, False], [False, False, True, True]]
    assert micro.advantages.tolist() == [[0, 0, 2, 0], [0, 0, 1, 1]]
    assert micro.selection.tolist() == [[False, False, True, False], [False] * 4]
    assert micro.weights.tolist() == [[14, 15, 16, 17], [3, 4, 5, 6]]


def test_filler_repeats_a_row_with_nothing_to_train_on(make_batch):
    batch = make_batch([([8], [10, 11], [1, 1], 1.0, 0)])
    minibatch = Minibatch(rows=np.array([0]), weights=torch.ones(1, 3), selection=torch.ones(1, 3, dtype=torch.bool))
    filler = make_microbatch(batch, np.array([], dtype=np.int64), 0, torch.device("cpu"), minibatch)
    assert filler.input_ids.tolist() == [[8, 10, 11]]
    assert not filler.loss_mask.any()
    assert not filler.weights.any()
    assert not filler.selection.any()
