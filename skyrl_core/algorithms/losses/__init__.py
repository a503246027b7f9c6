"""Policy losses and the value loss. Importing this package registers all of ours."""

from skyrl_core.algorithms.losses import clipped

__all__ = ["clipped"]
