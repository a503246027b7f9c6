"""`trainer.*.model`: which model, and how its weights are adapted."""

from typing import Annotated

from pydantic import Field

from skyrl_core.config.section import Count, Items, PathText, Positive, Section


class LoraConfig(Section):
    """`trainer.*.model.lora`: low-rank adapters in place of full training."""

    rank: Annotated[int, Field(ge=0)] = Field(0, description="rank of the adapters; 0 trains all weights")
    alpha: Count = Field(16, description="scale of the adapters")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout in the adapters")
    lora_sync_path: PathText = Field("/tmp/skyrl_lora_sync", description="folder through which adapters are synced")
    target_modules: str | Items[str] = Field("all-linear", description="modules that get adapters")
    exclude_modules: str | Items[str] | None = Field(None, description="modules that get none")
    init_method: str = Field("kaiming", description="initial values of the adapters")
    share_expert_adapters: bool = Field(True, description="one adapter for all experts of a layer on a rank")
    max_loras: Count = Field(1, description="vLLM: adapters active in one batch")
    max_cpu_loras: Count | None = Field(None, description="vLLM: adapters kept on the host; null means max_loras")


class ExpertMxfp8Config(Section):
    """`trainer.*.model.expert_mxfp8`: MXFP8 for routed experts (Megatron)."""

    enabled: bool = Field(False, description="use MXFP8 experts")
    training: bool = Field(True, description="in the trainer")
    rollout: bool = Field(True, description="in the engines")
    persistent: bool = Field(False, description="keep the parameters in MXFP8")


class FakeInt4QatConfig(Section):
    """`trainer.*.model.fake_int4_qat`: quantisation-aware training of experts for INT4 engines (Megatron)."""

    enabled: bool = Field(False, description="fake-quantise expert weights in the forward pass")
    group_size: Count = Field(32, description="weights per scale")
    symmetric: bool = Field(True, description="symmetric code range")
    scale_divisor: Positive = Field(7.5, description="scale = largest magnitude / this")
    q_min: float = Field(-8.0, description="smallest code")
    bf16_base_path: PathText | None = Field(None, description="bf16 weights that the trainer loads; null: model.path")


class ModelConfig(Section):
    """`trainer.policy.model`, `trainer.ref.model`, `trainer.critic.model`."""

    path: PathText | None = Field(None, description="local model folder or Hugging Face name")
    lora: LoraConfig = Field(LoraConfig(), description="low-rank adapters")
    expert_mxfp8: ExpertMxfp8Config = Field(ExpertMxfp8Config(), description="MXFP8 experts")
    fake_int4_qat: FakeInt4QatConfig = Field(FakeInt4QatConfig(), description="INT4-aware training of experts")
