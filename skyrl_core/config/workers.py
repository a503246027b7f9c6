"""`trainer.policy`, `trainer.ref`, `trainer.critic`: the three models and how each is trained or held."""

from typing import Any

from pydantic import Field

from skyrl_core.config.megatron import MegatronConfig
from skyrl_core.config.model import ModelConfig
from skyrl_core.config.optimizer import FSDPConfig, OptimizerConfig
from skyrl_core.config.profiler import TorchProfilerConfig
from skyrl_core.config.section import Count, Section


class PolicyConfig(Section):
    """`trainer.policy`: the model that learns."""

    model: ModelConfig = Field(ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"), description="the model")
    optimizer_config: OptimizerConfig = Field(OptimizerConfig(), description="its optimizer")
    fsdp_config: FSDPConfig = Field(FSDPConfig(), description="its sharding with strategy=fsdp")
    sequence_parallel_size: Count = Field(1, description="ranks that share each sequence (Ulysses)")
    use_torch_compile: bool = Field(False, description="compile the computation of log-probabilities")
    record_memory: bool = Field(False, description="write snapshots of CUDA memory")
    torch_profiler_config: TorchProfilerConfig = Field(TorchProfilerConfig(), description="profiler")
    megatron_config: MegatronConfig = Field(MegatronConfig(), description="its parallelism with strategy=megatron")
    model_config_kwargs: dict[str, Any] = Field({}, description="changes to the model's Hugging Face configuration")
    language_model_only: bool = Field(False, description="leave out the vision encoder of a multimodal model")
    inference_only_init: bool = Field(False, description="no optimizer: the policy only computes and syncs weights")


class RefConfig(Section):
    """`trainer.ref`: the model that KL is measured against. Built only when KL is used."""

    model: ModelConfig = Field(ModelConfig(), description="the model; a path of null takes the policy's")
    sequence_parallel_size: Count = Field(1, description="ranks that share each sequence (Ulysses)")
    fsdp_config: FSDPConfig = Field(FSDPConfig(), description="its sharding with strategy=fsdp")
    megatron_config: MegatronConfig = Field(MegatronConfig(), description="its parallelism with strategy=megatron")
    model_config_kwargs: dict[str, Any] = Field({}, description="changes to the model's Hugging Face configuration")
    language_model_only: bool = Field(False, description="leave out the vision encoder of a multimodal model")


class CriticConfig(Section):
    """`trainer.critic`: the model that predicts values. Built only when its path is set."""

    model: ModelConfig = Field(ModelConfig(), description="the model")
    optimizer_config: OptimizerConfig = Field(OptimizerConfig(lr=5e-6), description="its optimizer")
    fsdp_config: FSDPConfig = Field(FSDPConfig(), description="its sharding with strategy=fsdp")
    sequence_parallel_size: Count = Field(1, description="ranks that share each sequence (Ulysses)")
    model_config_kwargs: dict[str, Any] = Field({}, description="changes to the model's Hugging Face configuration")
