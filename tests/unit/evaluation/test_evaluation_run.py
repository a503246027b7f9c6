"""The evaluation: what it asks the generator for, and the files it leaves."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.evaluation.evaluate import Evaluation, evaluate, write_dump
from skyrl_core.evaluation.metrics import EvalReport, build_report
from skyrl_core.testing.tiny_model import build_tiny_tokenizer


class RecordingGenerator:
    """Rewards 1 when sampling greedily, else the sample's index."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        n_samples: int,
        sampling: SamplingParams,
        run_seed: int,
        purpose: Any,
    ) -> list[Rollout]:
        uids = [prompt.uid for prompt in prompts]
        self.calls.append(
            {"uids": uids, "step": step, "n": n_samples, "sampling": sampling, "seed": run_seed, "purpose": purpose}
        )
        return [
            _rollout(uid, index, 1.0 if sampling.temperature == 0 else float(index))
            for uid in uids
            for index in range(n_samples)
        ]


def _rollout(uid: str, index: int, reward: float, *, source: str = "sums", error: str | None = None) -> Rollout:
    return Rollout(
        uid=uid,
        sample_index=index,
        prompt_ids=np.array([1, 5, 9], dtype=np.int64),
        response_ids=np.array([10, 2], dtype=np.int64),
        loss_mask=np.ones(2, dtype=np.int64),
        rollout_logprobs=None,
        token_rewards=np.array([0.0, reward], dtype=np.float32),
        stop_reason="stop" if error is None else "error",
        policy_versions=(1,),
        data_source=source,
        env_class="arithmetic",
        error=error,
    )


def _config(*, temperature: float, greedy: bool, n_samples: int = 2) -> SkyRLConfig:
    return SkyRLConfig.model_validate(
        {
            "trainer": {"eval_greedy": greedy, "eval_batch_size": 2},
            "generator": {
                "eval_n_samples_per_prompt": n_samples,
                "eval_sampling_params": {"temperature": temperature, "top_p": 0.9, "max_generate_length": 7},
            },
        }
    )


PROMPTS = [Prompt(uid=uid, messages=({"role": "user", "content": uid},), env_class="arithmetic") for uid in "abc"]


def test_prompts_go_in_batches_with_the_evaluations_sampling_and_seeds():
    generator = RecordingGenerator()
    config = _config(temperature=0.8, greedy=False)
    evaluation = asyncio.run(evaluate(generator, PROMPTS, config, run_seed=5))
    assert [call["uids"] for call in generator.calls] == [["a", "b"], ["c"]]
    assert {(call["n"], call["seed"], call["purpose"], call["step"]) for call in generator.calls} == {(2, 5, "eval", 0)}
    assert all(call["sampling"] == config.generator.eval_sampling_params for call in generator.calls)
    assert evaluation.report.overall.avg_score == 0.5
    assert evaluation.report.overall.greedy_score is None
    assert len(evaluation.sampled) == 6


def test_greedy_decoding_is_a_second_pass_with_one_sample():
    generator = RecordingGenerator()
    evaluation = asyncio.run(evaluate(generator, PROMPTS, _config(temperature=0.8, greedy=True), run_seed=5))
    assert [(call["n"], call["sampling"].temperature) for call in generator.calls] == [(2, 0.8)] * 2 + [(1, 0.0)] * 2
    assert generator.calls[2]["sampling"].max_generate_length == 7
    assert evaluation.report.overall.greedy_score == 1.0


def test_an_evaluation_that_is_greedy_already_is_not_run_twice():
    generator = RecordingGenerator()
    evaluation = asyncio.run(evaluate(generator, PROMPTS, _config(temperature=0.0, greedy=True), run_seed=5))
    assert len(generator.calls) == 2
    assert [(rollout.uid, rollout.sample_index) for rollout in evaluation.greedy] == [("a", 0), ("b", 0), ("c", 0)]
    assert evaluation.report.overall.greedy_score == 1.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from skyrl_core.data.tokenizer import load_tokenizer

    return load_tokenizer(str(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def test_the_dump_has_a_readable_line_for_every_trajectory(tmp_path: Path, tokenizer: Any):
    sampled = (
        _rollout("a", 0, 1.0),
        _rollout("b", 0, 0.0, source="org/x"),
        _rollout("c", 0, 0.0, source="org_x", error="OSError: x"),
    )
    greedy = (_rollout("a", 0, 1.0),)
    evaluation = Evaluation(report=build_report(sampled, greedy), sampled=sampled, greedy=greedy)
    folder = write_dump(evaluation, str(tmp_path), 12, tokenizer)
    assert folder == tmp_path / "dumped_evals" / "global_step_12_evals"
    lines = [json.loads(line) for line in (folder / "sums.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {
        "uid": "a",
        "sample": 0,
        "kind": "sampled",
        "data_source": "sums",
        "prompt": "<bos><user>1",
        "response": "2<eos>",
        "score": 1.0,
        "stop_reason": "stop",
        "error": None,
    }
    assert lines[1]["kind"] == "greedy"
    shared = [json.loads(line) for line in (folder / "org_x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["uid"], line["score"], line["error"]) for line in shared] == [
        ("b", 0.0, None),
        ("c", None, "OSError: x"),
    ]
    report = EvalReport.from_json((folder / "aggregated_results.json").read_text(encoding="utf-8"))
    assert report == evaluation.report
