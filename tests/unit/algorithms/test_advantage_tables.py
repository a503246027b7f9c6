"""Advantages of small batches, worked out on paper in each test."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from skyrl_core.algorithms.advantages import compute_advantages, filter_zero_variance, zero_variance_share
from skyrl_core.algorithms.advantages.normalize import whiten
from skyrl_core.algorithms.types import AdvantageInputs
from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.errors import ConfigurationError, RewardError


def rows(
    rewards: Sequence[float],
    groups: Sequence[int],
    lengths: Sequence[int] | None = None,
    *,
    width: int = 3,
    valid: Sequence[bool] | None = None,
    greedy: Sequence[float] | None = None,
    trajectories: Sequence[int] | None = None,
) -> AdvantageInputs:
    """A batch whose row i has `lengths[i]` trained tokens on the left and its reward on the last of them."""
    lengths = lengths or [1] * len(rewards)
    mask = torch.tensor([[t < n for t in range(width)] for n in lengths])
    tokens = torch.zeros(len(rewards), width)
    for row, (reward, n) in enumerate(zip(rewards, lengths, strict=True)):
        tokens[row, max(n - 1, 0)] = reward
    return AdvantageInputs(
        token_rewards=tokens,
        loss_mask=mask,
        group_ids=torch.tensor(groups),
        valid=torch.tensor(valid or [True] * len(rewards)),
        greedy_rewards=None if greedy is None else torch.tensor(greedy),
        trajectory_ids=None if trajectories is None else torch.tensor(trajectories),
    )


def first_tokens(inputs: AdvantageInputs, estimator: str, **settings: object) -> list[float]:
    """Each row's advantage on its first token."""
    config = AlgorithmConfig(advantage_estimator=estimator, **settings)
    return compute_advantages(inputs, config).advantages[:, 0].tolist()


def test_grpo_divides_the_distance_to_the_group_mean_by_its_deviation() -> None:
    """Group 0: rewards 1, 0, 0: mean 1/3, deviation sqrt((4/9 + 1/9 + 1/9) / 2) = 0.577350.
    (1 - 1/3) / 0.577350 = 1.154701, (0 - 1/3) / 0.577350 = -0.577350 (the 1e-6 moves the sixth digit).
    Group 1: rewards 2, 4: mean 3, deviation sqrt(2) = 1.414214: ±0.707107."""
    inputs = rows([1.0, 2.0, 0.0, 0.0, 4.0], [0, 1, 0, 0, 1])
    expected = [1.154699, -0.707106, -0.577349, -0.577349, 0.707106]
    assert first_tokens(inputs, "grpo") == pytest.approx(expected, abs=1e-6)


def test_grpo_without_deviation_and_dr_grpo_only_subtract_the_mean() -> None:
    """Rewards 1, 0, 0 of one prompt: mean 1/3. dr_grpo does so whatever grpo_norm_by_std says."""
    inputs = rows([1.0, 0.0, 0.0], [7, 7, 7])
    expected = [2 / 3, -1 / 3, -1 / 3]
    assert first_tokens(inputs, "grpo", grpo_norm_by_std=False) == pytest.approx(expected)
    assert first_tokens(inputs, "dr_grpo", grpo_norm_by_std=True) == pytest.approx(expected)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    """Rewards 1, 0, 0.5: others' means 0.25, 0.75, 0.5."""
    assert first_tokens(rows([1.0, 0.0, 0.5], [0, 0, 0]), "rloo") == pytest.approx([0.75, -0.75, 0.0])


def test_maxrl_divides_by_the_mean() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4: (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1. All 0: 0."""
    inputs = rows([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1])
    assert first_tokens(inputs, "maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0])


def test_maxrl_refuses_negative_rewards() -> None:
    """Rewards -2, 1 have mean -1/2: dividing by it would reward the worse sample."""
    with pytest.raises(RewardError, match="maxrl needs rewards that are not negative"):
        first_tokens(rows([-2.0, 1.0], [0, 0]), "maxrl")


def test_opo_weighs_the_baseline_by_length() -> None:
    """Rewards 1 (1 token), 0 (3 tokens): baseline (1·1 + 3·0) / 4 = 1/4."""
    assert first_tokens(rows([1.0, 0.0], [0, 0], [1, 3]), "opo") == pytest.approx([0.75, -0.25])


def test_gpg_makes_up_for_prompts_without_gradient() -> None:
    """Four samples, two of them in a group that differs: α = 4/2 = 2. 2 · (1 - 1/2) = 1."""
    assert first_tokens(rows([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]), "gpg") == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_gpg_gives_zero_when_no_prompt_has_a_gradient() -> None:
    assert first_tokens(rows([1.0, 1.0], [0, 0]), "gpg") == [0.0, 0.0]


def test_grpo_passk_gives_the_best_sample_its_lead() -> None:
    """Group 0: 3, 1, 2: lead 3 - 2 = 1; deviation 1, so 1 / (1 + 1e-6). Group 1: two share the best: nobody leads."""
    inputs = rows([3.0, 1.0, 2.0, 5.0, 5.0, 0.0], [0, 0, 0, 1, 1, 1])
    assert first_tokens(inputs, "grpo_passk") == pytest.approx([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], abs=2e-6)
    plain = first_tokens(rows([4.0, -1.0, 2.0], [0, 0, 0]), "grpo_passk", grpo_norm_by_std=False)
    assert plain == pytest.approx([2.0, 0.0, 0.0])


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    """Group 0: 1 (1 token), 0 (2 tokens): centred ½, -½. Tokens: ½, -½, -½: mean -1/6; variance
    ((2/3)² + 2·(1/3)²) / 2 = 1/3. (½ + 1/6) · √3 = 1.154701, (-½ + 1/6) · √3 = -0.577350."""
    result = first_tokens(rows([1.0, 0.0], [0, 0], [1, 2]), "reinforce++-baseline")
    assert result == pytest.approx([1.154701, -0.577350], abs=1e-6)


def test_reinforce_plus_plus_baseline_counts_groups_without_difference_as_zeros_and_leaves_them_at_zero() -> None:
    """Group 0: ½, -½ (one token each). Group 1: both 1, so 0, 0. Four tokens: mean 0, variance ½ / 3 = 1/6:
    ½ · √6 = 1.224745."""
    result = first_tokens(rows([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]), "reinforce++-baseline")
    assert result == pytest.approx([1.224745, -1.224745, 0.0, 0.0], abs=1e-6)


def test_remax_subtracts_the_greedy_reward() -> None:
    inputs = rows([1.0, 0.0, 0.5], [0, 0, 1], greedy=[0.25, 0.25, 1.0])
    assert first_tokens(inputs, "remax") == pytest.approx([0.75, -0.25, -0.5])


def test_remax_says_what_is_missing() -> None:
    with pytest.raises(RewardError, match="greedy completion, got none"):
        first_tokens(rows([1.0], [0]), "remax")


def test_a_greedy_reward_that_is_no_number_names_its_row() -> None:
    with pytest.raises(RewardError, match="greedy reward of row 1"):
        rows([1.0, 1.0], [0, 0], greedy=[0.0, float("nan")])


def gae_inputs(rewards: Tensor, mask: Tensor, values: Tensor) -> AdvantageInputs:
    count = len(rewards)
    return AdvantageInputs(
        token_rewards=rewards,
        loss_mask=mask.bool(),
        group_ids=torch.arange(count),
        valid=torch.ones(count, dtype=torch.bool),
        values=values,
    )


def test_gae_follows_its_recursion() -> None:
    """γ = 0.5, λ = 0.5, rewards 0, 1, values 0.2, 0.4. Backwards: δ_1 = 1 - 0.4 = 0.6; δ_0 = 0 + 0.5·0.4 - 0.2 = 0.
    Advantages 0 + 0.25·0.6 = 0.15 and 0.6. Returns 0.15 + 0.2 = 0.35, 0.6 + 0.4 = 1.
    Whitened: mean 0.375, variance (2 · 0.225²) / 1 = 0.10125, 0.225 / 0.318198 = 0.707107."""
    inputs = gae_inputs(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([[0.2, 0.4]]))
    config = AlgorithmConfig(advantage_estimator="gae", gamma=0.5, lambd=0.5)
    result = compute_advantages(inputs, config)
    assert result.returns.tolist()[0] == pytest.approx([0.35, 1.0])
    assert result.advantages.tolist()[0] == pytest.approx([-0.707107, 0.707107], abs=1e-6)


def test_gae_passes_over_observation_tokens_whatever_value_stands_on_them() -> None:
    """The same two actions with two observation tokens between them, and a third behind: nothing changes, though the
    observations' values are large or NaN. The reward on the observation after the last action counts for it."""
    plain = gae_inputs(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([[0.2, 0.4]]))
    spread = gae_inputs(
        torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]),
        torch.tensor([[1, 0, 0, 1, 0]]),
        torch.tensor([[0.2, 99.0, float("nan"), 0.4, float("inf")]]),
    )
    config = AlgorithmConfig(advantage_estimator="gae", gamma=0.5, lambd=0.5)
    expected, result = compute_advantages(plain, config), compute_advantages(spread, config)
    keep = spread.loss_mask[0]
    assert result.advantages[0][keep].tolist() == pytest.approx(expected.advantages[0].tolist())
    assert result.returns[0][keep].tolist() == pytest.approx([0.35, 1.0])
    assert result.advantages[0][~keep].tolist() == [0.0, 0.0, 0.0]


def test_gae_without_critic_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.critic\.model\.path"):
        first_tokens(rows([1.0], [0]), "gae")


def test_reinforce_plus_plus_takes_the_discounted_reward_to_come() -> None:
    """γ = 0.5, reward 1 on the second of two tokens, and a row with reward 0 on its one token. Returns 0.5, 1 and 0.
    Tokens 0.5, 1, 0: mean 0.5, variance 0.25: whitened 0, 1, -1 (but for 1e-8 under the root)."""
    inputs = rows([1.0, 0.0], [0, 0], [2, 1])
    result = compute_advantages(inputs, AlgorithmConfig(advantage_estimator="reinforce++", gamma=0.5))
    assert result.returns.tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]))


def test_reinforce_plus_plus_carries_a_late_reward_to_earlier_turns() -> None:
    """Actions at 0 and 3, observations between and behind; the reward 1 stands on the last observation. γ = 0.5 counts
    actions: returns 0.5 and 1. The -8 before the first action of the second row counts for nobody."""
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [-8.0, 0.0, 2.0, 0.0, 0.0]]),
        loss_mask=torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]).bool(),
        group_ids=torch.tensor([0, 1]),
        valid=torch.tensor([True, True]),
    )
    result = compute_advantages(inputs, AlgorithmConfig(advantage_estimator="reinforce++", gamma=0.5))
    assert result.returns.tolist() == [[0.5, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]]


COMPARING = ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "gpg", "grpo_passk", "reinforce++-baseline"]


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_of_one_gets_zero_and_one_warning(estimator: str, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts 0 and 2 have one sample, prompt 1 two."""
    inputs = rows([5.0, 1.0, 0.0, 3.0], [0, 1, 1, 2])
    with caplog.at_level(logging.WARNING):
        result = first_tokens(inputs, estimator)
    assert [result[0], result[3]] == [0.0, 0.0]
    assert result[1] > 0.0
    assert [record.message for record in caplog.records if "2 of 3 prompts have one valid sample" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("estimator", COMPARING)
def test_a_group_without_difference_gets_exact_zeros(estimator: str) -> None:
    """0.1 three times: its mean in floating point may differ from it, its advantage may not differ from 0."""
    inputs = rows([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1])
    assert first_tokens(inputs, estimator)[:3] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [*COMPARING, "remax", "reinforce++", "gae"])
def test_failed_rows_get_zero_and_change_nothing_for_the_others(estimator: str) -> None:
    """A failed row's reward and values are NaN: they must not be read."""
    nan = float("nan")
    good = rows([1.0, 0.0, 0.5], [0, 0, 0], [1, 2, 3], greedy=[0.25] * 3)
    bad = rows([1.0, nan, 0.0, 0.5], [0, 0, 0, 0], [1, 3, 2, 3], valid=[True, False, True, True], greedy=[0.25] * 4)
    config = AlgorithmConfig(advantage_estimator=estimator)
    if estimator == "gae":
        values = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.0, 0.5, 0.0]])
        good = AdvantageInputs(**{**_fields(good), "values": values})
        padded = torch.cat([values[:1], torch.full((1, 3), nan), values[1:]])
        bad = AdvantageInputs(**{**_fields(bad), "values": padded})
    expected, result = compute_advantages(good, config), compute_advantages(bad, config)
    kept = [0, 2, 3]
    torch.testing.assert_close(result.advantages[kept], expected.advantages)
    torch.testing.assert_close(result.returns[kept], expected.returns)
    assert result.advantages[1].tolist() == [0.0] * 3
    assert result.returns[1].tolist() == [0.0] * 3


def _fields(inputs: AdvantageInputs) -> dict[str, Tensor | None]:
    return {name: getattr(inputs, name) for name in inputs.__slots__}


def test_a_reward_that_is_no_number_names_row_and_prompt() -> None:
    with pytest.raises(RewardError, match=r"row 1 \(prompt group 4\)"):
        rows([1.0, float("nan")], [4, 4])


def test_an_empty_response_counts_in_its_group_and_breaks_nothing() -> None:
    """Rewards 1 and 0, the second without any token: the first gets (1 - ½) / 0.707107 = 0.707107."""
    for estimator in [*COMPARING, "reinforce++"]:
        result = compute_advantages(rows([1.0, 0.0], [0, 0], [1, 0]), AlgorithmConfig(advantage_estimator=estimator))
        assert torch.isfinite(result.advantages).all()
        assert result.advantages[1].tolist() == [0.0] * 3
    assert first_tokens(rows([1.0, 0.0], [0, 0], [1, 0]), "grpo")[0] == pytest.approx(0.707106, abs=1e-6)


def test_a_score_is_the_total_reward_wherever_it_stands() -> None:
    """Row 0: 0.5 + 0.5, one of them on a masked observation. Row 1: 0. Mean ½."""
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]),
        loss_mask=torch.tensor([[True, False, True], [True, True, False]]),
        group_ids=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
    )
    result = compute_advantages(inputs, AlgorithmConfig(advantage_estimator="dr_grpo"))
    assert result.advantages.tolist() == [[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]
    assert result.returns.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_step_wise_rows_share_their_trajectorys_advantage() -> None:
    """Trajectory 5: rows 0 and 2, rewards 0 + 1; trajectory 6: row 1, reward 0. Mean ½."""
    inputs = rows([0.0, 0.0, 1.0], [0, 0, 0], [1, 3, 2], trajectories=[5, 6, 5])
    assert first_tokens(inputs, "dr_grpo") == pytest.approx([0.5, -0.5, 0.5])
    # OPO counts the trajectory's tokens: (3·1 + 3·0) / 6 = ½.
    assert first_tokens(inputs, "opo") == pytest.approx([0.5, -0.5, 0.5])


def test_a_trajectory_with_a_failed_row_is_out() -> None:
    inputs = rows([0.0, 0.0, 9.0, 1.0], [0, 0, 0, 0], trajectories=[5, 6, 5, 7], valid=[True, True, False, True])
    assert first_tokens(inputs, "dr_grpo") == pytest.approx([0.0, -0.5, 0.0, 0.5])


def test_rows_of_one_trajectory_must_answer_one_prompt() -> None:
    with pytest.raises(ValueError, match="different group_ids"):
        first_tokens(rows([0.0, 1.0], [0, 1], trajectories=[3, 3]), "grpo")


@pytest.mark.parametrize("estimator", ["gae", "reinforce++"])
def test_estimators_that_look_at_tokens_refuse_step_wise_rows(estimator: str) -> None:
    with pytest.raises(ConfigurationError, match="trajectories of several rows"):
        first_tokens(rows([0.0, 1.0], [0, 0], trajectories=[3, 3]), estimator)


def test_batch_normalisation_is_over_trained_tokens_only() -> None:
    """Advantages ½ (1 token) and -½ (2 tokens): mean -1/6, variance (4/9 + 1/9 + 1/9) / 3 = 2/9.
    (½ + 1/6) / 0.471405 = 1.414214, (-½ + 1/6) / 0.471405 = -0.707107."""
    inputs = rows([1.0, 0.0], [0, 0], [1, 2])
    config = AlgorithmConfig(advantage_estimator="dr_grpo", advantage_batch_normalize=True)
    result = compute_advantages(inputs, config)
    expected = torch.tensor([[1.414214, 0.0, 0.0], [-0.707107, -0.707107, 0.0]])
    torch.testing.assert_close(result.advantages, expected, atol=1e-6, rtol=0.0)
    assert result.returns[0, 0] == 1.0


def test_whitening_fewer_than_two_tokens_gives_zero() -> None:
    mask = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[3.0, 4.0]]), mask).tolist() == [[0.0, 0.0]]
    assert whiten(torch.tensor([[3.0, 4.0]]), ~(mask | ~mask)).tolist() == [[0.0, 0.0]]


def test_zero_variance_filter_masks_prompts_without_difference() -> None:
    """Prompt 0: 1, 1: out. Prompt 1: 1, 0: stays. Prompt 2: one sample: stays. Prompt 3: 1, 1 and a fully masked 0,
    which does not count: out. Prompt 4: a spread of 1e-7, below the tolerance of 1e-6: out."""
    inputs = rows(
        [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1e-7],
        [0, 0, 1, 1, 2, 3, 3, 3, 4, 4],
        [1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
    )
    mask = filter_zero_variance(inputs, 1e-6)
    assert mask[:, 0].tolist() == [False, False, True, True, True, False, False, False, False, False]
    assert filter_zero_variance(inputs, 0.0)[8:, 0].tolist() == [True, True]


def test_zero_variance_share_counts_prompts_with_two_samples_or_more() -> None:
    """Prompt 0 equal (3 samples), prompt 1 differs, prompt 2 has one sample: 1 of 2."""
    inputs = rows([1.0, 1.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 0, 1, 1, 2])
    assert zero_variance_share(inputs) == 0.5
    assert zero_variance_share(rows([1.0], [0])) == 0.0


def test_wrong_shapes_and_types_are_named() -> None:
    ones = torch.ones(2, 3)
    flags, groups = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"token_rewards must be \[B, T\]"):
        AdvantageInputs(token_rewards=ones[0], loss_mask=ones.bool(), group_ids=groups, valid=flags)
    with pytest.raises(ValueError, match=r"loss_mask must have shape \(2, 3\), got \(2, 2\)"):
        AdvantageInputs(token_rewards=ones, loss_mask=ones[:, :2].bool(), group_ids=groups, valid=flags)
    with pytest.raises(ValueError, match="loss_mask must be a bool tensor"):
        AdvantageInputs(token_rewards=ones, loss_mask=ones, group_ids=groups, valid=flags)


def test_batch_normalisation_of_one_token_gives_zero() -> None:
    """remax with greedy reward 0: advantage 3, its own mean."""
    config = AlgorithmConfig(advantage_estimator="remax", advantage_batch_normalize=True)
    assert compute_advantages(rows([3.0], [0], greedy=[0.0]), config).advantages.tolist() == [[0.0, 0.0, 0.0]]


def test_scores_are_zero_where_a_row_is_not_valid() -> None:
    assert rows([2.0, float("nan")], [0, 0], valid=[True, False]).scores().tolist() == [2.0, 0.0]
