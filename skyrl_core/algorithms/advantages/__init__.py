"""Advantage estimators. Importing this package registers all of ours."""

from skyrl_core.algorithms.advantages import outcome, temporal
from skyrl_core.algorithms.advantages.compute import compute_advantages, filter_zero_variance, zero_variance_share

__all__ = ["compute_advantages", "filter_zero_variance", "outcome", "temporal", "zero_variance_share"]
