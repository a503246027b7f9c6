"""Scores of an evaluation per data source and overall: mean score, unbiased pass@k, standard error."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from skyrl_core.data.carriers import Rollout


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples passes, from `passed` of n `samples`.

    1 - C(n - c, k) / C(n, k); Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    Raises ValueError when k exceeds the samples: nothing is extrapolated.
    """
    if not 0 < k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and {passed} of {samples} to have passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScores:
    """One data source, or all of them.

    `avg_score` is the mean total reward over trajectories; `standard_error` that of the mean over prompts (each prompt
    counts with the mean of its samples). `pass_at` maps k to unbiased pass@k; a trajectory passes when its total reward
    is above 0, as in SkyRL. `failed` trajectories, whose environment raised, are in no score.
    """

    prompts: int
    trajectories: int
    failed: int
    avg_score: float
    standard_error: float | None
    pass_at: Mapping[int, float]
    greedy_score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Scores overall and by data source."""

    overall: SourceScores
    sources: Mapping[str, SourceScores] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Under SkyRL's names: `eval/{source}/avg_score`, `eval/{source}/pass_at_{n}`, `eval/all/…`."""
        named: dict[str, float] = {}
        for source, scores in [("all", self.overall), *self.sources.items()]:
            prefix = f"eval/{source}/"
            named[f"{prefix}avg_score"] = scores.avg_score
            named |= {f"{prefix}pass_at_{k}": value for k, value in scores.pass_at.items()}
            named[f"{prefix}failed_trajectories"] = float(scores.failed)
            if scores.standard_error is not None:
                named[f"{prefix}standard_error"] = scores.standard_error
            if scores.greedy_score is not None:
                named[f"{prefix}greedy_score"] = scores.greedy_score
        return named

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        content = json.loads(text)
        return cls(
            overall=_scores_from(content["overall"]),
            sources={name: _scores_from(scores) for name, scores in content["sources"].items()},
        )


def build_report(sampled: Sequence[Rollout], greedy: Sequence[Rollout] = ()) -> EvalReport:
    """The report of sampled trajectories, with greedy ones beside them where there are any.

    Raises ValueError without a single trajectory that did not fail.
    """
    sources = sorted({rollout.data_source for rollout in sampled})
    return EvalReport(
        overall=_scores(sampled, greedy),
        sources={
            source: _scores(
                [rollout for rollout in sampled if rollout.data_source == source],
                [rollout for rollout in greedy if rollout.data_source == source],
            )
            for source in sources
        },
    )


def _scores(sampled: Sequence[Rollout], greedy: Sequence[Rollout]) -> SourceScores:
    by_prompt: dict[str, list[float]] = {}
    for rollout in sampled:
        if rollout.error is None:
            by_prompt.setdefault(rollout.uid, []).append(rollout.reward)
    if not by_prompt:
        raise ValueError(f"none of {len(sampled)} trajectories can be scored")
    rewards = [reward for group in by_prompt.values() for reward in group]
    fewest = min(len(group) for group in by_prompt.values())
    passes = [(len(group), sum(reward > 0 for reward in group)) for group in by_prompt.values()]
    greedy_rewards = [rollout.reward for rollout in greedy if rollout.error is None]
    return SourceScores(
        prompts=len(by_prompt),
        trajectories=len(rewards),
        failed=len(sampled) - len(rewards),
        avg_score=_mean(rewards),
        standard_error=_standard_error([_mean(group) for group in by_prompt.values()]),
        pass_at={k: _mean([pass_at_k(n, c, k) for n, c in passes]) for k in sorted({1, fewest})},
        greedy_score=_mean(greedy_rewards) if greedy_rewards else None,
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def _standard_error(means: Sequence[float]) -> float | None:
    """Standard error of the mean over prompts; None for a single one."""
    if len(means) < 2:
        return None
    center = _mean(means)
    variance = math.fsum((value - center) ** 2 for value in means) / (len(means) - 1)
    return math.sqrt(variance / len(means))


def _scores_from(content: Mapping[str, object]) -> SourceScores:
    values = dict(content)
    pass_at = values.pop("pass_at")
    if not isinstance(pass_at, Mapping):
        raise ValueError(f"pass_at must be a mapping, got {pass_at!r}")
    return SourceScores(**values, pass_at={int(k): float(value) for k, value in pass_at.items()})  # type: ignore[arg-type]
