"""Which class answers for an `env_class`: ours by name, skyrl-gym's by theirs, a user's own as `module:Class`."""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from skyrl_core.data.carriers import Message
from skyrl_core.errors import ConfigurationError

_OURS = {"arithmetic": "skyrl_core.environments.arithmetic:ArithmeticEnv"}


class Environment(Protocol):
    """One episode: skyrl-gym's text environment protocol."""

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The messages to start with, and metadata."""
        ...

    def step(self, action: str) -> Mapping[str, Any]:
        """Answer the policy's text: keys `observations`, `reward`, `done`, `metadata`, `postprocessed_action`."""
        ...

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, Any]: ...


def register_environment(env_class: str, entry_point: str) -> None:
    """Make `env_class` mean `module:Class` in this process.

    Ray workers are other processes: a configuration that names `module:Class` itself works in all of them.
    """
    _OURS[env_class] = entry_point


def environment_names() -> list[str]:
    """Every name that `env_class` may have, besides `module:Class`."""
    return sorted({*_OURS, *_skyrl_gym_specs()})


def make_environment(env_class: str, extras: Mapping[str, Any], env_config: Any = None) -> Environment:
    """An environment for one trajectory. `extras` are the dataset row's other columns.

    Raises ConfigurationError for a name that nothing answers to; whatever the class itself raises on bad extras.
    """
    environment: Environment = environment_class(env_class)(env_config=env_config, extras=dict(extras))
    return environment


def environment_class(env_class: str) -> Any:
    """The class behind a name. Raises ConfigurationError naming the nearest ones when there is none."""
    entry_point = _OURS.get(env_class) or (env_class if ":" in env_class else None)
    if entry_point is None:
        spec = _skyrl_gym_specs().get(env_class)
        if spec is None:
            near = difflib.get_close_matches(env_class, environment_names(), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(environment_names())}"
            raise ConfigurationError(
                f"environment.env_class={env_class!r} is unknown: {hint} Or name your own module:Class"
            )
        if callable(spec.entry_point):
            return spec.entry_point
        entry_point = spec.entry_point
    module_name, _, class_name = entry_point.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"environment.env_class={env_class!r} cannot be loaded: {error}") from error


def aggregate_env_metrics(metrics: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Mean of every numeric metric over the trajectories that report it, as `environment/{name}`.

    Averaged by count over all trajectories, never summed over batches. `metrics` holds (env_class, metrics) pairs.
    """
    sums: dict[str, tuple[float, int]] = {}
    for _, values in metrics:
        for name, value in values.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = (total + float(value), count + 1)
    return {f"environment/{name}": total / count for name, (total, count) in sorted(sums.items())}


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers or booleans, as floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}


def _skyrl_gym_specs() -> dict[str, Any]:
    importlib.import_module("skyrl_gym.envs")
    return dict(importlib.import_module("skyrl_gym.envs.registration").registry)
