"""Dynamic sampling: do not train on prompts whose samples all have the same reward.

filter (DAPO, arXiv:2503.14476, section 3.2): drop such prompts and sample more until the batch is full. replace
(POLARIS, https://hkunlp.github.io/blog/2025/Polaris/): put copies of other prompts in their place. Pure functions over
rollouts: which prompts to sample, and where the state is kept, is the caller's business. Steps and epochs count prompts
by what the data loader gave out, `sampled`, so that dropping some does not disturb them.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_core.data.carriers import Rollout
from skyrl_core.errors import RolloutError


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterState:
    """What filtering has collected for one step: keep it with the step, a retry goes on from it.

    kept: the samples of each useful prompt; a prompt that was sampled twice stands there twice. batches, sampled,
    dropped: batches taken in, prompts in them, prompts without a difference among them.
    """

    kept: tuple[tuple[Rollout, ...], ...] = ()
    batches: int = 0
    sampled: int = 0
    dropped: int = 0

    def counts(self) -> dict[str, float]:
        """Metrics of the step, and what a checkpoint shows beside the rollouts."""
        return {
            "dynamic_sampling/batches": float(self.batches),
            "dynamic_sampling/sampled_prompts": float(self.sampled),
            "dynamic_sampling/dropped_prompts": float(self.dropped),
            "dynamic_sampling/kept_prompts": float(len(self.kept)),
        }


def useful(samples: Sequence[Rollout], tolerance: float) -> bool:
    """Whether the rewards of a prompt's samples differ by more than `tolerance`; failed samples do not count."""
    rewards = [sample.reward for sample in samples if sample.error is None]
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance


def by_prompt(rollouts: Iterable[Rollout]) -> Mapping[str, list[Rollout]]:
    """Rollouts by uid, prompts in the order they first stand."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.uid, []).append(rollout)
    return groups


def add_batch(state: FilterState, rollouts: Sequence[Rollout], tolerance: float) -> FilterState:
    """The state after one more sampled batch: its useful prompts are kept, the others counted and dropped."""
    groups = by_prompt(rollouts)
    good = tuple(tuple(samples) for samples in groups.values() if useful(samples, tolerance))
    return FilterState(
        kept=state.kept + good,
        batches=state.batches + 1,
        sampled=state.sampled + len(groups),
        dropped=state.dropped + len(groups) - len(good),
    )


def take_full(state: FilterState, prompts: int, max_batches: int) -> list[Rollout] | None:
    """The rollouts of the first `prompts` useful prompts, or None when more must be sampled.

    Useful prompts beyond that are left out of the step, as in DAPO. Raises RolloutError with the counts when
    `max_batches` batches (-1: no bound) did not fill it; the state stays good for another attempt with a higher bound.
    """
    if len(state.kept) >= prompts:
        return [sample for samples in state.kept[:prompts] for sample in samples]
    if 0 <= max_batches <= state.batches:
        raise RolloutError(
            f"dynamic sampling found {len(state.kept)} of {prompts} prompts whose samples differ in reward after "
            f"{state.batches} batches ({state.sampled} prompts sampled, {state.dropped} dropped). The data is too easy "
            "or too hard for the model; else raise trainer.algorithm.dynamic_sampling.max_sample_batches"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """rollouts: the batch with prompts replaced. group_ids: one number per rollout; a copy is a group of its own, or
    its samples would count twice in the original's statistics. replaced: how many prompts are copies."""

    rollouts: tuple[Rollout, ...]
    group_ids: tuple[int, ...]
    replaced: int


def replace_useless(
    rollouts: Sequence[Rollout], min_replace_ratio: float, tolerance: float, seed: int
) -> Replacement | None:
    """The batch with a copy of a useful prompt in the place of each useless one, or None to sample again.

    None when no more than `min_replace_ratio` of the prompts are useful (SkyRL's rule). Copies are drawn with `seed`:
    each useful prompt at most once while there are enough of them, else with repetition.
    """
    groups = list(by_prompt(rollouts).values())
    good = [samples for samples in groups if useful(samples, tolerance)]
    if len(good) <= min_replace_ratio * len(groups):
        return None
    draw = random.Random(seed)
    missing = len(groups) - len(good)
    copies = iter(draw.sample(good, missing) if missing <= len(good) else draw.choices(good, k=missing))
    chosen = [samples if useful(samples, tolerance) else next(copies) for samples in groups]
    return Replacement(
        rollouts=tuple(sample for samples in chosen for sample in samples),
        group_ids=tuple(number for number, samples in enumerate(chosen) for _ in samples),
        replaced=missing,
    )
