"""Dynamic sampling: do not train on prompts whose samples all have the same reward.

filter (DAPO, arXiv:2503.14476, section 3.2): drop such prompts and sample more until the batch is full. replace
(POLARIS, https://hkunlp.github.io/blog/2025/Polaris/): put copies of other prompts in their place. Pure functions over
rollouts: a step samples draw after draw until `enough`, then its batch is `select`ed from them. Each draw is recorded
by itself, so a step that was cut goes on with the draws it has.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_core.config.algorithm import DynamicSamplingConfig
from skyrl_core.data.carriers import Rollout
from skyrl_core.errors import RolloutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sampled batch in numbers: its prompts, and how many of them are useful."""

    prompts: int
    useful: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a step trains on. group_ids: one number a rollout. A prompt that is there twice, or a copy of one, is a
    group of its own, or its samples would count twice in the other's statistics."""

    rollouts: tuple[Rollout, ...]
    group_ids: tuple[int, ...]
    metrics: Mapping[str, float]


def useful(samples: Sequence[Rollout], tolerance: float) -> bool:
    """Whether the rewards of a prompt's samples differ by more than `tolerance`.

    Failed samples do not count. A sample of several rows (step-wise) has the rewards of all of them.
    """
    failed = {sample.sample_index for sample in samples if sample.error is not None}
    rewards: dict[int, float] = {}
    for sample in samples:
        if sample.sample_index not in failed:
            rewards[sample.sample_index] = rewards.get(sample.sample_index, 0.0) + sample.reward
    return len(rewards) > 1 and max(rewards.values()) - min(rewards.values()) > tolerance


def by_prompt(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each uid, prompts in the order they first stand."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.uid, []).append(rollout)
    return list(groups.values())


def count(rollouts: Iterable[Rollout], tolerance: float) -> Draw:
    """One draw in numbers."""
    groups = by_prompt(rollouts)
    return Draw(prompts=len(groups), useful=sum(useful(samples, tolerance) for samples in groups))


def enough(draws: Sequence[Draw], wanted: int, config: DynamicSamplingConfig) -> bool:
    """Whether the draws of a step give a batch of `wanted` prompts; False when another draw is needed.

    filter: as many useful prompts in all draws together. replace: more than `min_replace_ratio` of the last draw's
    prompts are useful (SkyRL's rule; earlier draws are not used). Raises RolloutError with the counts when
    `max_sample_batches` draws (0 or below: no bound) were not enough.
    """
    if config.type is None:
        return True
    found, last = sum(draw.useful for draw in draws), draws[-1]
    complete = found >= wanted if config.type == "filter" else last.useful > config.min_replace_ratio * last.prompts
    if not complete and 0 < config.max_sample_batches <= len(draws):
        sampled = sum(draw.prompts for draw in draws)
        raise RolloutError(
            f"dynamic sampling (type={config.type}) found {found} of {wanted} prompts whose samples differ in reward "
            f"after {len(draws)} batches ({sampled} prompts sampled, {sampled - found} dropped). The data is too easy "
            "or too hard for the model; else raise trainer.algorithm.dynamic_sampling.max_sample_batches and start the "
            "run again under its name: what was sampled is kept"
        )
    return complete


def select(
    draws: Sequence[Sequence[Rollout]], wanted: int, config: DynamicSamplingConfig, tolerance: float, seed: int
) -> Selection:
    """The batch of a step from its draws, once they are `enough`.

    filter: the first `wanted` useful prompts; what is more than that is left out, as in DAPO. replace: the last draw,
    with a copy of a useful prompt in the place of each useless one. Copies are drawn with `seed`: each useful prompt at
    most once while there are enough of them, else with repetition. Without a type: the only draw.
    """
    groups = [samples for draw in draws for samples in by_prompt(draw)]
    good = [samples for samples in groups if useful(samples, tolerance)]
    if config.type is None:
        return _selection(groups, {})
    metrics = {
        "dynamic_sampling/batches": float(len(draws)),
        "dynamic_sampling/sampled_prompts": float(len(groups)),
        "dynamic_sampling/dropped_prompts": float(len(groups) - len(good)),
        "dynamic_sampling/useful_prompts": float(len(good)),
    }
    if config.type == "filter":
        return _selection(good[:wanted], metrics)
    last = by_prompt(draws[-1])
    usable = [samples for samples in last if useful(samples, tolerance)]
    draw, missing = random.Random(seed), len(last) - len(usable)
    copies = iter(draw.sample(usable, missing) if missing <= len(usable) else draw.choices(usable, k=missing))
    chosen = [samples if useful(samples, tolerance) else next(copies) for samples in last]
    return _selection(chosen, {**metrics, "dynamic_sampling/replaced_prompts": float(missing)})


def _selection(groups: Sequence[Sequence[Rollout]], metrics: Mapping[str, float]) -> Selection:
    return Selection(
        rollouts=tuple(sample for samples in groups for sample in samples),
        group_ids=tuple(number for number, samples in enumerate(groups) for _ in samples),
        metrics=metrics,
    )
