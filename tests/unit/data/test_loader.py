"""The order of prompts: every uid once an epoch, the same whatever interrupts, fetches or cuts it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.data.carriers import Prompt
from skyrl_core.data.loader import DataPosition, PromptLoader, epoch_order
from skyrl_core.errors import CheckpointError, DatasetError

SIZES = st.integers(1, 40)
BATCHES = st.integers(1, 45)
SEEDS = st.integers(0, 2**31)


@dataclass
class Rows:
    """Prompts named by their number."""

    size: int
    fingerprint: str = "f" * 64

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return Prompt(uid=str(index), messages=({"role": "user", "content": "?"},), env_class="e")


def uids(loader: PromptLoader, steps: range) -> list[list[str]]:
    return [[prompt.uid for prompt in loader.batch(step)] for step in steps]


@given(SEEDS, st.integers(0, 5), st.integers(0, 200))
def test_an_epoch_is_a_permutation_and_depends_on_nothing_else(seed: int, epoch: int, size: int) -> None:
    order = epoch_order(seed, epoch, size)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == epoch_order(seed, epoch, size).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_every_first_place_is_equally_likely() -> None:
    # 4000 draws of 4 places: each place 1000 times, standard deviation 27; 5 of them are 137.
    counts = Counter(int(epoch_order(seed, 0, 4)[0]) for seed in range(4000))
    assert all(abs(count - 1000) < 137 for count in counts.values())


@given(SIZES, BATCHES, SEEDS)
def test_each_uid_comes_exactly_once_an_epoch_whatever_the_batch_size(size: int, batch: int, seed: int) -> None:
    loader = PromptLoader(Rows(size), batch, seed)
    per_epoch = -(-size // batch)
    assert loader.steps_per_epoch == per_epoch
    assert loader.total_steps(3) == 3 * per_epoch
    for epoch in range(3):
        batches = uids(loader, range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1))
        assert sorted(int(uid) for part in batches for uid in part) == list(range(size))
        assert all(len(part) == batch for part in batches[:-1])
        assert 1 <= len(batches[-1]) <= batch


def test_positions_of_ten_prompts_in_batches_of_four() -> None:
    loader = PromptLoader(Rows(10), 4, seed=0)
    places = [(loader.position(step).epoch, loader.position(step).offset_samples) for step in range(8)]
    assert places == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0), (2, 4)]
    assert loader.total_steps(2) == 6
    assert loader.total_steps(2, max_steps=5) == 5
    assert loader.total_steps(2, max_steps=50) == 6


def test_a_checkpoint_on_an_epochs_last_step_resumes_at_the_next_epochs_first_batch() -> None:
    whole = PromptLoader(Rows(10), 4, seed=3)
    resumed = PromptLoader(Rows(10), 4, seed=3)
    position = resumed.load_state_dict(whole.state_dict(3))
    assert position == DataPosition(epoch=1, offset_samples=0, step=3)
    assert resumed.total_steps(2) == whole.total_steps(2) == 6
    later = uids(resumed, range(4, 7))
    assert later == uids(whole, range(4, 7))
    assert sorted(int(uid) for part in later for uid in part) == list(range(10))


@given(SIZES, BATCHES, SEEDS, st.integers(0, 20))
def test_an_interrupted_run_sees_the_order_of_an_uninterrupted_one(size: int, batch: int, seed: int, cut: int) -> None:
    whole = PromptLoader(Rows(size), batch, seed)
    resumed = PromptLoader(Rows(size), batch, seed)
    resumed.load_state_dict(whole.state_dict(cut))
    steps = range(cut + 1, cut + 2 * whole.steps_per_epoch + 1)
    assert uids(resumed, steps) == uids(whole, steps)
    assert resumed.total_steps(30, 500) == whole.total_steps(30, 500)


@given(SIZES, BATCHES, BATCHES, SEEDS, st.integers(0, 12))
def test_another_batch_size_goes_on_where_the_data_stood(size: int, old: int, new: int, seed: int, cut: int) -> None:
    before = PromptLoader(Rows(size), old, seed)
    after = PromptLoader(Rows(size), new, seed)
    position = after.load_state_dict(before.state_dict(cut))
    epochs = position.epoch + 2
    last = after.total_steps(epochs)
    assert last >= cut
    seen = Counter(uid for part in uids(before, range(1, cut + 1)) for uid in part)
    seen += Counter(uid for part in uids(after, range(cut + 1, last + 1)) for uid in part)
    assert set(seen.values()) == {epochs}
    assert len(seen) == size
    assert after.position(last) == DataPosition(epoch=epochs, offset_samples=0, step=last)


@given(SIZES, BATCHES, SEEDS, st.lists(st.integers(1, 3), max_size=6))
def test_dropped_batches_move_the_data_and_not_the_steps(size: int, batch: int, seed: int, draws: list[int]) -> None:
    plain = PromptLoader(Rows(size), batch, seed)
    loader = PromptLoader(Rows(size), batch, seed)
    drawn = 0
    for step, number in enumerate(draws, start=1):
        drawn += number
        there = plain.position(drawn)
        loader.seek(DataPosition(epoch=there.epoch, offset_samples=there.offset_samples, step=step))
    step = len(draws)
    assert loader.position(step).step == step
    steps = range(step + 1, step + 2 * plain.steps_per_epoch + 1)
    assert uids(loader, steps) == uids(plain, range(drawn + 1, drawn + len(steps) + 1))
    resumed = PromptLoader(Rows(size), batch, seed)
    resumed.load_state_dict(loader.state_dict(step + 1))
    assert resumed.batch(step + 2) == loader.batch(step + 2)


def test_asking_in_any_order_and_twice_gives_the_same_batches() -> None:
    loader = PromptLoader(Rows(10), 3, seed=1)
    forward = uids(loader, range(1, 9))
    assert [[prompt.uid for prompt in loader.batch(step)] for step in range(8, 0, -1)] == forward[::-1]


def test_a_changed_dataset_is_refused_unless_told_to_go_on() -> None:
    state = PromptLoader(Rows(10), 4, seed=0).state_dict(2)
    changed = PromptLoader(Rows(12, fingerprint="e" * 64), 4, seed=0)
    with pytest.raises(DatasetError, match=r"changed since step 2 .from 10 to 12 prompts.*allow_changed_data=true"):
        changed.load_state_dict(state)
    assert changed.load_state_dict(state, allow_changed=True) == DataPosition(epoch=0, offset_samples=8, step=2)
    shorter = PromptLoader(Rows(6, fingerprint="e" * 64), 4, seed=0)
    assert shorter.load_state_dict(state, allow_changed=True) == DataPosition(epoch=1, offset_samples=0, step=2)
    assert len(shorter.batch(3)) == 4


def test_another_seed_is_refused() -> None:
    state = PromptLoader(Rows(10), 4, seed=0).state_dict(2)
    with pytest.raises(CheckpointError, match=r"belongs to seed 0, this run has trainer\.seed=1"):
        PromptLoader(Rows(10), 4, seed=1).load_state_dict(state)


@pytest.mark.parametrize("damage", [{"epoch": None}, {"offset_samples": "x"}, {"step": []}])
def test_a_malformed_position_is_a_checkpoint_error(damage: dict[str, object]) -> None:
    loader = PromptLoader(Rows(10), 4, seed=0)
    with pytest.raises(CheckpointError, match="malformed"):
        loader.load_state_dict({**loader.state_dict(2), **damage})
    with pytest.raises(CheckpointError, match="malformed"):
        loader.load_state_dict({})


def test_steps_before_the_restored_position_are_not_guessed() -> None:
    loader = PromptLoader(Rows(10), 3, seed=0)
    loader.seek(DataPosition(epoch=0, offset_samples=4, step=2))
    with pytest.raises(ValueError, match="step 1 lies before step 2"):
        loader.batch(2)
    with pytest.raises(ValueError, match="counted from 1"):
        loader.batch(0)
    with pytest.raises(ValueError, match="outside of a dataset of 10"):
        loader.seek(DataPosition(epoch=0, offset_samples=10, step=2))


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 0"):
        PromptLoader(Rows(10), 0, seed=0)
    with pytest.raises(ValueError, match="num_workers -1"):
        PromptLoader(Rows(10), 1, seed=0, num_workers=-1)
    with pytest.raises(DatasetError, match="at least one prompt"):
        PromptLoader(Rows(0), 1, seed=0)


@pytest.fixture(scope="module")
def fetching() -> Iterator[PromptLoader]:
    # A worker process cannot import this test module, so its dataset is one of the project's own classes.
    from skyrl_core.data.dataset import PromptDataset

    dataset = PromptDataset.__new__(PromptDataset)
    dataset.prompts = tuple(Rows(11)[index] for index in range(11))
    dataset.fingerprint = "f" * 64
    with PromptLoader(dataset, 4, seed=5, num_workers=2, persistent_workers=True) as loader:
        yield loader


def test_worker_processes_fetch_the_same_batches(fetching: PromptLoader) -> None:
    import torch

    torch.manual_seed(0)
    expected_draw = np.array(torch.rand(2))
    torch.manual_seed(0)
    alone = PromptLoader(Rows(11), 4, seed=5)
    # Over the end of the first epoch, a jump back, and on.
    for steps in (range(1, 5), range(3, 8)):
        assert uids(fetching, steps) == uids(alone, steps)
    assert np.array_equal(np.array(torch.rand(2)), expected_draw), "fetching must not use the process's random state"


def test_the_worker_count_may_change_mid_run(fetching: PromptLoader) -> None:
    alone = PromptLoader(Rows(11), 4, seed=5)
    resumed = PromptLoader(Rows(11), 4, seed=5)
    resumed.load_state_dict(fetching.state_dict(4))
    assert uids(resumed, range(5, 8)) == uids(alone, range(5, 8))
    position = fetching.load_state_dict(alone.state_dict(4))
    assert position.step == 4
    assert uids(fetching, range(5, 7)) == uids(alone, range(5, 7))
