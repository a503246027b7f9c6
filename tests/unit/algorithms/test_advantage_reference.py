"""Every estimator against plain Python loops in double precision, written from the formulas, on random ragged batches;
and the invariances that follow from the formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.algorithms.advantages import compute_advantages
from skyrl_core.algorithms.registry import get_advantage_estimator, list_advantage_estimators
from skyrl_core.algorithms.types import AdvantageInputs
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.algorithm_rules import ESTIMATORS

GAMMA, LAMBDA = 0.9, 0.8

Rows = list[list[float]]


def random_batch(seed: int, dtype: torch.dtype = torch.float32) -> AdvantageInputs:
    """1 to 5 prompts with 1 to 4 samples each, shuffled; ragged, with gaps, empty and failed rows, NaN where failed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, low: int = 0) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    groups = [10 + prompt for prompt in range(draw(5, 1)) for _ in range(draw(4, 1))]
    groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    count, width = len(groups), draw(7, 1)
    mask = torch.rand(count, width, generator=generator) < 0.6
    # Few distinct rewards, so that ties and groups without difference are common.
    rewards = torch.zeros(count, width)
    for row in range(count):
        rewards[row, draw(width - 1)] += draw(3) / 2
        rewards[row, draw(width - 1)] += draw(1) / 4
    valid = torch.rand(count, generator=generator) < 0.85
    rewards[~valid] = math.nan
    values = torch.randn(count, width, generator=generator)
    values[~mask] = math.nan
    prompt_greedy = {group: draw(3) / 2 for group in set(groups)}
    return AdvantageInputs(
        token_rewards=rewards.to(dtype),
        loss_mask=mask,
        group_ids=torch.tensor(groups),
        valid=valid,
        values=values.to(dtype),
        greedy_rewards=torch.tensor([prompt_greedy[group] for group in groups]),
    )


def config(estimator: str, **settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(advantage_estimator=estimator, gamma=GAMMA, lambd=LAMBDA, **settings)


# ---- The reference: nothing from the library below, until `compare`.


def members(inputs: AdvantageInputs, row: int) -> list[int]:
    """Valid rows of the same prompt."""
    return [
        other
        for other in range(len(inputs.group_ids))
        if inputs.group_ids[other] == inputs.group_ids[row] and inputs.valid[other]
    ]


def score(inputs: AdvantageInputs, row: int) -> float:
    return sum(inputs.token_rewards[row].double().tolist())


def length(inputs: AdvantageInputs, row: int) -> int:
    return sum(inputs.loss_mask[row].tolist())


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: list[float]) -> float:
    centre = mean(numbers)
    return math.sqrt(sum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def differs(inputs: AdvantageInputs, row: int) -> bool:
    return len({score(inputs, other) for other in members(inputs, row)}) > 1


def ref_grpo(inputs: AdvantageInputs, row: int) -> float:
    scores = [score(inputs, other) for other in members(inputs, row)]
    return (score(inputs, row) - mean(scores)) / (deviation(scores) + 1e-6)


def ref_dr_grpo(inputs: AdvantageInputs, row: int) -> float:
    return score(inputs, row) - mean([score(inputs, other) for other in members(inputs, row)])


def ref_rloo(inputs: AdvantageInputs, row: int) -> float:
    return score(inputs, row) - mean([score(inputs, other) for other in members(inputs, row) if other != row])


def ref_maxrl(inputs: AdvantageInputs, row: int) -> float:
    centre = mean([score(inputs, other) for other in members(inputs, row)])
    return (score(inputs, row) - centre) / centre


def ref_opo(inputs: AdvantageInputs, row: int) -> float:
    tokens = [length(inputs, other) for other in members(inputs, row)]
    weighted = [n * score(inputs, other) for n, other in zip(tokens, members(inputs, row), strict=True)]
    return score(inputs, row) - sum(weighted) / max(sum(tokens), 1)


def ref_gpg(inputs: AdvantageInputs, row: int) -> float:
    rows = [other for other in range(len(inputs.group_ids)) if inputs.valid[other]]
    return ref_dr_grpo(inputs, row) * len(rows) / len([other for other in rows if differs(inputs, other)])


def ref_grpo_passk(inputs: AdvantageInputs, row: int) -> float:
    scores = [score(inputs, other) for other in members(inputs, row)]
    others = [score(inputs, other) for other in members(inputs, row) if other != row]
    return (max(scores) - max(others)) / (deviation(scores) + 1e-6)


def ref_remax(inputs: AdvantageInputs, row: int) -> float:
    assert inputs.greedy_rewards is not None
    return score(inputs, row) - float(inputs.greedy_rewards[row])


def spread_out(inputs: AdvantageInputs, function: Callable[[AdvantageInputs, int], float], compares: bool) -> Rows:
    """The row's number on each trained token of valid rows."""
    out = []
    for row in range(len(inputs.group_ids)):
        counted = bool(inputs.valid[row]) and (differs(inputs, row) or not compares)
        number = function(inputs, row) if counted else 0.0
        out.append([number if trained else 0.0 for trained in inputs.loss_mask[row].tolist()])
    return out


def ref_whiten(inputs: AdvantageInputs, table: Rows) -> Rows:
    def trained(row: int, t: int) -> bool:
        return bool(inputs.loss_mask[row, t] and inputs.valid[row])

    every = [x for row, line in enumerate(table) for t, x in enumerate(line) if trained(row, t)]
    if len(every) < 2:
        return [[0.0] * len(line) for line in table]
    centre, root = mean(every), math.sqrt(deviation(every) ** 2 + 1e-8)
    return [
        [(x - centre) / root if trained(row, t) else 0.0 for t, x in enumerate(line)] for row, line in enumerate(table)
    ]


def ref_baseline(inputs: AdvantageInputs) -> Rows:
    white = ref_whiten(inputs, spread_out(inputs, ref_dr_grpo, compares=True))
    return [[x if differs(inputs, row) else 0.0 for x in line] for row, line in enumerate(white)]


def ref_temporal(inputs: AdvantageInputs, with_values: bool) -> tuple[Rows, Rows]:
    """Advantages before whitening, and returns: the definition as a sum over later actions, not as a recursion."""
    advantages, returns = [], []
    for row in range(len(inputs.group_ids)):
        width = inputs.loss_mask.shape[1]
        actions = [t for t in range(width) if inputs.loss_mask[row, t] and inputs.valid[row]]
        line, back = [0.0] * width, [0.0] * width
        ends = [*actions[1:], width]
        gains = (
            [
                sum(float(inputs.token_rewards[row, s]) for s in range(start, end))
                for start, end in zip(actions, ends, strict=True)
            ]
            if actions
            else []
        )
        values = [float(inputs.values[row, t]) if with_values and inputs.values is not None else 0.0 for t in actions]
        values.append(0.0)
        lam = LAMBDA if with_values else 1.0
        for i, t in enumerate(actions):
            line[t] = sum(
                (GAMMA * lam) ** (j - i) * (gains[j] + GAMMA * values[j + 1] - values[j])
                for j in range(i, len(actions))
            )
            back[t] = line[t] + values[i]
        advantages.append(line)
        returns.append(back)
    return advantages, returns


def reference(estimator: str, inputs: AdvantageInputs) -> Rows:
    rowwise = {
        "grpo": ref_grpo,
        "dr_grpo": ref_dr_grpo,
        "rloo": ref_rloo,
        "maxrl": ref_maxrl,
        "opo": ref_opo,
        "gpg": ref_gpg,
        "grpo_passk": ref_grpo_passk,
        "remax": ref_remax,
    }
    if estimator in rowwise:
        return spread_out(inputs, rowwise[estimator], compares=estimator != "remax")
    if estimator == "reinforce++-baseline":
        return ref_baseline(inputs)
    return ref_whiten(inputs, ref_temporal(inputs, with_values=estimator == "gae")[0])


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_plain_loops(estimator: str, dtype: torch.dtype) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    for seed in range(40):
        inputs = random_batch(seed, dtype)
        result = compute_advantages(inputs, config(estimator))
        expected = torch.tensor(reference(estimator, inputs), dtype=torch.float64)
        assert result.advantages.dtype == dtype
        torch.testing.assert_close(result.advantages.double(), expected, atol=tolerance, rtol=tolerance)
        # The function itself, without what compute_advantages does to the results of custom ones.
        direct = get_advantage_estimator(estimator)(inputs, config(estimator))
        assert torch.equal(direct.advantages, result.advantages)
        assert torch.equal(direct.returns, result.returns)


@pytest.mark.parametrize("estimator", ["gae", "reinforce++"])
def test_returns_agree_with_the_plain_loops(estimator: str) -> None:
    for seed in range(40):
        inputs = random_batch(seed, torch.float64)
        result = compute_advantages(inputs, config(estimator))
        expected = torch.tensor(ref_temporal(inputs, with_values=estimator == "gae")[1], dtype=torch.float64)
        torch.testing.assert_close(result.returns, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"gae", "reinforce++"}))
def test_returns_of_the_others_are_the_total_reward(estimator: str) -> None:
    for seed in range(10):
        inputs = random_batch(seed, torch.float64)
        expected = torch.tensor(spread_out(inputs, score, compares=False), dtype=torch.float64)
        torch.testing.assert_close(compute_advantages(inputs, config(estimator)).returns, expected)


def test_there_is_a_reference_for_every_registered_estimator() -> None:
    assert set(ESTIMATORS) <= set(list_advantage_estimators())


# ---- Properties.

seeds = st.integers(min_value=0, max_value=10**6)
few = settings(max_examples=25, deadline=None)


def changed(inputs: AdvantageInputs, **fields: object) -> AdvantageInputs:
    return AdvantageInputs(**{**{name: getattr(inputs, name) for name in inputs.__slots__}, **fields})


def advantages(inputs: AdvantageInputs, estimator: str) -> torch.Tensor:
    return compute_advantages(inputs, config(estimator)).advantages


@few
@given(seed=seeds, order=seeds)
def test_the_order_of_rows_does_not_matter(seed: int, order: int) -> None:
    inputs = random_batch(seed, torch.float64)
    shuffle = torch.randperm(len(inputs.group_ids), generator=torch.Generator().manual_seed(order))
    moved = changed(inputs, **{name: getattr(inputs, name)[shuffle] for name in inputs.__slots__[:6]})
    for estimator in ESTIMATORS:
        expected = advantages(inputs, estimator)[shuffle]
        torch.testing.assert_close(advantages(moved, estimator), expected, atol=1e-9, rtol=1e-9)


@few
@given(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_does_not_matter(seed: int, left: int, right: int) -> None:
    inputs = random_batch(seed, torch.float64)
    count, width = inputs.loss_mask.shape

    def pad(tensor: torch.Tensor, filling: float | bool) -> torch.Tensor:
        new = torch.full((count, left + width + right), filling, dtype=tensor.dtype)
        new[:, left : left + width] = tensor
        return new

    assert inputs.values is not None
    padded = changed(
        inputs,
        token_rewards=pad(inputs.token_rewards, 0.0),
        loss_mask=pad(inputs.loss_mask, False),
        values=pad(inputs.values, math.nan),
    )
    for estimator in ESTIMATORS:
        expected = pad(advantages(inputs, estimator), 0.0)
        torch.testing.assert_close(advantages(padded, estimator), expected, atol=1e-9, rtol=1e-9)


@few
@given(seed=seeds, shift=st.floats(-4.0, 4.0).map(lambda x: round(x * 8) / 8))
def test_a_shift_of_all_rewards_changes_nothing(seed: int, shift: float) -> None:
    """Shifts are eighths, so that sums stay exact and equal rewards stay equal."""
    inputs = random_batch(seed, torch.float64)
    rewards = inputs.token_rewards.clone()
    rewards[:, 0] += shift
    moved = changed(inputs, token_rewards=rewards)
    for estimator in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce++-baseline"):
        torch.testing.assert_close(advantages(moved, estimator), advantages(inputs, estimator), atol=1e-8, rtol=1e-8)


@few
@given(seed=seeds, scale=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_scaling_all_rewards_scales_plain_estimators_and_leaves_normalised_ones(seed: int, scale: float) -> None:
    inputs = random_batch(seed, torch.float64)
    assert inputs.greedy_rewards is not None
    scaled = changed(inputs, token_rewards=inputs.token_rewards * scale, greedy_rewards=inputs.greedy_rewards * scale)
    for estimator in ("dr_grpo", "rloo", "opo", "gpg", "remax"):
        torch.testing.assert_close(advantages(scaled, estimator), scale * advantages(inputs, estimator))
    # 1e-6 beside a deviation of at least 1/8 · 1/4, and 1e-8 beside its square: below 1e-4 of the result.
    for estimator in ("grpo", "maxrl", "reinforce++", "reinforce++-baseline", "grpo_passk"):
        torch.testing.assert_close(advantages(scaled, estimator), advantages(inputs, estimator), atol=1e-4, rtol=1e-4)


@few
@given(seed=seeds)
def test_one_groups_rewards_do_not_reach_another_group(seed: int) -> None:
    inputs = random_batch(seed, torch.float64)
    first = inputs.group_ids == inputs.group_ids[0]
    other = changed(inputs, token_rewards=torch.where(first[:, None], inputs.token_rewards, 1.0))
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl", "opo", "grpo_passk"):
        torch.testing.assert_close(advantages(other, estimator)[first], advantages(inputs, estimator)[first])


@few
@given(seed=seeds)
def test_group_relative_advantages_of_a_group_sum_to_zero(seed: int) -> None:
    inputs = random_batch(seed, torch.float64)
    every = changed(inputs, loss_mask=torch.ones_like(inputs.loss_mask))
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl", "gpg"):
        column = advantages(every, estimator)[:, 0]
        for group in inputs.group_ids.unique():
            assert float(column[inputs.group_ids == group].sum()) == pytest.approx(0.0, abs=1e-9)
