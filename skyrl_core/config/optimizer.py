"""`trainer.*.optimizer_config` and `trainer.*.fsdp_config`: AdamW, its schedule, and sharding."""

from typing import Annotated, Any, Literal

from pydantic import Field

from skyrl_core.config.section import Count, NonNegative, Pair, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
"""Names of transformers.SchedulerType."""


class OptimizerConfig(Section):
    """`trainer.policy.optimizer_config`, `trainer.critic.optimizer_config`."""

    lr: NonNegative = Field(1e-6, description="learning rate")
    adam_betas: Pair[Beta] = Field((0.9, 0.999), description="AdamW's two betas")
    weight_decay: NonNegative = Field(1e-2, description="AdamW's decoupled weight decay")
    max_grad_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=True)] = Field(
        1.0, description="gradients are scaled down to this L2 norm; .inf to leave them"
    )
    offload_after_step: bool = Field(True, description="colocated: move optimizer state to the host after a step")
    num_warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="optimizer steps of warm-up")
    scheduler: Scheduler = Field("constant_with_warmup", description="learning-rate schedule (transformers' names)")


class MixedPrecisionConfig(Section):
    """`trainer.*.fsdp_config.mixed_precision`."""

    param_dtype: str = Field("bf16", description="parameters in forward and backward")
    reduce_dtype: str = Field("fp32", description="gradient reduction")
    buffer_dtype: str = Field("fp32", description="buffers")


class FSDPConfig(Section):
    """`trainer.*.fsdp_config`: PyTorch's fully_shard."""

    cpu_offload: bool = Field(False, description="keep parameters and optimizer state on the host")
    reshard_after_forward: bool | Count = Field(
        True, description="free gathered parameters after the forward pass; a number: keep them in groups of that size"
    )
    fsdp_size: int = Field(-1, description="ranks that share one copy of the state; -1 for all")
    mixed_precision: MixedPrecisionConfig | None = Field(
        None, description="number formats; null derives them from bf16"
    )
    wrap_policy: dict[str, Any] = Field({}, description="which modules to shard; {} takes the model's layer class")
