"""Which prompts a step trains on: an order that is a pure function of seed, epoch and size, a position in samples."""

import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import numpy as np

from skyrl_core.data.carriers import IntArray, Prompt
from skyrl_core.data.seeds import derive_seed
from skyrl_core.errors import CheckpointError, DatasetError


class Prompts(Protocol):
    """What a loader reads: a dataset with a length, rows by index, and a fingerprint of its content."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Where the data stands after `step` steps: `offset_samples` prompts of `epoch` (counted from 0) are consumed.

    At an epoch's end it is the start of the next one, so a run resumed there begins that epoch in full.
    """

    epoch: int
    offset_samples: int
    step: int


def epoch_order(seed: int, epoch: int, size: int) -> IntArray:
    """The permutation [size] of row indices in which `epoch` (from 0) visits the dataset."""
    # Raw words of a bit generator stay the same across NumPy versions; Generator.permutation promises no such thing.
    words = np.random.Philox(key=derive_seed(seed, "order", epoch)).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


class PromptLoader:
    """Batches of prompts by step number (from 1), each a pure function of seed, dataset, batch size and position.

    An epoch is `ceil(rows / batch_size)` steps: its last batch is the short remainder, so every uid comes exactly once
    an epoch (SkyRL drops the remainder). Positions are counted in samples: a run continued with another batch size goes
    on where the data stood. Nothing is drawn in passing, so asking twice, or in any order, gives the same batches.

    With `num_workers` > 0 rows are fetched ahead by that many processes (`persistent_workers` keeps them from one epoch
    to the next); the batches are the same. Close the loader, or use it as a context manager, to end them.
    """

    def __init__(
        self,
        dataset: Prompts,
        batch_size: int,
        seed: int,
        num_workers: int = 0,
        *,
        persistent_workers: bool = False,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size {batch_size} must be at least 1 and num_workers {num_workers} at least 0")
        if len(dataset) == 0:
            raise DatasetError("a loader needs at least one prompt")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self._anchor = DataPosition(epoch=0, offset_samples=0, step=0)
        self._order: tuple[int, IntArray] | None = None
        self._fetcher = _Fetcher(self, num_workers, persistent_workers) if num_workers else None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch that starts at its beginning."""
        return self._steps_for(len(self.dataset))

    def total_steps(self, epochs: int, max_steps: int | None = None) -> int:
        """The last step of a run of `epochs` epochs, at most `max_steps`, going on from where it stands."""
        anchor = self._anchor
        left = (epochs - anchor.epoch) * self.steps_per_epoch
        if left > 0:
            left += self._steps_for(len(self.dataset) - anchor.offset_samples) - self.steps_per_epoch
        total = anchor.step + max(left, 0)
        return total if max_steps is None else min(total, max_steps)

    def position(self, step: int) -> DataPosition:
        """Where the data stands after `step` steps. Raises ValueError for steps before the restored position."""
        anchor = self._anchor
        ahead = step - anchor.step
        if ahead < 0:
            raise ValueError(f"step {step} lies before step {anchor.step}, to which the data was restored")
        first = self._steps_for(len(self.dataset) - anchor.offset_samples)
        if ahead < first:
            offset = anchor.offset_samples + ahead * self.batch_size
            return DataPosition(epoch=anchor.epoch, offset_samples=offset, step=step)
        epochs, steps = divmod(ahead - first, self.steps_per_epoch)
        return DataPosition(epoch=anchor.epoch + 1 + epochs, offset_samples=steps * self.batch_size, step=step)

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of `step` (from 1): `batch_size` of them, fewer in an epoch's last step."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        if self._fetcher is not None:
            return self._fetcher.batch(step)
        return [self.dataset[index] for index in self.indices(step)]

    def indices(self, step: int) -> list[int]:
        """The row indices of `batch(step)`."""
        before = self.position(step - 1)
        if self._order is None or self._order[0] != before.epoch:
            self._order = (before.epoch, epoch_order(self.seed, before.epoch, len(self.dataset)))
        chosen = self._order[1][before.offset_samples : before.offset_samples + self.batch_size]
        return [int(index) for index in chosen]

    def seek(self, position: DataPosition) -> None:
        """Continue after `position.step` from exactly that position, whichever batches led there.

        A stage that drew and dropped batches (dynamic sampling) moves the data on without counting steps this way.
        """
        if position.step < 0 or position.epoch < 0 or not 0 <= position.offset_samples < len(self.dataset):
            raise ValueError(f"{position} lies outside of a dataset of {len(self.dataset)} prompts")
        reachable = position.step >= self._anchor.step
        if not (reachable and self.position(position.step) == position):
            self._anchor = position
            self.close()

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, bound to the dataset: JSON-able, counted in samples."""
        return {
            **asdict(self.position(step)),
            "fingerprint": self.dataset.fingerprint,
            "dataset_size": len(self.dataset),
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changed: bool = False) -> DataPosition:
        """Continue where `state` stood; returns the position. The batch size and worker count may have changed.

        Raises CheckpointError for a malformed state and DatasetError when the dataset is another one, unless
        `allow_changed`: then the run goes on as far into the epoch as it was, or with the next one if the dataset has
        become too short for that.
        """
        try:
            position = DataPosition(
                epoch=int(state["epoch"]), offset_samples=int(state["offset_samples"]), step=int(state["step"])
            )
            known = (str(state["fingerprint"]), int(state["dataset_size"]), int(state["seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the recorded data position is malformed ({error!r}): {dict(state)}") from error
        if known[0] != self.dataset.fingerprint and not allow_changed:
            raise DatasetError(
                f"the training data changed since step {position.step} (from {known[1]} to {len(self.dataset)} "
                f"prompts, fingerprint {known[0][:12]} to {self.dataset.fingerprint[:12]}): restore the data, or go on "
                "with the new data by trainer.allow_changed_data=true"
            )
        if known[2] != self.seed:
            raise CheckpointError(
                f"the recorded data position belongs to seed {known[2]}, this run has trainer.seed={self.seed}: the "
                "order of prompts would differ"
            )
        if position.offset_samples >= len(self.dataset):
            position = DataPosition(epoch=position.epoch + 1, offset_samples=0, step=position.step)
        self.seek(position)
        return position

    def close(self) -> None:
        """End the worker processes, if there are any; the next batch starts new ones."""
        if self._fetcher is not None:
            self._fetcher.close()

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _steps_for(self, samples: int) -> int:
        return -(-samples // self.batch_size)


class _Fetcher:
    """Reads the loader's batches through a torch DataLoader, ahead of the step that needs them."""

    def __init__(self, loader: PromptLoader, num_workers: int, persistent: bool) -> None:
        self._loader = loader
        self._num_workers = num_workers
        self._persistent = persistent
        self._batches: Iterator[list[Prompt]] | None = None
        self._next_step = 0

    def batch(self, step: int) -> list[Prompt]:
        batch = next(self._batches, None) if self._batches is not None and step == self._next_step else None
        if batch is None:
            self.close()
            self._batches = self._start(step)
            batch = next(self._batches)
        self._next_step = step + 1
        return batch

    def close(self) -> None:
        # Workers end when the iterator that owns them goes.
        self._batches = None

    def _start(self, step: int) -> Iterator[list[Prompt]]:
        import torch.utils.data

        # Neither fork (unsafe beside Ray's and Prefect's threads) nor spawn (imports torch once for each worker).
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.utils.data", __name__])
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            cast(Any, self._loader.dataset),
            batch_sampler=_Steps(self._loader, step, self._persistent),
            num_workers=self._num_workers,
            collate_fn=list,
            multiprocessing_context=context,
            generator=torch.Generator(),  # else each start would draw from the process's random state
        )
        return iter(loader)


class _Steps:
    """Row indices from `step` on, to the end of its epoch, or, for workers that persist, without end."""

    def __init__(self, loader: PromptLoader, step: int, endless: bool) -> None:
        self._loader = loader
        self._step = step
        self._endless = endless

    def __iter__(self) -> Iterator[list[int]]:
        step = self._step
        epoch = self._loader.position(step - 1).epoch
        while self._endless or self._loader.position(step - 1).epoch == epoch:
            yield self._loader.indices(step)
            step += 1
