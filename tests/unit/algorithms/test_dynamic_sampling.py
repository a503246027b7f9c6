"""Dynamic sampling: prompts without a difference are dropped or replaced, within bounds and with counts."""

from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_core.algorithms.dynamic_sampling import FilterState, add_batch, replace_useless, take_full, useful
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


def test_a_prompt_is_useful_when_the_rewards_of_its_good_samples_differ() -> None:
    assert useful(prompt("a", 0.0, 1.0), 0.0)
    assert not useful(prompt("a", 1.0, 1.0), 0.0)
    assert not useful(prompt("a", 1.0), 0.0)
    assert not useful([sample("a", 0, 1.0), sample("a", 1, 0.0, error="boom")], 0.0)
    assert useful(prompt("a", 0.5, 0.5001), 0.0)
    assert not useful(prompt("a", 0.5, 0.5001), 0.01)


def test_filtering_collects_over_batches_until_it_is_full() -> None:
    """Two prompts wanted. Batch 1: a differs, b does not. Batch 2: c and d differ: a and c are taken, d is left."""
    state = add_batch(FilterState(), prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0), 0.0)
    assert take_full(state, 2, max_batches=30) is None
    state = add_batch(state, prompt("c", 1.0, 0.0) + prompt("d", 0.0, 1.0), 0.0)
    full = take_full(state, 2, max_batches=2)
    assert full is not None
    assert uids(full) == ["a", "a", "c", "c"]
    assert state.counts() == {
        "dynamic_sampling/batches": 2.0,
        "dynamic_sampling/sampled_prompts": 4.0,
        "dynamic_sampling/dropped_prompts": 1.0,
        "dynamic_sampling/kept_prompts": 3.0,
    }


def test_a_prompt_that_comes_twice_stands_there_twice() -> None:
    state = add_batch(add_batch(FilterState(), prompt("a", 0.0, 1.0), 0.0), prompt("a", 1.0, 0.0), 0.0)
    full = take_full(state, 2, max_batches=2)
    assert full is not None
    assert [rollout.reward for rollout in full] == [0.0, 1.0, 1.0, 0.0]


def test_a_batch_that_never_fills_stops_with_counts_and_can_go_on() -> None:
    """Bound 2: after two batches with one useful prompt of three it stops; the state goes on with a third batch."""
    state = FilterState()
    for uid in ("b", "c"):
        state = add_batch(state, prompt(uid, 1.0, 1.0) + (prompt("a", 0.0, 1.0) if uid == "b" else []), 0.0)
    with pytest.raises(RolloutError, match=r"found 1 of 2 .* after 2 batches \(3 prompts sampled, 2 dropped\)"):
        take_full(state, 2, max_batches=2)
    state = add_batch(state, prompt("d", 1.0, 0.0), 0.0)
    full = take_full(state, 2, max_batches=3)
    assert full is not None
    assert uids(full) == ["a", "a", "d", "d"]


def test_minus_one_never_stops() -> None:
    state = FilterState()
    for _ in range(50):
        state = add_batch(state, prompt("b", 1.0, 1.0), 0.0)
    assert take_full(state, 1, max_batches=-1) is None


def test_adding_does_not_change_the_earlier_state() -> None:
    """A retry starts from the state that was kept."""
    before = add_batch(FilterState(), prompt("a", 0.0, 1.0), 0.0)
    add_batch(before, prompt("b", 0.0, 1.0), 0.0)
    assert before.batches == 1
    assert len(before.kept) == 1


def test_replacing_puts_copies_of_useful_prompts_in_place() -> None:
    """b and c are useless; a and d are useful: each is copied once, in the places of b and c."""
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0) + prompt("c", 0.0, 0.0) + prompt("d", 1.0, 0.0)
    result = replace_useless(batch, 0.3, 0.0, seed=5)
    assert result is not None
    names = uids(result.rollouts)
    assert names[:2] == ["a", "a"]
    assert names[6:] == ["d", "d"]
    assert sorted(names) == ["a", "a", "a", "a", "d", "d", "d", "d"]
    assert result.group_ids == (0, 0, 1, 1, 2, 2, 3, 3)
    assert result.replaced == 2
    assert replace_useless(batch, 0.3, 0.0, seed=5) == result
    drawn = {tuple(uids(r.rollouts)) for s in range(20) if (r := replace_useless(batch, 0.3, 0.0, seed=s))}
    assert len(drawn) == 2


def test_one_useful_prompt_is_copied_as_often_as_needed() -> None:
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0) + prompt("c", 0.0, 0.0)
    result = replace_useless(batch, 0.3, 0.0, seed=1)
    assert result is not None
    assert uids(result.rollouts) == ["a"] * 6
    assert result.group_ids == (0, 0, 1, 1, 2, 2)


def test_replacing_needs_more_than_the_least_share_of_useful_prompts() -> None:
    """One of two is exactly 0.5: not more."""
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 1.0)
    assert replace_useless(batch, 0.5, 0.0, seed=1) is None
    assert replace_useless(batch, 0.49, 0.0, seed=1) is not None
    assert replace_useless(prompt("b", 1.0, 1.0), 0.0, 0.0, seed=1) is None


def test_a_batch_of_useful_prompts_stays_as_it_is() -> None:
    batch = prompt("a", 0.0, 1.0) + prompt("b", 1.0, 0.0)
    result = replace_useless(batch, 0.3, 0.0, seed=1)
    assert result is not None
    assert list(result.rollouts) == batch
    assert result.replaced == 0
