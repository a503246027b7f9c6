"""Advantage estimators. Importing this package registers all of ours."""

from skyrl_core.algorithms.advantages import outcome

__all__ = ["outcome"]
