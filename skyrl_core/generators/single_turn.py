"""One prompt, one answer, one reward: rollouts over text environments without observations to go on from."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import IntArray, Prompt, Rollout
from skyrl_core.data.seeds import derive_seed
from skyrl_core.data.tokenizer import prompt_token_ids
from skyrl_core.environments.protocol import Environment
from skyrl_core.environments.registry import make_environment
from skyrl_core.environments.rewards import check_reward
from skyrl_core.errors import ConfigurationError, RewardError, RolloutError
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest, InferenceClient
from skyrl_core.generators.templates import chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_core.config import SkyRLConfig

Purpose = Literal["rollout", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    """A trajectory before the policy answers; `failure` when its environment could not even start."""

    prompt: Prompt
    sample_index: int
    prompt_ids: IntArray
    environment: Environment | None
    failure: str | None


class SingleTurnGenerator:
    """Rolls prompts out in one turn each. Every trajectory has an environment of its own.

    A failing environment costs its trajectory, which carries the error and no reward; when more than
    `trainer.max_failed_fraction` fail, the stage does. Blocking environments run in
    `environment.skyrl_gym.max_env_workers` threads.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", client: InferenceClient, config: "SkyRLConfig") -> None:
        self._tokenizer = tokenizer
        self._client = client
        self._config = config
        self._template = chat_template(config.generator.chat_template)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        n_samples: int,
        sampling: SamplingParams,
        run_seed: int,
        purpose: Purpose,
    ) -> list[Rollout]:
        """`n_samples` rollouts of every prompt, side by side, in the order of the prompts.

        Rollout seeds derive from (run seed, step, uid, sample), evaluation seeds leave the step out. Raises
        RolloutError when too many trajectories failed, and whatever the inference client raises.
        """
        workers = self._config.environment.skyrl_gym.max_env_workers
        pool = ThreadPoolExecutor(workers, thread_name_prefix="environment") if workers else None
        try:
            episodes = await self._begin(prompts, n_samples, pool)
            running = [episode for episode in episodes if episode.failure is None]
            requests = [
                GenerationRequest(
                    prompt_ids=episode.prompt_ids,
                    seed=_seed(run_seed, purpose, step, episode.prompt.uid, episode.sample_index),
                    session_id=f"{episode.prompt.uid}/{episode.sample_index}",
                )
                for episode in running
            ]
            outputs = iter(await self._client.generate(requests, sampling) if requests else [])
            finishing = [
                self._finish(episode, next(outputs) if episode.failure is None else None, pool) for episode in episodes
            ]
            rollouts = list(await asyncio.gather(*finishing))
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._check_failures(rollouts)
        return rollouts

    async def _begin(self, prompts: Sequence[Prompt], n_samples: int, pool: Executor | None) -> list[_Episode]:
        jobs = [self._begin_one(prompt, index, pool) for prompt in prompts for index in range(n_samples)]
        return list(await asyncio.gather(*jobs))

    async def _begin_one(self, prompt: Prompt, sample_index: int, pool: Executor | None) -> _Episode:
        def start() -> tuple[Environment, list[Any]]:
            environment = make_environment(prompt.env_class, prompt.env_extras, self._env_config(prompt.env_class))
            messages, _ = environment.init([dict(message) for message in prompt.messages])
            return environment, messages

        environment, failure, ids = None, None, np.empty(0, dtype=np.int64)
        try:
            environment, messages = await _run(start, pool)
        except ConfigurationError:
            raise
        except Exception as error:  # one environment's failure is one trajectory's
            failure = f"{type(error).__name__}: {error}"
        else:
            ids = np.array(
                prompt_token_ids(
                    self._tokenizer,
                    messages,
                    chat_template=self._template,
                    chat_template_kwargs=self._config.generator.chat_template_kwargs,
                ),
                dtype=np.int64,
            )
            self._check_length(prompt, ids)
        return _Episode(
            prompt=prompt, sample_index=sample_index, prompt_ids=ids, environment=environment, failure=failure
        )

    async def _finish(self, episode: _Episode, output: GenerationOutput | None, pool: Executor | None) -> Rollout:
        """Let the environment judge the answer, and write the trajectory down."""
        environment = episode.environment
        if output is None or environment is None:
            return _failed(episode, output, episode.failure or "no answer")
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)

        def judge() -> tuple[float, dict[str, float]]:
            try:
                answer = environment.step(text)
                if answer.get("reward") is None:
                    raise ValueError("the environment gave no reward")
                return check_reward(answer["reward"], episode.prompt.uid), _numbers(environment.get_metrics())
            finally:
                environment.close()

        try:
            reward, metrics = await _run(judge, pool)
        except RewardError:
            raise
        except Exception as error:  # one environment's failure is one trajectory's
            return _failed(episode, output, f"{type(error).__name__}: {error}")
        return self._rollout(episode, output, reward, metrics)

    def _rollout(
        self, episode: _Episode, output: GenerationOutput, reward: float, metrics: dict[str, float]
    ) -> Rollout:
        generator, length = self._config.generator, len(output.token_ids)
        cut = output.stop_reason != "stop"
        if cut and generator.zero_reward_on_non_stop:
            reward = 0.0
        rewards = np.zeros(max(length, 1), dtype=np.float32)
        rewards[-1] = reward
        mask = np.ones(length, dtype=np.int64)
        if cut and generator.apply_overlong_filtering:
            mask[:] = 0
        return Rollout(
            uid=episode.prompt.uid,
            sample_index=episode.sample_index,
            prompt_ids=episode.prompt_ids,
            response_ids=output.token_ids,
            loss_mask=mask,
            rollout_logprobs=output.logprobs,
            token_rewards=rewards,
            stop_reason=output.stop_reason,
            policy_versions=(output.policy_version,),
            data_source=episode.prompt.data_source,
            env_class=episode.prompt.env_class,
            env_metrics=metrics,
        )

    def _env_config(self, env_class: str) -> Any:
        """The section of `environment.skyrl_gym` that belongs to an environment, if it has one."""
        return getattr(self._config.environment.skyrl_gym, env_class, None)

    def _check_length(self, prompt: Prompt, ids: IntArray) -> None:
        limit = self._config.generator.max_input_length
        if limit is not None and len(ids) > limit:
            raise RolloutError(
                f"prompt {prompt.uid} has {len(ids)} tokens when its environment starts, more than "
                f"generator.max_input_length={limit}"
            )

    def _check_failures(self, rollouts: Sequence[Rollout]) -> None:
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        limit = self._config.trainer.max_failed_fraction
        if len(failed) > limit * len(rollouts):
            first = failed[0]
            raise RolloutError(
                f"{len(failed)} of {len(rollouts)} trajectories failed, and trainer.max_failed_fraction={limit:g}; the "
                f"first, {first.uid} sample {first.sample_index}: {first.error}"
            )


def _seed(run_seed: int, purpose: Purpose, step: int, uid: str, sample_index: int) -> int:
    if purpose == "rollout":
        return derive_seed(run_seed, "rollout", step, uid, sample_index)
    return derive_seed(run_seed, "eval", uid, sample_index)


async def _run(work: Any, pool: Executor | None) -> Any:
    if pool is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers or truth values, as floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}


def _failed(episode: _Episode, output: GenerationOutput | None, message: str) -> Rollout:
    """A trajectory without reward: nothing of it is trained on or averaged."""
    ids = output.token_ids if output is not None else np.empty(0, dtype=np.int64)
    return Rollout(
        uid=episode.prompt.uid,
        sample_index=episode.sample_index,
        prompt_ids=episode.prompt_ids,
        response_ids=ids,
        loss_mask=np.zeros(len(ids), dtype=np.int64),
        rollout_logprobs=output.logprobs if output is not None else None,
        token_rewards=np.zeros(max(len(ids), 1), dtype=np.float32),
        stop_reason="error",
        policy_versions=(output.policy_version,) if output is not None else (),
        data_source=episode.prompt.data_source,
        env_class=episode.prompt.env_class,
        error=message,
    )
