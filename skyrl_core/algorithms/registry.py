"""Estimators and losses by name: ours, those that user code registers, and functions of a user's own module or file."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyrl_core.config.algorithm_rules import EstimatorRules, LossRules
from skyrl_core.errors import ConfigurationError
from skyrl_core.user_code import load_callable

if TYPE_CHECKING:
    from skyrl_core.algorithms.types import AdvantageEstimator, PolicyLoss, PrepareSelection

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[F, R]):
    function: F
    rules: R
    prepare: "PrepareSelection | None" = None


@dataclass(slots=True)
class _Registry(Generic[F, R]):
    kind: str
    key: str
    default_rules: R
    modules: tuple[str, ...]
    entries: dict[str, _Entry[F, R]] = field(default_factory=dict)

    def add(self, name: str, entry: _Entry[F, R]) -> None:
        known = self.entries.get(name)
        if known is not None and not _same_source(known.function, entry.function):
            raise ConfigurationError(f"{self.kind} {name!r} is registered already by {known.function.__module__}")
        self.entries[name] = entry

    def names(self) -> list[str]:
        for module in self.modules:
            importlib.import_module(module)
        return sorted(self.entries)

    def find(self, name: str) -> _Entry[F, R]:
        names = self.names()
        if name in self.entries:
            return self.entries[name]
        if ":" not in name:
            raise ConfigurationError(
                f"{self.key}: unknown {self.kind} {name!r}; known: {', '.join(names)}; "
                "your own is written module:function or path/to/file.py:function"
            )
        function = load_callable(name, self.key)
        for entry in self.entries.values():
            if entry.function is function:
                return entry
        return _Entry(function, self.default_rules)


_estimators: "_Registry[AdvantageEstimator, EstimatorRules]" = _Registry(
    kind="advantage estimator",
    key="trainer.algorithm.advantage_estimator",
    default_rules=EstimatorRules(),
    modules=("skyrl_core.algorithms.advantages",),
)
_losses: "_Registry[PolicyLoss, LossRules]" = _Registry(
    kind="policy loss",
    key="trainer.algorithm.policy_loss_type",
    default_rules=LossRules(),
    modules=("skyrl_core.algorithms.losses",),
)


def register_advantage_estimator(
    name: str, rules: EstimatorRules | None = None
) -> "Callable[[AdvantageEstimator], AdvantageEstimator]":
    """Decorator: makes `function(inputs, config) -> Advantages` known under `name`.

    Raises ConfigurationError when another function has the name.
    """

    def decorate(function: "AdvantageEstimator") -> "AdvantageEstimator":
        _estimators.add(name, _Entry(function, rules or EstimatorRules()))
        return function

    return decorate


def register_policy_loss(
    name: str, rules: LossRules | None = None, prepare: "PrepareSelection | None" = None
) -> "Callable[[PolicyLoss], PolicyLoss]":
    """Decorator: makes `function(inputs, config) -> PolicyLossOutput` known under `name`.

    `prepare(inputs, config, seed)` sees the whole minibatch once before its first microbatch and returns bool [B, T],
    which the loss finds, cut to its rows, in `inputs.selection`. Raises ConfigurationError when another function has
    the name.
    """

    def decorate(function: "PolicyLoss") -> "PolicyLoss":
        _losses.add(name, _Entry(function, rules or LossRules(), prepare))
        return function

    return decorate


def get_advantage_estimator(name: str) -> "AdvantageEstimator":
    """The estimator called `name`, or `module:function`. Raises ConfigurationError when there is none."""
    return _estimators.find(name).function


def get_policy_loss(name: str) -> "PolicyLoss":
    """The policy loss called `name`, or `module:function`. Raises ConfigurationError when there is none."""
    return _losses.find(name).function


def get_prepare(name: str) -> "PrepareSelection | None":
    """The whole-minibatch selection of the policy loss `name`; None for the losses that need none."""
    return _losses.find(name).prepare


def estimator_rules(name: str) -> EstimatorRules:
    """What the estimator needs and allows; an unregistered `module:function` has the defaults."""
    return _estimators.find(name).rules


def loss_rules(name: str) -> LossRules:
    """What the policy loss needs and allows; an unregistered `module:function` has the defaults."""
    return _losses.find(name).rules


def list_advantage_estimators() -> list[str]:
    """All registered names, sorted."""
    return _estimators.names()


def list_policy_losses() -> list[str]:
    """All registered names, sorted."""
    return _losses.names()


def _same_source(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    """A module that is imported again (reload, another name for it in a worker) may register its functions again."""
    return (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)
