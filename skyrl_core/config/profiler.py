"""`trainer.policy.torch_profiler_config`: torch.profiler on policy training steps."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_core.config.section import Count, Items, PathText, Section

Rank = Annotated[int, Field(ge=0)]


class TorchProfilerConfig(Section):
    """`trainer.policy.torch_profiler_config`."""

    enable: bool = Field(False, description="profile")
    ranks: Items[Rank] = Field((0,), description="ranks to profile")
    save_path: PathText | None = Field(None, description="local absolute folder for traces")
    skip_first: Rank = Field(10, description="steps before the schedule begins")
    wait: Rank = Field(0, description="idle steps of a cycle")
    warmup: Rank = Field(1, description="warm-up steps of a cycle")
    active: Count = Field(1, description="recorded steps of a cycle")
    repeat: Rank = Field(1, description="cycles; 0 for ever")
    activities: Items[Literal["cpu", "cuda"]] = Field(("cpu", "cuda"), description="what to record")
    record_shapes: bool = Field(True, description="record tensor shapes")
    profile_memory: bool = Field(False, description="record memory")
    with_stack: bool = Field(True, description="record stacks; needed for export_type=stacks")
    with_flops: bool = Field(False, description="estimate FLOPs")
    with_modules: bool = Field(False, description="record module names")
    export_type: Literal["chrome_trace", "stacks"] = Field("chrome_trace", description="form of the output")
