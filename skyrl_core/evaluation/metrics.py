"""Scores of an evaluation per data source and overall: mean score, unbiased pass@k, standard error."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from skyrl_core.data.carriers import Rollout
from skyrl_core.environments.metrics import aggregate_env_metrics
from skyrl_core.errors import RolloutError


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

    `avg_score` is the mean total reward over trajectories, `standard_error` its standard error clustered by prompt,
    None for a single prompt. `pass_at` maps k to unbiased pass@k, k = 1 and k = samples per prompt, over the prompts
    with at least k trajectories; a trajectory passes when its total reward is above 0, as in SkyRL. `failed`
    trajectories, whose environment raised, are in no score. `environment` holds the environments' own metrics.
    """

    prompts: int
    trajectories: int
    failed: int
    avg_score: float
    standard_error: float | None
    mean_positive_reward: float
    pass_at: Mapping[int, float]
    avg_num_tokens: float
    truncated_share: float
    greedy_score: float | None = None
    environment: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Scores overall and by data source, and the versions of the weights that were sampled from."""

    overall: SourceScores
    sources: Mapping[str, SourceScores] = field(default_factory=dict)
    policy_versions: tuple[int, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Under SkyRL's names: `eval/{source}/avg_score`, `eval/{source}/pass_at_{n}`, `eval/all/…`."""
        named: dict[str, float] = {}
        for source, scores in [("all", self.overall), *self.sources.items()]:
            prefix = f"eval/{source.replace('/', '_')}/"
            named[f"{prefix}avg_score"] = scores.avg_score
            named |= {f"{prefix}pass_at_{k}": value for k, value in scores.pass_at.items()}
            named[f"{prefix}mean_positive_reward"] = scores.mean_positive_reward
            named[f"{prefix}avg_num_tokens"] = scores.avg_num_tokens
            named[f"{prefix}truncated_share"] = scores.truncated_share
            named[f"{prefix}trajectories"] = float(scores.trajectories)
            named[f"{prefix}failed_trajectories"] = float(scores.failed)
            named |= {f"{prefix}environment/{name}": value for name, value in scores.environment.items()}
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
            policy_versions=tuple(content["policy_versions"]),
        )


def build_report(sampled: Sequence[Rollout], greedy: Sequence[Rollout] = ()) -> EvalReport:
    """The report of sampled trajectories, with the scores of greedy ones beside them where there are any.

    A data source of which no trajectory can be scored has no entry. Raises RolloutError when that is all of them.
    """
    by_source: dict[str, tuple[list[Rollout], list[Rollout]]] = {}
    for kind, rollouts in enumerate((sampled, greedy)):
        for rollout in rollouts:
            by_source.setdefault(rollout.data_source, ([], []))[kind].append(rollout)
    return EvalReport(
        overall=_scores(sampled, greedy),
        sources={
            source: _scores(*rollouts)
            for source, rollouts in sorted(by_source.items())
            if any(rollout.error is None for rollout in rollouts[0])
        },
        policy_versions=tuple(sorted({v for rollout in (*sampled, *greedy) for v in rollout.policy_versions})),
    )


def _scores(sampled: Sequence[Rollout], greedy: Sequence[Rollout]) -> SourceScores:
    sound = [rollout for rollout in sampled if rollout.error is None]
    if not sound:
        raise RolloutError(f"none of {len(sampled)} evaluation trajectories can be scored")
    by_prompt: dict[str, list[float]] = {}
    for rollout in sound:
        by_prompt.setdefault(rollout.uid, []).append(rollout.reward)
    rewards = [reward for group in by_prompt.values() for reward in group]
    greedy_rewards = [rollout.reward for rollout in greedy if rollout.error is None]
    return SourceScores(
        prompts=len(by_prompt),
        trajectories=len(sound),
        failed=len(sampled) - len(sound),
        avg_score=_mean(rewards),
        standard_error=clustered_standard_error(list(by_prompt.values())),
        mean_positive_reward=_mean(max(reward, 0.0) for reward in rewards),
        pass_at=_pass_rates(list(by_prompt.values())),
        avg_num_tokens=_mean(len(rollout.response_ids) for rollout in sound),
        truncated_share=_mean(rollout.stop_reason == "length" for rollout in sound),
        greedy_score=_mean(greedy_rewards) if greedy_rewards else None,
        environment=aggregate_env_metrics([row.env_class for row in sound], [row.env_metrics for row in sound]),
    )


def _pass_rates(groups: Sequence[Sequence[float]]) -> dict[int, float]:
    """pass@1 and pass@n, n the most samples a prompt has, each over the prompts with enough samples."""
    rates: dict[int, float] = {}
    for k in sorted({1, max(len(group) for group in groups)}):
        enough = [group for group in groups if len(group) >= k]
        rates[k] = _mean(pass_at_k(len(group), sum(reward > 0 for reward in group), k) for group in enough)
    return rates


def clustered_standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all values, where values of a group depend on each other; None for one group.

    The clustered standard error of Miller 2024, "Adding Error Bars to Evals" (arXiv:2411.00640). Ours is multiplied by
    sqrt(G / (G - 1)), G the groups: it is the sample standard error of the group means when groups are equally large.
    """
    if len(groups) < 2:
        return None
    center = _mean(value for group in groups for value in group)
    count = sum(len(group) for group in groups)
    total = math.fsum(math.fsum(value - center for value in group) ** 2 for group in groups)
    return math.sqrt(total * len(groups) / (len(groups) - 1)) / count


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def _scores_from(content: Mapping[str, Any]) -> SourceScores:
    pass_at = {int(k): float(value) for k, value in content["pass_at"].items()}
    return SourceScores(**{**content, "pass_at": pass_at})
