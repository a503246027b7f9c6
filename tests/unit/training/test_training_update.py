"""An update: equal to a plain implementation, whatever the cut; never NaN, never half a version."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_core.config.algorithm_rules import POLICY_LOSSES
from skyrl_core.errors import NonFiniteLossError, StateMismatchError, TrainingError


def plain_update(model, optimizer, minibatches, *, kl_coef, entropy_coef, clip=0.2, max_norm=1.0):
    """Token by token, row by row, unpadded: PPO's clipped loss + k3 KL (at most 10) - entropy, over the tokens.

    minibatches: lists of (prompt, response, mask, advantage, old, ref). Returns per minibatch (loss, gradient norm).
    """
    measured = []
    for rows in minibatches:
        tokens = sum(sum(mask) for _, _, mask, *_ in rows)
        loss = torch.zeros(())
        for prompt, response, mask, advantage, old, ref in rows:
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
            for index, token in enumerate(response):
                if not mask[index]:
                    continue
                probabilities = torch.softmax(logits[len(prompt) + index - 1], dim=0)
                logprob = torch.log(probabilities[token])
                ratio = torch.exp(logprob - old[index])
                bounded = min(max(ratio, torch.tensor(1 - clip)), torch.tensor(1 + clip))
                surrogate = min(ratio * advantage, bounded * advantage)
                kl = min(torch.exp(ref[index] - logprob) - (ref[index] - logprob) - 1, torch.tensor(10.0))
                entropy = -(probabilities * torch.log(probabilities)).sum()
                loss = loss + (-surrogate + kl_coef * kl - entropy_coef * entropy) / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None))
        for parameter in model.parameters():
            if parameter.grad is not None and norm > max_norm:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
        optimizer.step()
        measured.append((float(loss.detach()), norm))
    return measured


def plain_minibatches(batch, rows, prompts):
    """The batch's rows as plain tuples, `prompts` prompts a minibatch (prompts are numbered from 0, in order)."""
    groups = {}
    for index, (prompt, response, mask, advantage, group) in enumerate(rows):
        columns = slice(batch.prompt_width, batch.prompt_width + len(response))
        old, ref = batch.old_logprobs[index, columns].tolist(), batch.ref_logprobs[index, columns].tolist()
        groups.setdefault(group // prompts, []).append((prompt, response, mask, advantage, old, ref))
    return [groups[number] for number in sorted(groups)]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_three_updates_equal_a_plain_unpadded_implementation(
    make_policy, make_batch, trajectories, weights_of, model_path, entropy_coef
):
    algorithm = {"use_entropy_loss": entropy_coef > 0, "entropy_loss_coef": entropy_coef}
    worker = make_policy(algorithm=algorithm)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in (1, 2, 3):
        rows = trajectories(seed=step)
        batch = make_batch(rows, step=step, left=2)
        minibatches = plain_minibatches(batch, rows, 2)
        expected = plain_update(model, optimizer, minibatches, kl_coef=0.1, entropy_coef=entropy_coef)
        metrics = worker.update(batch, step, f"batch {step}").metrics
        assert metrics["policy/loss"] == pytest.approx(sum(loss for loss, _ in expected) / 2, abs=1e-5)
        assert metrics["policy/grad_norm"] == pytest.approx(sum(norm for _, norm in expected) / 2, rel=1e-5)
        assert metrics["policy/grad_norm_max"] == pytest.approx(max(norm for _, norm in expected), rel=1e-5)
        assert metrics["policy/optimizer_steps"] == 2
    trained = weights_of(worker)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm", "token_mean_legacy"]
)
def test_padding_microbatch_size_and_row_order_change_nothing(
    make_policy, make_batch, trajectories, weights_of, reduction
):
    algorithm = {"loss_reduction": reduction, "max_seq_len": 16}
    rows = trajectories(seed=7)
    # Reversed within each minibatch of two prompts (four rows), prompts staying together.
    shuffled = [*rows[3::-1], *rows[:3:-1]]
    variants = [
        ({"micro_train_batch_size_per_gpu": 2}, make_batch(rows)),
        ({"micro_train_batch_size_per_gpu": 2}, make_batch(rows, left=5, right=4)),
    ]
    if reduction != "token_mean_legacy":  # it is defined by the microbatch size and by which rows are neighbours
        variants += [
            ({"micro_train_batch_size_per_gpu": 1}, make_batch(rows)),
            ({"micro_train_batch_size_per_gpu": 100}, make_batch(rows, right=1)),
            ({"micro_train_batch_size_per_gpu": 3}, make_batch(shuffled)),
            ({"max_tokens_per_microbatch": 20}, make_batch(rows, left=2)),
            ({"gradient_checkpointing": False, "logprobs_chunk_size": 2}, make_batch(rows)),
        ]
    results = []
    for settings, batch in variants:
        worker = make_policy(algorithm=algorithm, **settings)
        metrics = worker.update(batch, 1, "digest").metrics
        results.append((metrics, weights_of(worker)))
    metrics, weights = results[0]
    for other_metrics, other_weights in results[1:]:
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, atol=1e-5, rtol=0, msg=name)


CORRECTIONS = [
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2, "sequence_mask_metric": "geometric"},
    {"sequence_mask_metric": "product", "token_mask_is_threshold_high": 1.2},
    {"outlier_token_is_threshold_low": 0.7},
]
VARIANTS = [
    *({"policy_loss_type": loss} for loss in POLICY_LOSSES),
    {"policy_loss_type": "dppo", "dppo": {"dppo_type": "binary_kl", "delta_low": 0.01, "delta_high": 0.01}},
    {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}},
    *({"off_policy_correction": correction} for correction in CORRECTIONS),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_loss_and_no_correction_depends_on_the_cut(make_policy, make_batch, trajectories, weights_of, variant):
    rows = trajectories(seed=11)
    cuts = [
        ({"micro_train_batch_size_per_gpu": 1}, make_batch(rows)),
        ({"micro_train_batch_size_per_gpu": 100}, make_batch(rows, left=3, right=2)),
    ]
    results = []
    for settings, batch in cuts:
        worker = make_policy(algorithm=dict(variant), gradient_checkpointing=False, **settings)
        results.append((worker.update(batch, 1, "digest").metrics, weights_of(worker)))
    (metrics, weights), (other_metrics, other_weights) = results
    assert metrics["policy/grad_norm"] > 0
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for name, weight in weights.items():
        # AdamW's first steps are of size 1e-3 whatever the gradient's size: rounding in a tiny one shows.
        torch.testing.assert_close(other_weights[name], weight, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_tokens_chosen_over_the_minibatch_do_not_depend_on_microbatches(
    make_policy, make_batch, trajectories, weights_of, loss
):
    """The worker asks for the choice once a minibatch; kl_cov chooses a quarter of the tokens, rounded down."""
    algorithm = {
        "policy_loss_type": loss,
        "kl_cov": {"kl_cov_frac": 0.25},
        "clip_cov": {"clip_ratio": 0.25, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
    }
    batch = make_batch(trajectories(seed=12))
    tokens = [int((batch.loss_mask[rows] != 0).sum()) for rows in (slice(0, 4), slice(4, 8))]
    expected = sum(count // 4 for count in tokens) / sum(tokens)
    results = []
    for size in (1, 3, 8):
        worker = make_policy(algorithm=algorithm, micro_train_batch_size_per_gpu=size)
        metrics = worker.update(batch, 1, "digest").metrics
        results.append(weights_of(worker))
        assert metrics["policy/kl_cov_ratio" if loss == "kl_cov" else "policy/clip_ratio"] == pytest.approx(expected)
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=0, msg=name)


def test_metrics_are_means_over_all_trained_tokens(make_policy, make_batch, trajectories):
    rows = trajectories(seed=2)
    batch = make_batch(rows)
    worker = make_policy(optimizer={"lr": 0.0}, algorithm={"eps_clip_low": 0.1, "eps_clip_high": 0.3})
    (row_numbers, logprobs) = worker.logprobs(batch)
    order = np.argsort(row_numbers)
    metrics = worker.update(batch, 1, "digest").metrics
    trained = batch.loss_mask != 0
    now = logprobs[order][trained].astype(np.float64)
    ratio = np.exp(now - batch.old_logprobs[trained])
    distance = batch.ref_logprobs[trained] - now
    assert metrics["policy/trained_tokens"] == trained.sum()
    assert metrics["policy/ratio"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert metrics["policy/ratio_min"] == pytest.approx(ratio.min(), rel=1e-5)
    assert metrics["policy/kl"] == pytest.approx(np.minimum(np.exp(distance) - distance - 1, 10).mean(), rel=1e-4)
    advantage = batch.advantages[trained]
    clipped = np.where(advantage > 0, ratio > 1.3, ratio < 0.9)
    assert metrics["policy/clip_ratio"] == pytest.approx(clipped.mean())


@pytest.mark.parametrize(("forward_size", "tolerance"), [(2, 0.0), (3, 5e-6)])
def test_ratio_is_one_before_the_first_step(make_policy, make_batch, trajectories, forward_size, tolerance):
    """Exactly one when scored in the update's own microbatches (of 2), up to rounding in others."""
    settings = {"policy_mini_batch_size": 4, "micro_forward_batch_size_per_gpu": forward_size}
    worker = make_policy(algorithm={"temperature": 0.7}, **settings)
    batch = make_batch(trajectories(seed=6), left=1)
    rows, logprobs = worker.logprobs(batch)
    old = np.zeros_like(batch.old_logprobs)
    old[rows] = logprobs
    metrics = worker.update(replace(batch, old_logprobs=old), 1, "digest").metrics
    assert metrics["policy/ratio_min"] == pytest.approx(1.0, abs=tolerance)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=tolerance)
    assert metrics["policy/clip_ratio"] == 0.0


def test_garbage_at_masked_positions_reaches_neither_metrics_nor_weights(
    make_policy, make_batch, trajectories, weights_of
):
    clean = make_batch(trajectories(seed=8))
    masked = clean.loss_mask == 0
    dirty = {name: getattr(clean, name).copy() for name in ("old_logprobs", "ref_logprobs", "advantages")}
    for number, array in enumerate(dirty.values()):
        array[masked] = (np.nan, np.inf, -np.inf)[number]
    results = []
    for batch in (clean, replace(clean, **dirty)):
        worker = make_policy(algorithm={"use_entropy_loss": True})
        results.append((worker.update(batch, 1, "digest").metrics, weights_of(worker)))
    assert results[0][0] == results[1][0]
    assert all(math.isfinite(value) for value in results[1][0].values())
    for name, weight in results[0][1].items():
        assert torch.equal(weight, results[1][1][name])


def test_same_inputs_give_the_same_bits(make_policy, make_batch, trajectories, weights_of):
    runs = []
    for _ in range(2):
        worker = make_policy()
        results = [worker.update(make_batch(trajectories(seed=s), step=s), s, str(s)).metrics for s in (1, 2)]
        runs.append((results, weights_of(worker)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())


def test_several_passes_over_a_batch_are_several_updates_of_the_same_batch(
    make_policy, make_batch, trajectories, weights_of
):
    rows = trajectories(seed=9)
    twice = make_policy(update_epochs_per_batch=2)
    assert twice.update(make_batch(rows), 1, "a").metrics["policy/optimizer_steps"] == 4
    once = make_policy()
    once.update(make_batch(rows), 1, "a")
    once.update(make_batch(rows, step=2), 2, "b")
    trained = weights_of(once)
    assert all(torch.equal(weight, trained[name]) for name, weight in weights_of(twice).items())


def test_warm_up_counts_optimizer_steps(make_policy, make_batch, trajectories):
    worker = make_policy(optimizer={"lr": 0.01, "num_warmup_steps": 10})
    rates = [worker.update(make_batch(trajectories(seed=s), step=s), s, str(s)).metrics["policy/lr"] for s in (1, 2)]
    # Two minibatches an update: its last optimizer steps are the second (one step before it) and the fourth.
    assert rates == pytest.approx([0.001, 0.003])


def test_minibatch_without_a_trained_token_takes_no_step(make_policy, make_batch, trajectories, weights_of):
    rows = [(prompt, response, [0] * len(response), 1.0, group) for prompt, response, _, _, group in trajectories(1)]
    worker = make_policy(optimizer={"weight_decay": 0.5})
    before = weights_of(worker)
    result = worker.update(make_batch(rows), 1, "digest")
    assert (result.policy_version, worker.version()) == (1, 1)
    assert (result.metrics["policy/optimizer_steps"], result.metrics["policy/empty_minibatches"]) == (0, 2)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(worker).items())


def test_nan_in_a_trained_token_stops_before_the_optimizer_step(make_policy, make_batch, trajectories, weights_of):
    batch = make_batch(trajectories(seed=1))
    advantages = batch.advantages.copy()
    row, column = np.argwhere(batch.loss_mask)[0]
    advantages[row, column] = np.nan
    worker = make_policy()
    before = weights_of(worker)
    with pytest.raises(NonFiniteLossError, match=r"step 1, pass 1, minibatch 1 of 2: loss nan, gradient norm"):
        worker.update(replace(batch, advantages=advantages), 1, "digest")
    assert worker.version() is None
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(worker).items())


def test_update_asked_again_returns_its_result_without_training_again(
    make_policy, make_batch, trajectories, weights_of
):
    worker = make_policy()
    batch = make_batch(trajectories(seed=1))
    first = worker.update(batch, 1, "digest")
    weights = weights_of(worker)
    again = worker.update(batch, 1, "digest")
    assert again == first
    assert worker.status() == (1, "digest")
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(worker).items())


@pytest.mark.parametrize(("step", "digest"), [(1, "another batch"), (3, "c"), (7, "d"), (0, "e")])
def test_update_from_another_version_is_refused(make_policy, make_batch, trajectories, step, digest):
    worker = make_policy()
    assert worker.version() == 0
    worker.update(make_batch(trajectories(seed=1)), 1, "digest")
    with pytest.raises(StateMismatchError, match=rf"step {step} needs policy version {step - 1}, and rank 0 has 1"):
        worker.update(make_batch(trajectories(seed=1), step=step), step, digest)
    assert worker.version() == 1


def test_update_that_breaks_between_optimizer_steps_has_no_version(
    make_policy, make_batch, trajectories, monkeypatch, tmp_path
):
    worker = make_policy()
    monkeypatch.setenv("SKYRL_FLOWS_FAULTS", "update.between_minibatches@step=1,minibatch=0:raise")
    monkeypatch.setenv("SKYRL_FLOWS_FAULTS_DIR", str(tmp_path))
    batch = make_batch(trajectories(seed=1))
    with pytest.raises(RuntimeError, match="fault injected"):
        worker.update(batch, 1, "digest")
    assert (worker.version(), worker.status()) == (None, (None, None))
    with pytest.raises(StateMismatchError, match="has None"):
        worker.update(batch, 1, "digest")
    with pytest.raises(StateMismatchError):
        worker.save(str(tmp_path / "checkpoint"), 1)


def test_batch_that_was_not_scored_is_refused(make_policy, make_batch, trajectories):
    batch = make_batch(trajectories(seed=1))
    with pytest.raises(TrainingError, match="must be scored"):
        make_policy().update(replace(batch, advantages=None), 1, "digest")
    with pytest.raises(TrainingError, match=r"no ref_logprobs.*use_kl_loss"):
        make_policy().update(replace(batch, ref_logprobs=None), 1, "digest")
    with pytest.raises(TrainingError, match="step 1 was given the batch of step 2"):
        make_policy().update(replace(batch, step=2), 1, "digest")


def test_without_kl_loss_no_reference_is_needed(make_policy, make_batch, trajectories):
    batch = replace(make_batch(trajectories(seed=1)), ref_logprobs=None)
    metrics = make_policy(algorithm={"use_kl_loss": False}).update(batch, 1, "digest").metrics
    assert "policy/kl" not in metrics


def test_reference_scores_like_the_start_model_and_untrained_rows_as_zero(make_policy, make_reference, make_batch):
    rows = [([8, 9], [10, 11, 12], [1, 0, 1], 1.0, 0), ([8], [13, 14], [0, 0], 1.0, 1)]
    batch = make_batch(rows)
    numbers, values = make_reference().logprobs(batch)
    assert sorted(numbers.tolist()) == [0, 1]
    assert values.dtype == np.float32
    by_row = dict(zip(numbers.tolist(), values, strict=True))
    assert (by_row[1] == 0).all()
    assert ((by_row[0] != 0) == [False, False, True, False, True]).all()
    policy = dict(zip(*make_policy().logprobs(batch), strict=True))
    np.testing.assert_array_equal(policy[0], by_row[0])


def test_a_batch_with_nothing_to_train_on_has_logprobs_of_zero(make_policy, make_batch):
    batch = make_batch([([8], [13, 14], [0, 0], 1.0, 0)])
    rows, values = make_policy().logprobs(batch)
    assert rows.tolist() == [0]
    assert values.tolist() == [[0.0, 0.0, 0.0]]
