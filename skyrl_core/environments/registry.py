"""Environments by name: skyrl-gym's registry with ours in it, and classes named in full."""

import copy
import difflib
import threading
from collections.abc import Mapping
from typing import Any, cast

from skyrl_core.environments.protocol import Environment, EnvironmentClass
from skyrl_core.errors import ConfigurationError
from skyrl_core.user_code import load_callable

OURS: Mapping[str, str] = {"arithmetic": "skyrl_core.environments.arithmetic:ArithmeticEnv"}
_registering = threading.Lock()


def make_environment(env_class: str, extras: Mapping[str, Any], env_config: Any = None) -> Environment:
    """A new episode of `env_class`.

    `extras` are the row's other columns (`Prompt.env_extras`); the environment gets a copy of its own, so samples of a
    prompt cannot see each other's changes. `env_config` is the section of `environment.skyrl_gym` by that name, if any.
    Raises ConfigurationError for an unknown name; what the constructor itself raises concerns this row alone.
    """
    return environment_class(env_class)(env_config=env_config, extras=copy.deepcopy(dict(extras)))


def environment_class(env_class: str) -> EnvironmentClass:
    """The class behind a registered name, or behind `module:Class` or `path/to/file.py:Class`.

    Raises ConfigurationError for a name that is not registered (with the nearest that are) and for a class that cannot
    be imported (with the reason).
    """
    if ":" in env_class:
        return _load(env_class, env_class)
    known = _registry()
    if env_class not in known:
        near = difflib.get_close_matches(env_class, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"
        raise ConfigurationError(
            f"unknown environment {env_class!r}: {hint}; an environment of your own is named as module:Class"
        )
    entry_point = known[env_class].entry_point
    return _load(env_class, entry_point) if isinstance(entry_point, str) else cast(EnvironmentClass, entry_point)


def register_environment(env_class: str, entry_point: str) -> None:
    """Give the class at `module:Class` a name, as `skyrl_gym.register` does. The same pair again changes nothing.

    The name is known in this process only: rows that other processes roll out may name `module:Class` itself.
    Raises ConfigurationError when the name is taken by another class.
    """
    known = _registry()
    if env_class in known:
        if known[env_class].entry_point != entry_point:
            raise ConfigurationError(
                f"environment {env_class!r} is registered as {known[env_class].entry_point}, not {entry_point}"
            )
        return
    from skyrl_gym.envs.registration import register

    register(id=env_class, entry_point=entry_point)


def environment_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_registry())


def _registry() -> dict[str, Any]:
    _register_ours()
    from skyrl_gym.envs.registration import registry

    return cast(dict[str, Any], registry)


def _register_ours() -> None:
    from skyrl_gym.envs.registration import register, registry

    with _registering:  # episodes run in threads, and skyrl-gym refuses a name that is taken
        for env_class, entry_point in OURS.items():
            if env_class not in registry:
                register(id=env_class, entry_point=entry_point)


def _load(env_class: str, entry_point: str) -> EnvironmentClass:
    key = "environment" if env_class == entry_point else f"environment {env_class}"
    return cast(EnvironmentClass, load_callable(entry_point, key))
