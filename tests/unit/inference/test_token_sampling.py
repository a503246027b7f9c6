"""The processed distribution and seeded draws, against hand-worked values and transformers' own processors."""

import math

import numpy as np
import pytest
import torch

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.inference import sampling as sampling_module
from skyrl_core.inference.sampling import draw, next_tokens, processed_logprobs, row_uniforms

PROBABILITIES = [0.1, 0.2, 0.3, 0.4]
LARGEST_UNIFORM = 1 - 2.0**-53


def _logits(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def _probabilities(logits: torch.Tensor, **params: float) -> list[float]:
    return processed_logprobs(logits, SamplingParams(**params)).exp()[0].tolist()  # type: ignore[arg-type]


def test_a_rows_uniforms_depend_on_its_seed_and_position_alone():
    alone = row_uniforms([7], 4)[0]
    among = row_uniforms([3, 7, 2**63 - 1], 9)[1]
    assert among[:4].tolist() == alone.tolist()
    assert row_uniforms([8], 4)[0].tolist() != alone.tolist()
    assert ((among >= 0) & (among < 1)).all()


def test_uniforms_are_philox_keyed_by_the_seed():
    # Each double is the top 53 bits of a 64-bit word of the counter-based stream, worked out by hand here.
    words = np.random.Philox(key=12345).random_raw(3)
    assert row_uniforms([12345], 3)[0].tolist() == [int(word >> np.uint64(11)) / 2**53 for word in words]


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (LARGEST_UNIFORM, 3)],
)
def test_a_draw_takes_the_first_token_whose_cumulative_probability_exceeds_the_uniform(uniform, token):
    assert draw(_logits(PROBABILITIES), torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_a_uniform_grid_draws_each_token_in_proportion_to_its_probability():
    count = 10_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(_logits(PROBABILITIES).expand(count, -1), uniforms)
    counts = torch.bincount(tokens, minlength=4).tolist()
    assert counts == pytest.approx([1000, 2000, 3000, 4000], abs=1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    # 1.0 is out of range: it stands for a uniform that arithmetic elsewhere rounds up to the total.
    logprobs = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.5), -math.inf, -math.inf]])
    assert draw(logprobs, torch.tensor([uniform], dtype=torch.float64)).item() in (1, 3)


def test_a_uniform_on_the_border_belongs_to_the_next_token():
    assert draw(_logits([0.5, 0.5]), torch.tensor([0.5], dtype=torch.float64)).item() == 1


def test_a_uniform_is_a_share_of_the_total_even_when_the_total_is_not_one():
    # Cumulative sums .48 and .96: half of the total ends at .48, so .499 of it is still the first token.
    assert draw(_logits([0.48, 0.48]), torch.tensor([0.499], dtype=torch.float64)).item() == 0
    assert draw(_logits([0.48, 0.48]), torch.tensor([0.501], dtype=torch.float64)).item() == 1


def test_mass_that_rounding_lost_does_not_go_to_the_tail():
    # A thousand equal fp32 log-probabilities do not sum to exactly 1; the largest uniform still finds the last token.
    logprobs = torch.full((1, 1000), -math.log(1000.0))
    assert draw(logprobs, torch.tensor([LARGEST_UNIFORM], dtype=torch.float64)).item() == 999
    assert draw(logprobs, torch.tensor([0.4995], dtype=torch.float64)).item() == 499


def test_temperature_one_and_two_by_hand():
    assert _probabilities(_logits(PROBABILITIES)) == pytest.approx(PROBABILITIES, abs=1e-6)
    roots = [math.sqrt(p) for p in PROBABILITIES]
    assert _probabilities(_logits(PROBABILITIES), temperature=2.0) == pytest.approx(
        [root / sum(roots) for root in roots], abs=1e-6
    )


def test_top_k_keeps_the_likeliest_and_renormalises():
    assert _probabilities(_logits(PROBABILITIES), top_k=2) == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=1e-6)


def test_top_k_prefers_lower_ids_among_equals():
    assert _probabilities(torch.zeros(1, 4), top_k=2) == pytest.approx([0.5, 0.5, 0, 0], abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, [3]), (0.5, [2, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    total = sum(PROBABILITIES[i] for i in kept)
    expected = [PROBABILITIES[i] / total if i in kept else 0 for i in range(4)]
    assert _probabilities(_logits(PROBABILITIES), top_p=top_p) == pytest.approx(expected, abs=1e-6)


def test_min_p_is_relative_to_the_likeliest_token():
    # 0.6 of 0.4 is 0.24: only 0.3 and 0.4 stay.
    assert _probabilities(_logits(PROBABILITIES), min_p=0.6) == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=1e-6)


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_of_seen_tokens():
    logits = torch.tensor([[2.0, -1.0, 2.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    got = processed_logprobs(logits, SamplingParams(repetition_penalty=2.0), seen)
    expected = torch.log_softmax(torch.tensor([[1.0, -2.0, 2.0, -1.0]]), dim=-1)
    torch.testing.assert_close(got, expected)


def test_filters_agree_with_transformers_processors():
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 50, generator=generator)
    ids = torch.randint(0, 50, (64, 7), generator=generator)
    seen = torch.zeros(64, 50, dtype=torch.bool).scatter_(1, ids, True)
    params = SamplingParams(temperature=0.7, min_p=0.05, top_k=20, top_p=0.9, repetition_penalty=1.3)
    scores = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    for processor in (
        TemperatureLogitsWarper(0.7),
        MinPLogitsWarper(0.05),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
    ):
        scores = processor(ids, scores)
    torch.testing.assert_close(processed_logprobs(logits, params, seen), torch.log_softmax(scores, dim=-1))


def _reference_draw(
    logits: list[float], uniform: float, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[int, float]:
    """One row in float64, token by token: the chosen id and its log-probability."""
    scores = np.array(logits, dtype=np.float64) / temperature
    weights = np.exp(scores - scores.max())
    kept = [i for i in range(len(weights)) if weights[i] >= min_p * weights.max()]
    kept.sort(key=lambda i: (-weights[i], i))
    kept = kept[:top_k] if top_k > 0 else kept
    mass, nucleus = 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i]
        if mass >= top_p * weights[kept].sum():
            break
    position, total = 0.0, weights[nucleus].sum()
    for i in sorted(nucleus):
        position += weights[i]
        if position > uniform * total:
            return i, float(np.log(weights[i] / total))
    raise AssertionError("no token")


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(1.0, 0, -1, 1), (0.7, 0, -1, 1), (1.5, 0.1, -1, 1), (1.0, 0, 5, 1), (1.0, 0, -1, 0.8), (0.9, 0.02, 12, 0.9)],
)
def test_draws_and_their_logprobs_are_those_of_a_sampler_written_out(temperature, min_p, top_k, top_p):
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((200, 30))).astype(np.float32)
    uniforms = random.random(200)
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    tokens, logprobs = next_tokens(torch.from_numpy(logits), torch.from_numpy(uniforms), params)
    expected = [
        _reference_draw(row.tolist(), float(uniform), temperature, min_p, top_k, top_p)
        for row, uniform in zip(logits, uniforms, strict=True)
    ]
    assert tokens.tolist() == [token for token, _ in expected]
    assert logprobs.tolist() == pytest.approx([logprob for _, logprob in expected], abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token_with_the_models_own_logprob():
    tokens, logprobs = next_tokens(
        _logits(PROBABILITIES), torch.zeros(1, dtype=torch.float64), SamplingParams(temperature=0.0, top_p=0.1)
    )
    assert tokens.tolist() == [3]
    assert logprobs.tolist() == pytest.approx([math.log(0.4)], abs=1e-6)


def test_processing_in_blocks_changes_no_bit(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(33, 40, generator=generator)
    uniforms = torch.rand(33, dtype=torch.float64, generator=generator)
    params = SamplingParams(temperature=1.3, top_k=10)
    whole = next_tokens(logits, uniforms, params)
    monkeypatch.setattr(sampling_module, "_BLOCK_ELEMENTS", 200)
    blocks = next_tokens(logits, uniforms, params)
    assert torch.equal(whole[0], blocks[0])
    assert torch.equal(whole[1], blocks[1])
