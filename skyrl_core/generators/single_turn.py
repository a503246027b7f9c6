"""Single-turn rollouts: one prompt, one response, one verdict of the environment."""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import IntArray, Prompt, Rollout
from skyrl_core.data.seeds import derive_seed
from skyrl_core.data.tokenizer import prompt_token_ids
from skyrl_core.environments.composition import RewardComposer
from skyrl_core.environments.protocol import Conversation, Environment
from skyrl_core.environments.registry import make_environment
from skyrl_core.errors import ConfigurationError, RewardError, RolloutError
from skyrl_core.generators.blocking import BlockingPool
from skyrl_core.generators.postprocessing import Response, replace_action
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest, InferenceClient, Purpose
from skyrl_core.generators.templates import chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What the environment said about a response."""

    reward: float
    metrics: Mapping[str, float]
    postprocessed_action: str | None


@dataclass(slots=True, kw_only=True)
class _Trajectory:
    """One trajectory while it is made; `error` is set once its environment failed."""

    prompt: Prompt
    sample_index: int
    messages: Conversation
    environment: Environment | None = None
    prompt_ids: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    output: GenerationOutput | None = None
    verdict: _Verdict | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.prompt.uid}/{self.sample_index}"


class SingleTurnGenerator:
    """Generator over skyrl-gym environments that answer once.

    Environments run in threads (environment.skyrl_gym.max_env_workers of them) because they may block. An exception in
    one, a missing reward, or a call longer than environment.timeout_seconds fails that trajectory only. What is wrong
    for good stops the step: a ConfigurationError (unknown environment, missing file), a reward that is NaN, infinite
    or no number (RewardError).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", client: InferenceClient, config: SkyRLConfig) -> None:
        self._tokenizer = tokenizer
        self._client = client
        self._config = config
        self._template = chat_template(config.generator.chat_template)
        self._compose = RewardComposer(config.environment.rewards)

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
        """See Generator. Raises RolloutError naming the prompt when one is longer than generator.max_input_length."""
        environment = self._config.environment
        trajectories = [
            _Trajectory(prompt=prompt, sample_index=index, messages=[dict(message) for message in prompt.messages])
            for prompt in prompts
            for index in range(n_samples)
        ]
        with BlockingPool(environment.skyrl_gym.max_env_workers, environment.timeout_seconds) as pool:
            try:
                await _in_order(self._open(pool, trajectory) for trajectory in trajectories)
                self._tokenize(trajectories)
                started = [t for t in trajectories if t.error is None]
                seeds = [_seed(run_seed, step, t, purpose) for t in started]
                texts = await self._respond(started, seeds, sampling)
                await _in_order(self._judge(pool, t, text) for t, text in zip(started, texts, strict=True))
            finally:
                await _in_order(self._close(pool, trajectory) for trajectory in trajectories)
        rollouts = [self._rollout(trajectory) for trajectory in trajectories]
        try:
            check_failures(rollouts, self._config.trainer.max_failed_fraction)
        except RolloutError as error:
            failed = next(t for t, rollout in zip(trajectories, rollouts, strict=True) if rollout.error is not None)
            error.sample = self._sample(failed)
            raise
        return rollouts

    async def _open(self, pool: BlockingPool, trajectory: _Trajectory) -> None:
        """Make the environment and let it prepare the prompt."""
        prompt = trajectory.prompt
        # SkyRL's environments read the turn limit from here.
        extras = {**prompt.env_extras, "max_turns": self._config.generator.max_turns}
        settings = getattr(self._config.environment.skyrl_gym, prompt.env_class, None)

        def work() -> tuple[Environment, Conversation]:
            environment = make_environment(prompt.env_class, extras, settings)
            messages, _ = environment.init([dict(message) for message in prompt.messages])
            return environment, messages

        opened = await self._guarded(pool, trajectory, work)
        if opened is not None:
            trajectory.environment, trajectory.messages = opened

    async def _judge(self, pool: BlockingPool, trajectory: _Trajectory, text: str) -> None:
        """Let the environment judge the response, and close it."""
        # Taken out first: an environment that hangs is not to be closed as well.
        environment, trajectory.environment = trajectory.environment, None
        if environment is not None:
            trajectory.verdict = await self._guarded(
                pool, trajectory, partial(_verdict, environment, text, trajectory, self._compose)
            )

    async def _close(self, pool: BlockingPool, trajectory: _Trajectory) -> None:
        """Close an environment that was opened and never judged."""
        if trajectory.environment is not None:
            await self._guarded(pool, trajectory, trajectory.environment.close)

    async def _guarded(
        self, pool: BlockingPool, trajectory: _Trajectory, work: Callable[[], _ResultT]
    ) -> _ResultT | None:
        """What `work` returns, or None when it failed and the trajectory with it."""
        try:
            return await pool.run(work)
        except (ConfigurationError, RewardError) as error:
            error.sample = self._sample(trajectory)
            raise
        except Exception as error:  # an environment may raise anything
            trajectory.error = f"{type(error).__name__}: {error}"
            log.warning("trajectory %s failed: %s", trajectory.name, trajectory.error)
            return None

    def _sample(self, trajectory: _Trajectory) -> dict[str, str]:
        """The trajectory in words, for whoever looks into a failure."""
        prompt, output = trajectory.prompt, trajectory.output
        sample = {"uid": f"{prompt.uid}, sample {trajectory.sample_index}", "data source": prompt.data_source}
        sample["prompt"] = "\n".join(f"{message['role']}: {message['content']}" for message in trajectory.messages)
        if output is not None:
            sample["response"] = str(self._tokenizer.decode(output.token_ids.tolist()))
        if trajectory.error is not None:
            sample["error"] = trajectory.error
        return sample

    def _tokenize(self, trajectories: Sequence[_Trajectory]) -> None:
        """Prompt ids of every trajectory; equal chats are tokenized once."""
        known: dict[str, IntArray] = {}
        limit = self._config.generator.max_input_length
        for trajectory in trajectories:
            try:
                trajectory.prompt_ids = self._prompt_ids(trajectory.messages, known)
            except ConfigurationError:
                raise
            except Exception as error:  # templates raise what they like about chats they were not written for
                trajectory.error = f"no prompt from the environment's chat: {type(error).__name__}: {error}"
                trajectory.prompt_ids = self._prompt_ids([dict(m) for m in trajectory.prompt.messages], known)
            if limit is not None and len(trajectory.prompt_ids) > limit:
                raise RolloutError(
                    f"the prompt of {trajectory.prompt.uid} has {len(trajectory.prompt_ids)} tokens after its "
                    f"environment prepared it, more than generator.max_input_length={limit}: raise the limit or lower "
                    "trainer.max_prompt_length"
                )

    def _prompt_ids(self, messages: Conversation, known: dict[str, IntArray]) -> IntArray:
        key = json.dumps(messages, sort_keys=True)
        if key not in known:
            ids = prompt_token_ids(
                self._tokenizer,
                messages,
                chat_template=self._template,
                chat_template_kwargs=self._config.generator.chat_template_kwargs,
            )
            known[key] = np.asarray(ids, dtype=np.int64)
        return known[key]

    async def _respond(
        self, trajectories: Sequence[_Trajectory], seeds: Sequence[int], sampling: SamplingParams
    ) -> list[str]:
        """Let the policy answer; returns the responses' texts."""
        if not trajectories:
            return []
        requests = [
            GenerationRequest(prompt_ids=trajectory.prompt_ids, seed=seed, session_id=trajectory.name)
            for trajectory, seed in zip(trajectories, seeds, strict=True)
        ]
        outputs = await self._client.generate(requests, sampling)
        for trajectory, output in zip(trajectories, outputs, strict=True):
            trajectory.output = output
        texts: list[str] = self._tokenizer.batch_decode(
            [output.token_ids.tolist() for output in outputs], skip_special_tokens=True
        )
        return texts

    def _rollout(self, trajectory: _Trajectory) -> Rollout:
        output, verdict = trajectory.output, trajectory.verdict
        if output is None or verdict is None:
            return _failed_rollout(trajectory)
        response = Response.sampled(output)
        if verdict.postprocessed_action is not None:
            response = replace_action(response, verdict.postprocessed_action, self._tokenizer)
        cut = output.stop_reason != "stop"
        token_rewards = np.zeros(max(len(response.token_ids), 1), dtype=np.float32)
        token_rewards[-1] = 0.0 if cut and self._config.generator.zero_reward_on_non_stop else verdict.reward
        masked_out = cut and self._config.generator.apply_overlong_filtering
        return Rollout(
            uid=trajectory.prompt.uid,
            sample_index=trajectory.sample_index,
            prompt_ids=trajectory.prompt_ids,
            response_ids=response.token_ids,
            loss_mask=np.zeros_like(response.sampled_mask) if masked_out else response.sampled_mask,
            rollout_logprobs=response.logprobs,
            token_rewards=token_rewards,
            stop_reason=output.stop_reason,
            policy_versions=(output.policy_version,),
            data_source=trajectory.prompt.data_source,
            env_class=trajectory.prompt.env_class,
            env_metrics=verdict.metrics,
        )


async def _in_order(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end; then raise the first failure in their order, whichever came first in time."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if outcome is not None:
            raise outcome


def _verdict(environment: Environment, text: str, trajectory: _Trajectory, compose: RewardComposer) -> _Verdict:
    """Step, reward, and close the environment. Runs in a thread."""
    try:
        answer = environment.step(text)
        combined = compose(answer.get("reward"), text, trajectory.prompt, trajectory.name)
        reward = combined.total or 0.0
        if abs(reward) > float(np.finfo(np.float32).max):
            raise RewardError(f"the environment of {trajectory.name} returned {reward} as reward; it must fit float32")
        action = answer.get("postprocessed_action")
        if action is not None and not isinstance(action, str):
            raise TypeError(f"postprocessed_action must be a string, got {type(action).__name__}")
        return _Verdict(
            reward=reward,
            metrics={**_numbers(environment.get_metrics(), trajectory.name), **combined.metrics},
            postprocessed_action=action,
        )
    finally:
        environment.close()


def _failed_rollout(trajectory: _Trajectory) -> Rollout:
    """A trajectory without a verdict: its tokens are kept for the record, masked out, and carry no reward."""
    output = trajectory.output
    response_ids = np.zeros(0, dtype=np.int64) if output is None else output.token_ids
    return Rollout(
        uid=trajectory.prompt.uid,
        sample_index=trajectory.sample_index,
        prompt_ids=trajectory.prompt_ids,
        response_ids=response_ids,
        loss_mask=np.zeros_like(response_ids),
        rollout_logprobs=np.zeros(0, dtype=np.float32) if output is None else output.logprobs,
        token_rewards=np.zeros(max(len(response_ids), 1), dtype=np.float32),
        stop_reason="error",
        policy_versions=() if output is None else (output.policy_version,),
        data_source=trajectory.prompt.data_source,
        env_class=trajectory.prompt.env_class,
        error=trajectory.error or "the environment gave no verdict",
    )


def check_failures(rollouts: Sequence[Rollout], max_failed_fraction: float) -> None:
    """Raises RolloutError with counts and the first error when too large a share of the trajectories failed."""
    failed = [rollout for rollout in rollouts if rollout.error is not None]
    if len(failed) > max_failed_fraction * len(rollouts):
        first = failed[0]
        raise RolloutError(
            f"{len(failed)} of {len(rollouts)} trajectories failed, more than trainer.max_failed_fraction="
            f"{max_failed_fraction:g} allows; the first was {first.uid}/{first.sample_index}: {first.error}"
        )


def _numbers(metrics: Mapping[str, Any], owner: str) -> dict[str, float]:
    """The numeric entries (true and false count as 1 and 0); the rest cannot be averaged.

    Nor can NaN and the infinities: they are left out, and the log says so. A trajectory is not lost over a statistic.
    """
    kinds = (int, float, np.integer, np.floating, np.bool_)
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, kinds)}
    odd = sorted(name for name, value in numbers.items() if not math.isfinite(value))
    if odd:
        log.warning("trajectory %s: its environment's %s is not finite; left out", owner, ", ".join(odd))
    return {name: value for name, value in numbers.items() if name not in odd}


def _seed(run_seed: int, step: int, trajectory: _Trajectory, purpose: Purpose) -> int:
    uid, index = trajectory.prompt.uid, trajectory.sample_index
    if purpose == "eval":
        return derive_seed(run_seed, "eval", uid, index)
    return derive_seed(run_seed, "rollout", step, uid, index)
