"""Token weights: worked out on paper, against plain loops, and independent of every cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.algorithms.reductions import token_weights
from skyrl_core.config.algorithm_rules import REDUCTIONS
from skyrl_core.errors import ConfigurationError

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
GROUPS = torch.tensor([3, 3, 8, 8, 8])
"""Tokens a row: 2, 4, 1, 0, 3. Prompt 3 has 6 tokens, prompt 8 has 4. 4 rows have tokens."""


def per_row(reduction: str, **constants: int) -> list[float]:
    """The weight of the trained tokens of each row, 0 for a row without any."""
    weights = token_weights(MASK, reduction, GROUPS, **constants)
    assert weights.dtype == torch.float32
    assert (weights[~MASK] == 0.0).all()
    for row, mask in zip(weights, MASK, strict=True):
        assert len(row[mask].unique()) <= 1
    return weights.amax(dim=1).tolist()


def test_token_mean_weighs_all_ten_tokens_alike() -> None:
    assert per_row("token_mean") == pytest.approx([0.1, 0.1, 0.1, 0.0, 0.1])


def test_sequence_mean_weighs_all_four_rows_alike() -> None:
    """1 / (4 · 2), 1 / (4 · 4), 1 / (4 · 1), nothing, 1 / (4 · 3)."""
    assert per_row("sequence_mean") == pytest.approx([1 / 8, 1 / 16, 1 / 4, 0.0, 1 / 12])


def test_seq_mean_token_sum_norm_divides_by_a_constant() -> None:
    """1 / (4 rows · 20)."""
    assert per_row("seq_mean_token_sum_norm", max_seq_len=20) == pytest.approx([1 / 80, 1 / 80, 1 / 80, 0.0, 1 / 80])


def test_prompt_mean_weighs_both_prompts_alike() -> None:
    """1 / (2 · 6) for prompt 3, 1 / (2 · 4) for prompt 8."""
    assert per_row("prompt_mean") == pytest.approx([1 / 12, 1 / 12, 1 / 8, 0.0, 1 / 8])


def test_token_mean_legacy_weighs_chunks_of_rows_alike() -> None:
    """Chunks of two rows: 6 tokens, 1 token, 3 tokens: 1 / (3 · 6), 1 / 3, 1 / (3 · 3)."""
    expected = [1 / 18, 1 / 18, 1 / 3, 0.0, 1 / 9]
    assert per_row("token_mean_legacy", micro_batch_size=2) == pytest.approx(expected)


def test_a_mean_of_means_is_not_the_mean() -> None:
    """100 tokens at 0.5 and 900 at 0.3 average to 0.32, not to 0.4, in one microbatch or in two."""
    mask = torch.zeros(2, 900, dtype=torch.bool)
    mask[0, :100] = mask[1, :] = True
    losses = torch.tensor([[0.5], [0.3]]).expand(2, 900)
    weights = token_weights(mask, "token_mean", torch.tensor([0, 1]))
    assert float((losses * weights).sum()) == pytest.approx(0.32)
    assert sum(float((losses[row] * weights[row]).sum()) for row in (0, 1)) == pytest.approx(0.32)


def test_unknown_reductions_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="unknown 'mean'; known: token_mean, token_mean_legacy"):
        token_weights(MASK, "mean", GROUPS)


def test_missing_constants_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.algorithm\.max_seq_len .* got None"):
        token_weights(MASK, "seq_mean_token_sum_norm", GROUPS)
    with pytest.raises(ConfigurationError, match="micro_train_batch_size_per_gpu, got 0"):
        token_weights(MASK, "token_mean_legacy", GROUPS, micro_batch_size=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_tokens_has_weights_of_zero(reduction: str, rows: int) -> None:
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    groups = torch.zeros(rows, dtype=torch.int64)
    weights = token_weights(mask, reduction, groups, max_seq_len=4, micro_batch_size=1)
    assert torch.equal(weights, torch.zeros(rows, 3))


def plain_loops(mask: list[list[bool]], groups: list[int], losses: list[list[float]], reduction: str) -> float:
    """The reduced loss from its definition, in double precision; max_seq_len 10, chunks of 3 rows."""
    rows = [[x for x, trained in zip(line, m, strict=True) if trained] for line, m in zip(losses, mask, strict=True)]
    if reduction == "prompt_mean":
        parts = [[x for row, g in zip(rows, groups, strict=True) if g == group for x in row] for group in set(groups)]
    elif reduction == "token_mean_legacy":
        parts = [[x for row in rows[start : start + 3] for x in row] for start in range(0, len(rows), 3)]
    elif reduction == "token_mean":
        parts = [[x for row in rows for x in row]]
    else:
        parts = rows
    parts = [part for part in parts if part]
    divisors = [10 if reduction == "seq_mean_token_sum_norm" else len(part) for part in parts]
    means = [sum(part) / divisor for part, divisor in zip(parts, divisors, strict=True)]
    return sum(means) / len(means) if means else 0.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), empty=st.integers(0, 3))
def test_agrees_with_the_plain_loops_and_ignores_rows_without_tokens(seed: int, empty: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    mask = torch.rand(count, width, generator=generator) < 0.5
    losses = torch.randn(count, width, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 3, (count,), generator=generator)
    more_mask = torch.cat([mask, torch.zeros(empty, width, dtype=torch.bool)])
    more_groups = torch.cat([groups, torch.full((empty,), 9)])
    for reduction in REDUCTIONS:
        weights = token_weights(more_mask, reduction, more_groups, max_seq_len=10, micro_batch_size=3)[:count]
        expected = plain_loops(mask.tolist(), groups.tolist(), losses.tolist(), reduction)
        assert float((losses * weights).sum()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_only_token_of_a_batch_has_weight_one(reduction: str) -> None:
    mask = torch.tensor([[False, True]])
    weights = token_weights(mask, reduction, torch.tensor([4]), max_seq_len=1, micro_batch_size=8)
    assert weights.tolist() == [[0.0, 1.0]]
