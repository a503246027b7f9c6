"""Environment metrics of many trajectories, averaged by count."""

import logging
import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_core.environments.registry import environment_class

log = logging.getLogger(__name__)

REWARD_PREFIX = "reward/"


def aggregate_env_metrics(env_classes: Sequence[str], metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One number per metric over trajectories: `env_classes[i]` reported `metrics[i]`.

    Each environment class aggregates its own trajectories (its `aggregate_metrics`; skyrl-gym's default is the mean
    of each number over the trajectories that report it). A metric of several classes is their mean weighted by the
    number of trajectories that report it, or, where the class forms it anew, by the class's number of trajectories.
    What a class makes NaN or infinite is left out, and the log says so. Metrics of composed rewards (`reward/…`), which
    the class does not know, are means over the trajectories that have them. Give all trajectories of all batches at
    once: means of batches of different size cannot be averaged again.
    """
    by_class: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, report in zip(env_classes, metrics, strict=True):
        by_class[name].append(report)
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for report in metrics:
        for key in report:
            if key.startswith(REWARD_PREFIX):
                totals[key] += float(report[key])
                counts[key] += 1
    for name, reported in by_class.items():
        reports = [
            {key: value for key, value in report.items() if not key.startswith(REWARD_PREFIX)} for report in reported
        ]
        for key, value in environment_class(name).aggregate_metrics(reports).items():
            if not isinstance(value, numbers.Real):
                continue
            if not math.isfinite(value):
                log.warning("environment %s aggregates its metric %s to %s; left out", name, key, value)
                continue
            count = sum(key in report for report in reports) or len(reports)
            totals[key] += float(value) * count
            counts[key] += count
    return {key: totals[key] / counts[key] for key in sorted(totals)}


def _without_rewards(report: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if not key.startswith(REWARD_PREFIX)}
