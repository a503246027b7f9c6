"""What the generators ask of an environment: skyrl-gym's text environment, as a protocol."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Conversation = list[dict[str, Any]]


class Environment(Protocol):
    """One episode. `skyrl_gym.envs.base_text_env.BaseTextEnv` and its subclasses satisfy this."""

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """The first prompt for the model, and optional information."""
        ...

    def step(self, action: str) -> Mapping[str, Any]:
        """Answers the model's text: `observations` (messages), `reward`, `done`, `metadata`, and `postprocessed_action`
        where the environment cut the text."""
        ...

    def close(self) -> None:
        """Frees what the episode holds."""
        ...

    def get_metrics(self) -> dict[str, Any]:
        """Numbers of this episode."""
        ...


class EnvironmentClass(Protocol):
    """What a registered name stands for."""

    def __call__(self, *, env_config: Any, extras: dict[str, Any]) -> Environment: ...

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One number per metric for many episodes of this class."""
        ...
