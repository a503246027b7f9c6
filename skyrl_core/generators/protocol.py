"""What a generator needs from inference. Implementations live in skyrl_core.inference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import FloatArray, IntArray, Prompt, Rollout, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt for the engine: prompt_ids[P] and the sample's own seed.

    `session_id` is equal for all turns of one trajectory, so that routed engines can keep its cache.
    """

    prompt_ids: IntArray
    seed: int
    session_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """One completion: token_ids[R] (with the end-of-turn token when it was sampled), logprobs[R] under the sampling
    distribution or None, why it ended, and the weight version that sampled it."""

    token_ids: IntArray
    logprobs: FloatArray | None
    stop_reason: StopReason
    policy_version: int


class InferenceClient(Protocol):
    """Tokens in, tokens out, over one or more engines.

    Every method raises EngineUnavailableError when an engine died and GenerationTimeoutError past its time limit.
    """

    async def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[GenerationOutput]:
        """Completions in the order of the requests. Same requests, weights and engine count: same outputs."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free the accelerator for the trainer: level 1 keeps weights on the host, level 2 drops them."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the accelerator back; `tags` limits it to "weights" or "kv_cache"."""
        ...

    async def pause(self) -> None:
        """Hold new requests until resume()."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, buckets: Sequence[Any], version: int) -> None:
        """Load every parameter from `buckets` into all engines, drop caches, then report `version`.

        Each bucket is a mapping name → tensor, or a handle the transport resolves to one (a Ray object reference).
        """
        ...

    async def versions(self) -> list[int | None]:
        """The weight version each engine holds; None while an update is half done."""
        ...

    async def health(self) -> list[str | None]:
        """Per engine: None when it answers, else what is wrong."""
        ...


Purpose = Literal["rollout", "eval"]


class Generator(Protocol):
    """Turns prompts into trajectories. Implementations stand beside this file, one per kind of trajectory."""

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
        """`n_samples` trajectories per prompt: prompt after prompt, the samples of a prompt side by side.

        Seeds derive from (run_seed, step, prompt uid, sample index) for "rollout" and from (run_seed, prompt uid,
        sample index) for "eval". A failing environment fails its own trajectory (`Rollout.error`); RolloutError when
        more than trainer.max_failed_fraction of them failed.
        """
        ...
