"""Every estimator with every loss, from rollouts to new weights, in one process; and what is let through does run."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_core.algorithms.reductions import token_weights
from skyrl_core.algorithms.registry import get_policy_loss, get_prepare
from skyrl_core.algorithms.types import PolicyLossInputs
from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_core.config.algorithm_checks import algorithm_problems
from skyrl_core.config.algorithm_rules import ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from skyrl_core.data.carriers import Rollout, RolloutBatch
from skyrl_core.errors import SkyRLError
from skyrl_core.runtime.trainer import join_logprobs
from skyrl_core.training.scoring import build_training_batch, score

IN_ONE_PASS = {
    "policy_mini_batch_size": 4,
    "micro_train_batch_size_per_gpu": 8,
    "micro_forward_batch_size_per_gpu": 8,
    "gradient_checkpointing": False,
}
WITHOUT_CRITIC = [name for name, rules in ESTIMATORS.items() if not rules.needs_critic]


def rollouts(step: int) -> RolloutBatch:
    """Four prompts with two answers each, of rewards that differ for three of them; one answer failed."""
    draw = np.random.default_rng(step)
    rows = []
    for prompt in range(4):
        for sample in range(2):
            length = int(draw.integers(1, 7))
            rewards = np.zeros(length, dtype=np.float32)
            rewards[-1] = sample if prompt else 1.0
            rows.append(
                Rollout(
                    uid=f"p{prompt}",
                    sample_index=sample,
                    prompt_ids=draw.integers(8, 20, size=3),
                    response_ids=draw.integers(8, 20, size=length),
                    loss_mask=np.ones(length, dtype=np.int64),
                    rollout_logprobs=None,
                    token_rewards=rewards,
                    stop_reason="stop",
                    policy_versions=(step - 1,),
                    greedy_reward=0.5,
                    error="broke" if (prompt, sample) == (3, 1) else None,
                )
            )
    return RolloutBatch(step=step, rollouts=rows)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_estimator_trains_with_the_loss(make_policy, loss):
    worker = make_policy(algorithm={"policy_loss_type": loss, "use_kl_loss": False}, **IN_ONE_PASS)
    for step, estimator in enumerate(WITHOUT_CRITIC, start=1):
        algorithm = worker.config.trainer.algorithm.model_copy(update={"advantage_estimator": estimator})
        batch = build_training_batch(rollouts(step), pad_token_id=0)
        old = join_logprobs(batch, [worker.logprobs(batch)])
        # An engine that is a little off.
        engine = np.where(batch.loss_mask != 0, old - np.float32(0.05), np.float32(0.0))
        scored, _ = score(replace(batch, old_logprobs=old, rollout_logprobs=engine), algorithm)
        metrics = worker.update(scored, step, f"batch {step}").metrics
        assert all(math.isfinite(value) for value in metrics.values()), estimator
        assert metrics["policy/grad_norm"] > 0, estimator
    assert worker.version() == len(WITHOUT_CRITIC)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_what_the_configuration_lets_through_runs_and_what_does_not_run_is_refused(loss):
    """All reductions, corrections and engines with and without log-probabilities."""
    corrections = [{}, {"tis_ratio_type": "token"}, {"tis_ratio_type": "sequence"}, {"sequence_mask_metric": "product"}]
    generator = torch.Generator().manual_seed(3)
    old, rollout = (-torch.rand(4, 5, generator=generator) - 1 for _ in range(2))
    mask = torch.rand(4, 5, generator=generator) < 0.8
    refused = 0
    for reduction, correction, engine, length in itertools.product(REDUCTIONS, corrections, (True, False), (None, 9)):
        config = AlgorithmConfig(
            policy_loss_type=loss,
            loss_reduction=reduction,
            max_seq_len=length,
            off_policy_correction=OffPolicyCorrectionConfig(**correction),
        )
        problems = algorithm_problems(
            config, samples_per_prompt=2, has_critic=False, step_wise=False, rollout_logprobs=engine
        )
        assert all(problem.startswith("trainer.algorithm.") for problem in problems)
        inputs = PolicyLossInputs(
            logprobs=old.clone().requires_grad_(),
            old_logprobs=old,
            advantages=torch.ones(4, 5),
            loss_mask=mask,
            rollout_logprobs=rollout if engine else None,
        )
        if problems:
            refused += 1
            continue
        try:
            prepare = get_prepare(loss)
            if prepare is not None:
                inputs = replace(inputs, selection=prepare(inputs, config, 1))
            weights = token_weights(mask, reduction, torch.arange(4) // 2, length, 2)
            (get_policy_loss(loss)(inputs, config).token_loss * weights).sum().backward()
        except SkyRLError as error:
            pytest.fail(f"let through and refused later: {config}: {error}")
        assert inputs.logprobs.grad is not None
        assert torch.isfinite(inputs.logprobs.grad).all()
    assert 0 < refused < 80
