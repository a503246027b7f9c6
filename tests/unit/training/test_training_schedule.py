"""The learning rate as a function of the optimizer steps taken."""

import math

import pytest
import torch

from skyrl_core.config.optimizer import OptimizerConfig
from skyrl_core.errors import ConfigurationError
from skyrl_core.training.optimizer import make_learning_rate, make_optimizer

KEY = "trainer.policy.optimizer_config"


def rates(total=None, count=6, **settings):
    schedule = make_learning_rate(OptimizerConfig(lr=0.4, **settings), total, KEY)
    return [schedule.at(step) for step in range(count)]


def test_warm_up_rises_by_equal_parts_then_stays():
    assert rates(num_warmup_steps=4) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_without_warm_up_the_rate_is_constant():
    assert rates() == [0.4] * 6
    assert rates(scheduler="constant") == [0.4] * 6


def test_linear_falls_to_zero_at_the_last_step():
    assert rates(total=5, scheduler="linear", num_warmup_steps=1) == pytest.approx([0.0, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_cosine_is_half_a_wave_over_the_run():
    expected = [0.4 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(total=4, count=5, scheduler="cosine") == pytest.approx(expected)


def test_polynomial_starts_at_the_configured_rate():
    assert rates(total=4, count=3, scheduler="polynomial")[0] == pytest.approx(0.4)


def test_a_schedule_that_needs_the_total_says_so_when_it_is_unknown():
    with pytest.raises(ConfigurationError, match=r"optimizer_config\.scheduler=cosine .*num_training_steps"):
        rates(scheduler="cosine")


def test_a_schedule_that_needs_a_metric_is_refused_by_name():
    with pytest.raises(
        ConfigurationError, match=r"scheduler=reduce_lr_on_plateau is not one of .*constant_with_warmup"
    ):
        rates(scheduler="reduce_lr_on_plateau")


def test_apply_sets_the_rate_of_every_parameter_group():
    model = torch.nn.Linear(2, 2)
    config = OptimizerConfig(lr=0.4, num_warmup_steps=2, adam_betas=(0.8, 0.9), weight_decay=0.3)
    optimizer = make_optimizer(model, config)
    assert make_learning_rate(config, None, KEY).apply(optimizer, 1) == pytest.approx(0.2)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (pytest.approx(0.2), (0.8, 0.9), 0.3)


def test_frozen_parameters_are_not_optimised():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in make_optimizer(model, OptimizerConfig()).param_groups] == [1]
