"""Scores validation prompts with the engines' present weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.data.run_store import atomic_write_bytes
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

    Seeds derive from the run's seed and the prompt, not from the step: two checkpoints are compared on the same draws,
    and training's randomness is untouched.
    """
    sampling = config.generator.eval_sampling_params or config.generator.sampling_params
    sampled = await _roll_out(
        generator, prompts, config, sampling, run_seed, config.generator.eval_n_samples_per_prompt
    )
    greedy: list[Rollout] = []
    if config.trainer.eval_greedy:
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
    """Every trajectory as a readable line of JSON in `dumped_evals/global_step_N_evals/`, one file a data source."""
    folder = Path(export_dir) / "dumped_evals" / f"global_step_{step}_evals"
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for kind, rollouts in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
        for rollout in rollouts:
            lines.setdefault(rollout.data_source, []).append(
                json.dumps(
                    {
                        "uid": rollout.uid,
                        "sample": rollout.sample_index,
                        "kind": kind,
                        "prompt": tokenizer.decode(rollout.prompt_ids),
                        "response": tokenizer.decode(rollout.response_ids),
                        "score": None if rollout.error else rollout.reward,
                        "stop_reason": rollout.stop_reason,
                        "error": rollout.error,
                    },
                    ensure_ascii=False,
                )
            )
    for source, texts in lines.items():
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in source)
        atomic_write_bytes(folder / f"{name}.jsonl", ("\n".join(texts) + "\n").encode())
    atomic_write_bytes(folder / "aggregated_results.json", evaluation.report.to_json().encode() + b"\n")
    return folder
