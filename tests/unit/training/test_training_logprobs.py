"""Token log-probabilities: right under padding, temperature and chunking."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_core.training.models import token_logprobs


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def single_row_logprobs(model, prompt, response, temperature):
    """One unpadded row through the plain model, one token at a time; also the entropies."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    values, entropies = [], []
    for index, token in enumerate(response):
        row = logits[len(prompt) + index - 1]
        probabilities = torch.exp(row) / torch.exp(row).sum()
        values.append(float(torch.log(probabilities[token])))
        entropies.append(float(-sum(p * torch.log(p) for p in probabilities)))
    return values, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_left_padded_rows_score_like_unpadded_single_rows(model, make_batch, trajectories, temperature):
    rows = trajectories(seed=3)
    batch = make_batch(rows, left=3, right=2)
    with torch.no_grad():
        logprobs, entropy = token_logprobs(
            model,
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.attention_mask),
            batch.prompt_width,
            temperature,
            with_entropy=True,
        )
        for index, (prompt, response, *_) in enumerate(rows):
            expected, expected_entropy = single_row_logprobs(model, prompt, response, temperature)
            columns = slice(batch.prompt_width, batch.prompt_width + len(response))
            np.testing.assert_allclose(logprobs[index, columns], expected, atol=2e-5)
            np.testing.assert_allclose(entropy[index, columns], expected_entropy, atol=2e-5)
    assert torch.equal(logprobs[:, : batch.prompt_width], torch.zeros(len(rows), batch.prompt_width))
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunk_size_changes_neither_values_nor_gradients(model, make_batch, trajectories, chunk_size):
    batch = make_batch(trajectories(seed=4))
    arguments = (torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask), batch.prompt_width, 0.9)
    mask = torch.from_numpy(batch.loss_mask != 0)
    results = []
    for size in (None, chunk_size):
        model.zero_grad()
        logprobs, entropy = token_logprobs(model, *arguments, chunk_size=size, with_entropy=True, entropy_gradient=True)
        (logprobs[mask].sum() + 0.1 * entropy[mask].sum()).backward()
        gradient = model.get_input_embeddings().weight.grad.clone()
        results.append((logprobs.detach(), entropy.detach(), gradient))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-5)


def test_entropy_carries_a_gradient_only_when_asked_for(model, make_batch, trajectories):
    batch = make_batch(trajectories(seed=4))
    arguments = (torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask), batch.prompt_width, 1.0)
    assert not token_logprobs(model, *arguments, with_entropy=True)[1].requires_grad
    assert token_logprobs(model, *arguments, with_entropy=True, entropy_gradient=True)[1].requires_grad
    assert token_logprobs(model, *arguments)[1] is None


def test_a_batch_without_response_columns_has_no_logprobs(model):
    ids = torch.tensor([[9, 10, 11]])
    logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids), 3, 1.0)
    assert torch.equal(logprobs, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="at least one prompt column"):
        token_logprobs(model, ids, torch.ones_like(ids), 0, 1.0)


def test_uniform_logits_give_minus_log_of_the_vocabulary_size():
    class Uniform(torch.nn.Module):
        def forward(self, input_ids, logits_to_keep, **_):
            logits = torch.full((*input_ids.shape, 8), 3.0)[:, -logits_to_keep:]
            return type("Output", (), {"logits": logits})

    ids = torch.tensor([[1, 2, 3, 4]])
    logprobs, entropy = token_logprobs(Uniform(), ids, torch.ones_like(ids), 2, 0.5, with_entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, 0.0, -2.0794415, -2.0794415]]))
    torch.testing.assert_close(entropy, torch.tensor([[0.0, 0.0, 2.0794415, 2.0794415]]))
