"""`trainer.fully_async` and `trainer.mtp`: asynchronous training, and multi-token prediction heads."""

from typing import Annotated

from pydantic import Field

from skyrl_core.config.section import Count, NonNegative, Section


class FullyAsyncConfig(Section):
    """`trainer.fully_async`."""

    enabled: bool = Field(False, description="generate while training")
    max_staleness_steps: Annotated[int, Field(ge=0)] = Field(
        4, description="a trajectory may be this many steps older than the update it is used in"
    )
    num_parallel_generation_workers: Count = Field(768, description="prompt groups in generation at once")
    sample_full_batch: bool = Field(False, description="go on until a minibatch is full of groups with signal")
    clear_kv_cache_on_weight_sync: bool = Field(False, description="drop engine caches when weights change")
    simulate_training: bool = Field(False, description="run generation against a trainer that only waits")
    simulate_training_step_seconds: NonNegative = Field(30.0, description="seconds a simulated step takes")
    simulate_weight_sync_seconds: NonNegative = Field(0.0, description="seconds a simulated weight sync takes")


class MTPConfig(Section):
    """`trainer.mtp`."""

    enabled: bool = Field(False, description="train draft heads and decode speculatively with them")
    num_speculative_tokens: Count = Field(1, description="tokens drafted per step")
    loss_weight: NonNegative = Field(0.1, description="weight of the draft loss")
