"""AdamW and the learning-rate schedule of one model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from skyrl_core.config.optimizer import OptimizerConfig
from skyrl_core.errors import ConfigurationError

# They change the rate by the loss they are shown, and a policy loss says nothing about progress.
_NEEDS_A_METRIC = {SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY}


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, decoupled weight decay) over the trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beta1, beta2 = config.adam_betas
    return torch.optim.AdamW(parameters, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of how many optimizer steps were taken, so that it has no state to restore."""

    base: float
    factor: Callable[[int], float]

    def at(self, optimizer_steps: int) -> float:
        """The rate of the step taken after `optimizer_steps` others."""
        return self.base * float(self.factor(optimizer_steps))

    def apply(self, optimizer: torch.optim.Optimizer, optimizer_steps: int) -> float:
        """Set the optimizer's rate for its next step and return it."""
        rate = self.at(optimizer_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate


def make_learning_rate(config: OptimizerConfig, total_optimizer_steps: int | None, key: str) -> LearningRate:
    """The schedule that transformers calls `config.scheduler`, warmed up over `num_warmup_steps` optimizer steps.

    `key` is the configuration path of the optimizer, for messages. Raises ConfigurationError for an unknown name, for a
    schedule that needs a metric, and for one that needs the total number of steps when that is not known.
    """
    names = [kind.value for kind in SchedulerType if kind not in _NEEDS_A_METRIC]
    if config.scheduler not in names:
        raise ConfigurationError(f"{key}.scheduler={config.scheduler} is not one of {', '.join(names)}")
    arguments: dict[str, Any] = {"num_warmup_steps": config.num_warmup_steps}
    if total_optimizer_steps is not None:
        arguments["num_training_steps"] = total_optimizer_steps
    throwaway = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    try:
        scheduler = get_scheduler(config.scheduler, throwaway, **arguments)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{key}.scheduler={config.scheduler} cannot be used here: {error}. Choose another, for example "
            "constant_with_warmup"
        ) from error
    assert isinstance(scheduler, LambdaLR)
    factor = scheduler.lr_lambdas[0]
    if not math.isfinite(factor(0)):
        raise ConfigurationError(f"{key}.scheduler={config.scheduler} gives no finite learning rate at its first step")
    return LearningRate(base=config.lr, factor=factor)
