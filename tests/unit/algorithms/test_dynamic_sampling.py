"""Dynamic sampling: prompts without a difference are dropped or replaced, within bounds and with counts."""

from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_core.algorithms.dynamic_sampling import Draw, Selection, count, enough, select, useful
from skyrl_core.config.algorithm import DynamicSamplingConfig
from skyrl_core.data.carriers import Rollout
from skyrl_core.errors import RolloutError


def sample(uid: str, index: int, reward: float, error: str | None = None) -> Rollout:
    one = np.ones(1, dtype=np.int64)
    return Rollout(
        uid=uid,
        sample_index=index,
        prompt_ids=one,
        response_ids=one,
        loss_mask=one,
        rollout_logprobs=None,
        token_rewards=np.array([reward], dtype=np.float32),
        stop_reason="stop",
        policy_versions=(0,),
        error=error,
    )


def prompt(uid: str, *rewards: float) -> list[Rollout]:
    return [sample(uid, index, reward) for index, reward in enumerate(rewards)]


def uids(rollouts: Sequence[Rollout]) -> list[str]:
    return [rollout.uid for rollout in rollouts]


FILTER = DynamicSamplingConfig(type="filter")
REPLACE = DynamicSamplingConfig(type="replace")


def test_a_prompt_is_useful_when_the_rewards_of_its_good_samples_differ() -> None:
    assert useful(prompt("a", 0.0, 1.0), 0.0)
    assert not useful(prompt("a", 1.0, 1.0), 0.0)
    assert not useful(prompt("a", 1.0), 0.0)
    assert not useful([sample("a", 0, 1.0), sample("a", 1, 0.0, error="boom")], 0.0)
    assert useful(prompt("a", 0.5, 0.5001), 0.0)
    assert not useful(prompt("a", 0.5, 0.5001), 0.01)


def test_a_sample_of_several_turns_has_the_reward_of_all_of_them() -> None:
    """Sample 0 earns 1 + 0, sample 1 earns 0 + 1: no difference, though their rows differ."""
    turns = [sample("a", 0, 1.0), sample("a", 0, 0.0), sample("a", 1, 0.0), sample("a", 1, 1.0)]
    assert not useful(turns, 0.0)
    assert useful([*turns, sample("a", 1, 0.5)], 0.0)
    assert not useful([*turns, sample("a", 1, 0.5, error="boom")], 0.0)


def test_without_a_type_the_batch_stays_as_it_is() -> None:
    batch = prompt("a", 1.0, 1.0) + prompt("b", 0.0, 1.0)
    off = DynamicSamplingConfig()
    assert enough([count(batch, 0.0)], 2, off)
    assert select([batch], 2, off, 0.0, seed=1) == Selection(rollouts=tuple(batch), group_ids=(0, 0, 1, 1), metrics={})


def test_filtering_collects_over_draws_until_the_batch_is_full() -> None:
    """Two prompts wanted. Draw 1: a differs, b does not. Draw 2: c and d differ: a and c are taken, d is left."""
    draws = [prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0), prompt("c", 1.0, 0.0) + prompt("d", 0.0, 1.0)]
    counts = [count(draw, 0.0) for draw in draws]
    assert counts == [Draw(prompts=2, useful=1), Draw(prompts=2, useful=2)]
    assert not enough(counts[:1], 2, FILTER)
    assert enough(counts, 2, FILTER)
    chosen = select(draws, 2, FILTER, 0.0, seed=1)
    assert uids(chosen.rollouts) == ["a", "a", "c", "c"]
    assert chosen.metrics == {
        "dynamic_sampling/batches": 2.0,
        "dynamic_sampling/sampled_prompts": 4.0,
        "dynamic_sampling/dropped_prompts": 1.0,
        "dynamic_sampling/useful_prompts": 3.0,
    }


def test_a_prompt_that_comes_twice_is_two_groups() -> None:
    chosen = select([prompt("a", 0.0, 1.0), prompt("a", 1.0, 0.0)], 2, FILTER, 0.0, seed=1)
    assert [rollout.reward for rollout in chosen.rollouts] == [0.0, 1.0, 1.0, 0.0]
    assert chosen.group_ids == (0, 0, 1, 1)


def test_a_batch_that_never_fills_stops_with_counts_and_can_go_on() -> None:
    """Bound 2: after two draws with one useful prompt of three it stops; a higher bound goes on from the same draws."""
    draws = [Draw(prompts=2, useful=1), Draw(prompts=1, useful=0)]
    bound = DynamicSamplingConfig(type="filter", max_sample_batches=2)
    assert not enough(draws[:1], 2, bound)
    with pytest.raises(RolloutError, match=r"found 1 of 2 .* after 2 batches \(3 prompts sampled, 2 dropped\)"):
        enough(draws, 2, bound)
    higher = DynamicSamplingConfig(type="filter", max_sample_batches=3)
    assert not enough(draws, 2, higher)
    assert enough([*draws, Draw(prompts=1, useful=1)], 2, higher)


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_of_nothing_never_stops(bound: int) -> None:
    config = DynamicSamplingConfig(type="filter", max_sample_batches=bound)
    assert not enough([Draw(prompts=1, useful=0)] * 50, 1, config)


def test_replacing_puts_copies_of_useful_prompts_in_place() -> None:
    """b and c are useless; a and d are useful: each is copied once, in the places of b and c."""
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0) + prompt("c", 0.0, 0.0) + prompt("d", 1.0, 0.0)
    result = select([batch], 4, REPLACE, 0.0, seed=5)
    names = uids(result.rollouts)
    assert names[:2] == ["a", "a"]
    assert names[6:] == ["d", "d"]
    assert sorted(names) == ["a", "a", "a", "a", "d", "d", "d", "d"]
    assert result.group_ids == (0, 0, 1, 1, 2, 2, 3, 3)
    assert result.metrics["dynamic_sampling/replaced_prompts"] == 2
    assert select([batch], 4, REPLACE, 0.0, seed=5) == result
    drawn = {tuple(uids(select([batch], 4, REPLACE, 0.0, seed=s).rollouts)) for s in range(20)}
    assert len(drawn) == 2


def test_one_useful_prompt_is_copied_as_often_as_needed() -> None:
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0) + prompt("c", 0.0, 0.0)
    result = select([batch], 3, REPLACE, 0.0, seed=1)
    assert uids(result.rollouts) == ["a"] * 6
    assert result.group_ids == (0, 0, 1, 1, 2, 2)


def test_replacing_needs_more_than_the_least_share_of_useful_prompts() -> None:
    """One of two is exactly 0.5: not more."""
    half = DynamicSamplingConfig(type="replace", min_replace_ratio=0.5, max_sample_batches=3)
    assert not enough([Draw(prompts=2, useful=1)], 2, half)
    assert enough([Draw(prompts=2, useful=1)], 2, DynamicSamplingConfig(type="replace", min_replace_ratio=0.49))
    assert not enough([Draw(prompts=1, useful=0)], 1, DynamicSamplingConfig(type="replace", min_replace_ratio=0.0))
    with pytest.raises(RolloutError, match=r"found 3 of 2 .* after 3 batches"):
        enough([Draw(prompts=2, useful=1)] * 3, 2, half)


def test_replacing_uses_the_last_draw_alone() -> None:
    draws = [prompt("a", 1.0, 1.0) + prompt("b", 0.0, 0.0), prompt("c", 0.0, 1.0) + prompt("d", 0.0, 0.0)]
    assert uids(select(draws, 2, REPLACE, 0.0, seed=1).rollouts) == ["c", "c", "c", "c"]


def test_a_batch_of_useful_prompts_stays_as_it_is() -> None:
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 0.0)
    result = select([batch], 2, REPLACE, 0.0, seed=1)
    assert list(result.rollouts) == batch
    assert result.metrics["dynamic_sampling/replaced_prompts"] == 0
