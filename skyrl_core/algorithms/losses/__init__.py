"""Policy losses and the value loss. Importing this package registers all of ours."""

from skyrl_core.algorithms.losses import clipped, covariance, weighted
from skyrl_core.algorithms.losses.value import value_loss

__all__ = ["clipped", "covariance", "value_loss", "weighted"]
