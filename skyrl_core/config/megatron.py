"""`trainer.*.megatron_config`: Megatron-Core's parallelism and pass-through parameters."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from skyrl_core.config.section import Count, NonNegative, Section

_OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
_TRANSFORMER_DEFAULTS: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False,
}


class MegatronDDPConfig(Section):
    """`trainer.*.megatron_config.ddp_config`."""

    grad_reduce_in_fp32: bool = Field(True, description="reduce gradients in fp32")
    overlap_grad_reduce: bool = Field(False, description="overlap gradient reduction with the backward pass")
    overlap_param_gather: bool = Field(False, description="overlap parameter gathering with the forward pass")
    fp8_param_gather: bool = Field(False, description="gather parameters in FP8")
    reuse_grad_buf_for_mxfp8_param_ag: bool = Field(False, description="gather MXFP8 parameters in the gradient buffer")
    average_in_collective: bool = Field(True, description="average within the collective")


class MegatronHFExportConfig(Section):
    """`trainer.*.megatron_config.hf_export_config`."""

    distributed_save: bool = Field(False, description="let several ranks write Hugging Face exports")
    save_every_n_ranks: Count = Field(1, description="every n-th rank writes")


class MegatronLoraConfig(Section):
    """`trainer.*.megatron_config.lora_config`."""

    lora_type: Literal["lora", "canonical_lora"] = Field("lora", description="kind of adapter")
    merge_lora: bool = Field(True, description="merge adapters into the weights when syncing")


class MegatronConfig(Section):
    """`trainer.policy.megatron_config`, `trainer.ref.megatron_config`."""

    tensor_model_parallel_size: Count = Field(1, description="ranks that share each layer")
    pipeline_model_parallel_size: Count = Field(1, description="pipeline stages")
    context_parallel_size: Count = Field(1, description="ranks that share each sequence")
    expert_model_parallel_size: Count = Field(1, description="ranks that share the experts")
    expert_tensor_parallel_size: Count | None = Field(None, description="ranks that share each expert")
    moe_token_dispatcher_type: str = Field("alltoall", description="how tokens reach their experts")
    moe_router_load_balancing_type: str = Field("none", description="load-balancing loss of the router")
    moe_aux_loss_coeff: NonNegative = Field(0.0, description="coefficient of that loss")
    moe_grouped_gemm: bool = Field(True, description="compute experts in one grouped matrix product")
    moe_router_score_function: str | None = Field(None, description="score function of the router")
    moe_router_enable_expert_bias: bool | None = Field(None, description="per-expert bias in the router")
    moe_enable_routing_replay: bool = Field(False, description="replay the engines' expert choices in training")
    moe_per_layer_logging: bool = Field(False, description="log expert metrics for each layer")
    moe_router_dtype: str = Field("fp32", description="number format of the router")
    ddp_config: MegatronDDPConfig = Field(MegatronDDPConfig(), description="data parallelism")
    hf_export_config: MegatronHFExportConfig = Field(MegatronHFExportConfig(), description="Hugging Face exports")
    lora_config: MegatronLoraConfig = Field(MegatronLoraConfig(), description="adapters")
    optimizer_config_kwargs: dict[str, Any] = Field(
        _OPTIMIZER_DEFAULTS,
        description="parameters for Megatron's OptimizerConfig; those not given keep their defaults",
    )
    fp8: str | None = Field(None, description="FP8 format of linear layers")
    fp8_recipe: str | None = Field(None, description="FP8 scaling recipe")
    fp8_param: bool | None = Field(None, description="keep parameters in FP8")
    fp8_amax_compute_algo: str | None = Field(None, description="reduction of the FP8 maximum history")
    transformer_config_kwargs: dict[str, Any] = Field(
        _TRANSFORMER_DEFAULTS,
        description="parameters for Megatron's TransformerConfig; those not given keep their defaults",
    )
    empty_cuda_cache: bool | None = Field(True, description="empty the CUDA cache before the optimizer step")
    model_config_kwargs: dict[str, Any] = Field({}, description="changes to the model's Hugging Face configuration")
    dist_ckpt_optim_fully_reshardable: bool = Field(False, description="checkpoints that fit any parallelism")
    freeze_moe_router: bool = Field(False, description="do not train the router")
    mtp_num_layers: Annotated[int, Field(ge=0)] | None = Field(None, description="multi-token prediction heads")
    mtp_loss_weight: NonNegative = Field(0.1, description="weight of their loss")
    mtp_loss_chunk_size: Count | None = Field(1024, description="tokens per chunk of their loss; null for all at once")
    mtp_loss_topk: Count | None = Field(None, description="distil only this many of the teacher's tokens")
    async_dist_ckpt_save: bool = Field(False, description="write checkpoints in the background")
    async_dist_ckpt_strategy: str = Field("mcore", description="implementation of background writes")
    async_save_prestage_to_cpu: bool = Field(False, description="copy shards to the host before a background write")

    @field_validator("optimizer_config_kwargs", mode="after")
    @classmethod
    def _keep_optimizer_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        return _OPTIMIZER_DEFAULTS | given

    @field_validator("transformer_config_kwargs", mode="after")
    @classmethod
    def _keep_transformer_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        return _TRANSFORMER_DEFAULTS | given
