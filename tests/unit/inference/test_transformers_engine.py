"""The transformers engine, against plain forward passes without a cache and a sampler written out here."""

import bisect
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.errors import ConfigurationError, RolloutError, WeightSyncError
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest
from skyrl_core.inference.decoding import decode_batch
from skyrl_core.inference.transformers_engine import TransformersEngine

CHATS = ["1+1=", "12+34=", "hello", "7", "12+34=", "a longer question, with a comma"]
EOS = 2


def _requests(tokenizer: Any, texts: Sequence[str] = CHATS) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_ids=np.asarray(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
                ),
                dtype=np.int64,
            ),
            seed=1000 + index,
            session_id=f"p{index}/0",
        )
        for index, text in enumerate(texts)
    ]


@pytest.fixture
def engine(tied_model: Path, tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(str(tied_model), tokenizer=tokenizer)


def _reference(
    model: Any, request: GenerationRequest, sampling: SamplingParams, stops: Collection[int] = (EOS,)
) -> tuple[list[int], list[float], str]:
    """One row at a time, no cache, no padding, plain Python for the draw."""
    ids, chosen, logprobs = request.prompt_ids.tolist(), [], []
    uniforms = np.random.Generator(np.random.Philox(key=request.seed)).random(sampling.max_generate_length)
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(torch.tensor([ids + chosen])).logits[0, -1]
        temperature = sampling.temperature or 1.0
        row = torch.log_softmax(logits / temperature, dim=-1)
        if sampling.temperature == 0:
            token = int(row.argmax())
        else:
            cumulative = np.cumsum(row.double().exp().numpy())
            token = bisect.bisect_right(cumulative.tolist(), float(uniform) * float(cumulative[-1]))
        chosen.append(token)
        logprobs.append(float(row[token]))
        if token in stops:
            return chosen, logprobs, "stop"
    return chosen, logprobs, "length"


def _same(left: Sequence[GenerationOutput], right: Sequence[GenerationOutput]) -> bool:
    return all(
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.logprobs is not None
        and b.logprobs is not None
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        and a.stop_reason == b.stop_reason
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("model_fixture", ["tied_model", "untied_model"])
def test_tokens_and_logprobs_are_those_of_an_uncached_forward_pass(
    model_fixture: str, temperature: float, tokenizer: Any, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(model_fixture)
    engine = TransformersEngine(str(path), tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(path)
    sampling = SamplingParams(max_generate_length=10, temperature=temperature)
    requests = _requests(tokenizer)
    for asked, output in zip(requests, engine.generate(requests, sampling), strict=True):
        ids, logprobs, reason = _reference(model, asked, sampling)
        assert output.token_ids.tolist() == ids
        assert output.stop_reason == reason
        assert output.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert output.policy_version == 0


def test_a_sample_does_not_depend_on_the_batch_it_is_in(engine: TransformersEngine, tokenizer: Any, tied_model: Path):
    sampling = SamplingParams(max_generate_length=12)
    requests = _requests(tokenizer, CHATS * 6)
    together = engine.generate(requests, sampling)
    small = TransformersEngine(str(tied_model), tokenizer=tokenizer, max_batch_size=5).generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    backwards = engine.generate(requests[::-1], sampling)[::-1]
    assert [output.token_ids.tolist() for output in backwards] == [output.token_ids.tolist() for output in together]
    assert len({output.stop_reason for output in together}) == 2
    for a, b, c in zip(together, small, alone, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() == c.token_ids.tolist()
        assert a.logprobs == pytest.approx(c.logprobs, abs=1e-5)
        assert b.logprobs == pytest.approx(c.logprobs, abs=1e-5)


def test_repeated_calls_give_the_same_bits(engine: TransformersEngine, tokenizer: Any, tied_model: Path):
    sampling = SamplingParams(max_generate_length=20, temperature=1.2)
    requests = _requests(tokenizer, CHATS * 5)
    first = engine.generate(requests, sampling)
    engine.generate(requests[:3], SamplingParams(max_generate_length=3))
    assert _same(first, engine.generate(requests, sampling))
    assert _same(first, TransformersEngine(str(tied_model), tokenizer=tokenizer).generate(requests, sampling))


def test_rows_that_end_early_leave_the_others_as_they_are(tied_model: Path, tokenizer: Any):
    # Every seventh token ends a response: rows end all the time, and are dropped from the computation in groups.
    stops = range(0, 100, 7)
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    sampling = SamplingParams(max_generate_length=16)
    requests = _requests(tokenizer, CHATS * 3)
    batch = decode_batch(
        model.eval(),
        [request.prompt_ids for request in requests],
        [request.seed for request in requests],
        sampling,
        stop_ids=stops,
        stop_check=None,
        pad_id=0,
    )
    assert len(set(batch.lengths.tolist())) > 5
    for row, request in enumerate(requests):
        ids, logprobs, reason = _reference(model, request, sampling, stops)
        length = int(batch.lengths[row])
        assert batch.token_ids[row, :length].tolist() == ids
        assert batch.logprobs[row, :length] == pytest.approx(logprobs, abs=1e-5)
        assert batch.stopped[row] == (reason == "stop")


def test_samples_of_one_prompt_differ_by_their_seeds(engine: TransformersEngine, tokenizer: Any):
    asked = _requests(tokenizer, ["5+5="] * 8)
    outputs = engine.generate(asked, SamplingParams(max_generate_length=8))
    assert len({output.token_ids.tobytes() for output in outputs}) > 1


def test_a_longer_limit_only_continues_a_response(engine: TransformersEngine, tokenizer: Any):
    asked = _requests(tokenizer)
    short = engine.generate(asked, SamplingParams(max_generate_length=3))
    long = engine.generate(asked, SamplingParams(max_generate_length=9))
    for a, b in zip(short, long, strict=True):
        assert b.token_ids[: len(a.token_ids)].tolist() == a.token_ids.tolist()
        assert len(a.token_ids) <= 3


def test_the_end_of_sequence_token_ends_a_response_and_is_kept(engine: TransformersEngine, tokenizer: Any):
    outputs = engine.generate(_requests(tokenizer, CHATS * 6), SamplingParams(max_generate_length=25))
    stopped = [output for output in outputs if output.stop_reason == "stop"]
    assert stopped
    for output in stopped:
        assert output.token_ids[-1] == EOS
        assert EOS not in output.token_ids[:-1]
    for output in outputs:
        if output.stop_reason == "length":
            assert len(output.token_ids) == 25
            assert EOS not in output.token_ids


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine: TransformersEngine, tokenizer: Any):
    asked = _requests(tokenizer, CHATS * 4)
    free = engine.generate(asked, SamplingParams(max_generate_length=25))
    texts = [tokenizer.decode(output.token_ids.tolist(), skip_special_tokens=True) for output in free]
    stop = texts[0][2:4]
    stopped = engine.generate(asked, SamplingParams(max_generate_length=25, stop=(stop, "never written")))
    for text, before, after in zip(texts, free, stopped, strict=True):
        if stop in text:
            assert (
                tokenizer.decode(after.token_ids.tolist(), skip_special_tokens=True)
                == text[: text.index(stop) + len(stop)]
            )
            assert after.stop_reason == "stop"
        else:
            assert after.token_ids.tolist() == before.token_ids.tolist()


def test_repetition_penalty_counts_prompt_and_response_but_not_padding(untied_model: Path, tokenizer: Any):
    # Untied, because a tied head gives the padding token a score of zero, which no penalty changes.
    engine = TransformersEngine(str(untied_model), tokenizer=tokenizer)
    sampling = SamplingParams(max_generate_length=6, temperature=0.0, repetition_penalty=5.0)
    requests = _requests(tokenizer)
    model = engine._model
    for asked, output in zip(requests, engine.generate(requests, sampling), strict=True):
        ids = asked.prompt_ids.tolist()
        assert output.logprobs is not None
        for token, logprob in zip(output.token_ids.tolist(), output.logprobs.tolist(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            for seen in set(ids):
                logits[seen] = logits[seen] / 5.0 if logits[seen] > 0 else logits[seen] * 5.0
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(torch.log_softmax(logits, dim=-1)[token]), abs=1e-5)
            ids.append(token)


def test_logprobs_are_left_out_when_not_asked_for(engine: TransformersEngine, tokenizer: Any):
    output = engine.generate(_requests(tokenizer)[:1], SamplingParams(max_generate_length=2, logprobs=None))[0]
    assert output.logprobs is None


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_broken_model_is_an_error_not_a_sample(engine: TransformersEngine, tokenizer: Any, temperature: float):
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in engine._model.named_parameters()}
    engine.begin_update()
    engine.load_weights(broken)
    engine.finish_update(6)
    with pytest.raises(RolloutError, match="engine-0: the model of policy version 6 gives scores that are NaN"):
        engine.generate(_requests(tokenizer), SamplingParams(max_generate_length=2, temperature=temperature))


@pytest.mark.parametrize("keep_names", [True, False])
def test_new_weights_answer_as_a_model_loaded_from_disk(
    keep_names: bool, tied_model: Path, tmp_path: Path, tokenizer: Any
):
    from skyrl_core.testing.tiny_model import build_tiny_model

    other = build_tiny_model(tmp_path / "other", seed=9, max_position_embeddings=64)
    weights = AutoModelForCausalLM.from_pretrained(other).state_dict()
    if not keep_names:
        del weights["lm_head.weight"]
    engine = TransformersEngine(str(tied_model), tokenizer=tokenizer)
    engine.begin_update()
    for name, tensor in weights.items():
        engine.load_weights({name: tensor})
        assert engine.version() is None
    engine.finish_update(7)
    assert engine.version() == 7
    sampling, asked = SamplingParams(max_generate_length=8), _requests(tokenizer)
    expected = TransformersEngine(str(other), tokenizer=tokenizer).generate(asked, sampling)
    got = engine.generate(asked, sampling)
    assert _same(got, expected)
    assert {output.policy_version for output in got} == {7}


def test_a_half_done_update_is_never_sampled_from(engine: TransformersEngine, tokenizer: Any):
    engine.load_weights({"model.norm.weight": torch.ones(32)})
    with pytest.raises(WeightSyncError, match="engine-0 holds a half-done weight update"):
        engine.generate(_requests(tokenizer), SamplingParams(max_generate_length=2))


def test_an_update_without_every_parameter_names_what_is_missing(engine: TransformersEngine):
    weights = dict(engine._model.named_parameters())
    engine.begin_update()
    engine.load_weights({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"})
    with pytest.raises(WeightSyncError, match=r"without model\.norm\.weight"):
        engine.finish_update(1)
    assert engine.version() is None


def test_what_an_abandoned_update_sent_does_not_count_for_the_next(engine: TransformersEngine):
    weights = {name: tensor.detach().clone() for name, tensor in engine._model.named_parameters()}
    engine.begin_update()
    engine.load_weights(weights)
    engine.begin_update()
    engine.load_weights({"model.norm.weight": weights["model.norm.weight"]})
    with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight.* and \d+ more"):
        engine.finish_update(2)


def test_unknown_names_and_wrong_shapes_are_refused_before_anything_is_copied(engine: TransformersEngine):
    before = engine._model.get_parameter("model.norm.weight").clone()
    engine.begin_update()
    with pytest.raises(WeightSyncError, match=r"no parameter model\.nrom\.weight"):
        engine.load_weights({"model.norm.weight": torch.zeros(32), "model.nrom.weight": torch.zeros(32)})
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight: \(31,\) for \(32,\)"):
        engine.load_weights({"model.norm.weight": torch.zeros(31)})
    assert torch.equal(engine._model.get_parameter("model.norm.weight"), before)


def test_tied_names_with_different_values_are_refused(engine: TransformersEngine):
    embedding = engine._model.get_input_embeddings().weight.detach().clone()
    engine.begin_update()
    with pytest.raises(WeightSyncError, match=r"tied to model\.embed_tokens\.weight"):
        engine.load_weights({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1})


def test_a_folder_that_is_no_model_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=f"engine-3: cannot load a causal language model from {tmp_path}"):
        TransformersEngine(str(tmp_path), name="engine-3")


@pytest.mark.parametrize(
    ("ids", "sampling", "error", "message"),
    [
        ([], SamplingParams(), RolloutError, "p/0 has no tokens"),
        (
            [5] * 60,
            SamplingParams(max_generate_length=5),
            RolloutError,
            "60 prompt tokens .* 5, more than the model's 64",
        ),
        ([5], SamplingParams(max_generate_length=5, additional_kwargs={"seed": 1}), ConfigurationError, "got seed"),
        ([5], SamplingParams(max_generate_length=5, stop=("",)), ConfigurationError, "empty string"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: TransformersEngine, ids: list[int], sampling: SamplingParams, error: type[Exception], message: str
):
    asked = GenerationRequest(prompt_ids=np.asarray(ids, dtype=np.int64), seed=1, session_id="p/0")
    with pytest.raises(error, match=message):
        engine.generate([asked], sampling)


def test_stop_strings_without_a_tokenizer_are_refused(tied_model: Path, tokenizer: Any):
    engine = TransformersEngine(str(tied_model))
    with pytest.raises(ConfigurationError, match="needs a tokenizer"):
        engine.generate(_requests(tokenizer)[:1], SamplingParams(max_generate_length=2, stop=("x",)))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_on_cpu_sleeps_without_losing_anything_and_refuses_to_generate_meanwhile(
    level: int, engine: TransformersEngine, tokenizer: Any
):
    asked, sampling = _requests(tokenizer), SamplingParams(max_generate_length=4)
    before = engine.generate(asked, sampling)
    engine.sleep(level)
    with pytest.raises(RolloutError, match=r"asleep \(weights, kv_cache\)"):
        engine.generate(asked, sampling)
    with pytest.raises(WeightSyncError, match=r"asleep: call wake_up"):
        engine.begin_update()
    engine.wake_up(["weights"])
    with pytest.raises(RolloutError, match=r"asleep \(kv_cache\)"):
        engine.generate(asked, sampling)
    engine.wake_up(["kv_cache"])
    assert engine.version() == 0
    assert _same(engine.generate(asked, sampling), before)
    with pytest.raises(ConfigurationError, match="knows the tags weights, kv_cache, got wieghts"):
        engine.wake_up(["wieghts"])


def test_dropped_parameters_come_back_with_their_shapes_and_take_an_update(tied_model: Path):
    from skyrl_core.inference.weights import WeightTarget

    model = AutoModelForCausalLM.from_pretrained(tied_model)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    target = WeightTarget(model, "engine-0")
    target.drop()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    target.restore()
    target.begin()
    target.load(weights)
    target.check_complete()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_paused_engine_holds_requests_until_it_is_resumed(engine: TransformersEngine, tokenizer: Any):
    outputs: list[GenerationOutput] = []
    engine.pause()
    thread = threading.Thread(
        target=lambda: outputs.extend(engine.generate(_requests(tokenizer), SamplingParams(max_generate_length=2)))
    )
    thread.start()
    thread.join(timeout=0.05)
    assert not outputs
    engine.health()
    engine.resume()
    thread.join()
    assert len(outputs) == len(CHATS)
