"""Scores validation prompts with the engines' present weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.data.storage import atomic_write_bytes
from skyrl_core.evaluation.metrics import EvalReport, build_report
from skyrl_core.generators.protocol import Generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The report and the trajectories behind it."""

    report: EvalReport
    sampled: tuple[Rollout, ...]
    greedy: tuple[Rollout, ...]


async def evaluate(
    generator: Generator, prompts: Sequence[Prompt], config: SkyRLConfig, *, run_seed: int
) -> Evaluation:
    """Roll the prompts out by `generator.eval_sampling_params`, and greedily too when `trainer.eval_greedy` is set.

    `trainer.eval_batch_size` prompts are rolled out at a time. Seeds derive from the run's seed and the prompt, not
    from the step: two checkpoints are compared on the same draws, and training's randomness is untouched. Raises
    RolloutError when no trajectory can be scored.
    """
    sampling = config.generator.eval_sampling_params or config.generator.sampling_params
    n_samples = config.generator.eval_n_samples_per_prompt
    sampled = await _roll_out(generator, prompts, config, sampling, run_seed, n_samples)
    greedy: list[Rollout] = []
    if config.trainer.eval_greedy:
        if sampling.temperature == 0:
            greedy = [rollout for rollout in sampled if rollout.sample_index == 0]
        else:
            likeliest = sampling.model_copy(update={"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0})
            greedy = await _roll_out(generator, prompts, config, likeliest, run_seed, 1)
    return Evaluation(report=build_report(sampled, greedy), sampled=tuple(sampled), greedy=tuple(greedy))


async def _roll_out(
    generator: Generator,
    prompts: Sequence[Prompt],
    config: SkyRLConfig,
    sampling: SamplingParams,
    run_seed: int,
    n_samples: int,
) -> list[Rollout]:
    size = config.trainer.eval_batch_size
    rollouts: list[Rollout] = []
    for start in range(0, len(prompts), size):
        rollouts += await generator.generate(
            prompts[start : start + size],
            step=0,
            n_samples=n_samples,
            sampling=sampling,
            run_seed=run_seed,
            purpose="eval",
        )
    return rollouts


def write_dump(evaluation: Evaluation, export_dir: str, step: int, tokenizer: "PreTrainedTokenizerBase") -> Path:
    """Every trajectory as a readable line of JSON in `dumped_evals/global_step_N_evals/`, one file a data source.

    Beside them `aggregated_results.json` holds the report. Each file is written whole. Returns the folder.
    """
    folder = Path(export_dir) / "dumped_evals" / f"global_step_{step}_evals"
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for kind, rollouts in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
        for rollout in rollouts:
            lines.setdefault(_file_stem(rollout.data_source), []).append(_dump_line(rollout, kind, tokenizer))
    for stem, texts in lines.items():
        atomic_write_bytes(folder / f"{stem}.jsonl", ("\n".join(texts) + "\n").encode())
    atomic_write_bytes(folder / "aggregated_results.json", evaluation.report.to_json().encode() + b"\n")
    return folder


def _dump_line(rollout: Rollout, kind: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """One trajectory, with its texts as the model saw and wrote them, special tokens included."""
    return json.dumps(
        {
            "uid": rollout.uid,
            "sample": rollout.sample_index,
            "kind": kind,
            "data_source": rollout.data_source,
            "prompt": tokenizer.decode(rollout.prompt_ids.tolist()),
            "response": tokenizer.decode(rollout.response_ids.tolist()),
            "score": None if rollout.error else rollout.reward,
            "stop_reason": rollout.stop_reason,
            "error": rollout.error,
        },
        ensure_ascii=False,
    )


def _file_stem(data_source: str) -> str:
    """The source as a file name. Sources that differ in other characters only share a file."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in data_source)
