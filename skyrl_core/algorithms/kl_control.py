"""What sets the coefficient of the KL penalty from step to step (Ziegler et al., arXiv:1909.08593, section 2.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.errors import CheckpointError


class KLController(Protocol):
    """Sets the KL coefficient from step to step."""

    @property
    def value(self) -> float:
        """The coefficient to use now."""
        ...

    def update(self, current_kl: float, samples: int) -> None:
        """Tell the mean KL of a step and how many trajectories it was measured on."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        ...


@dataclass(slots=True)
class FixedKLController:
    """The coefficient never changes; a checkpoint's value does not override the configured one."""

    value: float

    def update(self, current_kl: float, samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        pass


@dataclass(slots=True)
class AdaptiveKLController:
    """value ← value · (1 + clip(current_kl / target - 1, -0.2, 0.2) · samples / horizon) (arXiv:1909.08593)."""

    value: float
    target: float
    horizon: int

    def update(self, current_kl: float, samples: int) -> None:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if "value" not in state:
            raise CheckpointError("the checkpoint's KL controller state has no 'value'; it was saved by something else")
        self.value = float(state["value"])


def make_kl_controller(config: AlgorithmConfig) -> KLController:
    """The controller that `kl_ctrl` asks for, starting at `kl_loss_coef`."""
    control = config.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKLController(config.kl_loss_coef, control.kl_target, control.horizon)
    return FixedKLController(config.kl_loss_coef)
