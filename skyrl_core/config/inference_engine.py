"""`generator.inference_engine`: the engines that sample."""

from typing import Annotated, Any, Literal

from pydantic import Field

from skyrl_core.config.section import Count, Items, PathText, Positive, Section, ours


class DeltaWeightSyncConfig(Section):
    """`generator.inference_engine.delta_weight_sync`: weight changes through shared storage."""

    sync_dir: PathText = Field(description="folder or URI where changes are published")
    local_checkpoint_dir: PathText | None = Field(None, description="receiver's folder for patched checkpoints")
    publish_staging_dir: PathText | None = Field(None, description="trainer's folder for files to upload")
    max_file_size_in_gb: Positive = Field(1.0, description="largest payload file, in GB")
    cloud_download_workers: Count = Field(4, description="files downloaded at once")
    publish_num_workers: Count | None = Field(None, description="threads that compute changes")
    checkpoint_load_format: Literal["vllm_multi_thread_safetensors", "vllm_fastsafetensors"] = Field(
        "vllm_multi_thread_safetensors", description="how the receiver loads"
    )
    multi_thread_safetensors_max_workers: Count = Field(8, description="threads of that loader")


class InferenceEngineConfig(Section):
    """`generator.inference_engine`."""

    model_dtype: str = Field("bfloat16", description="number format of the engine's weights, and of weights sent to it")
    serialized_weight_sync_mode: str | None = Field(None, description="send quantised weights: blockwise, or null")
    run_engines_locally: bool = Field(True, description="start engines in this Ray cluster")
    num_engines: Count = Field(1, description="engines to start")
    backend: Literal["vllm", "transformers"] = Field("vllm", description="engine implementation (transformers is ours)")
    weight_sync_backend: Literal["nccl", "gloo", "delta"] = Field(
        "nccl", description="transport of weights; without GPUs gloo stands in for nccl"
    )
    weight_transfer_threshold_cuda_ipc_GB: Positive = Field(1.0, description="size of a bucket of weights, in GB")
    delta_weight_sync: DeltaWeightSyncConfig | None = Field(None, description="for weight_sync_backend=delta")
    tensor_parallel_size: Count = Field(1, description="devices that share each layer")
    pipeline_parallel_size: Count = Field(1, description="pipeline stages")
    expert_parallel_size: Count = Field(1, description="devices that share the experts")
    data_parallel_size: Count = Field(1, description="copies of the model within an engine")
    vllm_v1_disable_multiproc: bool = Field(True, description="run vLLM's core in the engine's own process")
    enable_prefix_caching: bool = Field(True, description="reuse the cache of equal prompt beginnings")
    enable_chunked_prefill: bool = Field(True, description="process long prompts in pieces")
    enable_return_routed_experts: bool = Field(False, description="return expert choices for replay in training")
    max_num_batched_tokens: Count = Field(8192, description="vLLM: tokens per batch")
    enforce_eager: bool = Field(False, description="vLLM: no CUDA graphs")
    fully_sharded_loras: bool = Field(False, description="vLLM: shard adapters fully")
    enable_ray_prometheus_stats: bool = Field(True, description="vLLM: export metrics through Ray")
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="vLLM: share of device memory to take"
    )
    offload_kv_for_weight_sync: bool = Field(False, description="move the cache to the host during weight sync")
    use_expandable_segments: bool = Field(False, description="PyTorch's expandable CUDA segments in engine processes")
    max_num_seqs: Count = Field(1024, description="vLLM: sequences per batch")
    served_model_name: str | None = Field(None, description="model name at the HTTP endpoint; null: the model's path")
    distributed_executor_backend: Literal["ray", "mp"] = Field("ray", description="vLLM: how its workers are started")
    language_model_only: bool = Field(False, description="leave out the vision encoder of a multimodal model")
    engine_init_kwargs: dict[str, Any] = Field({}, description="further parameters of the engine, handed over as is")
    speculative_config: dict[str, Any] | None = Field(None, description="vLLM: speculative decoding")
    external_proxy_url: str | None = Field(None, description="URL of a router in front of external servers")
    external_server_urls: Items[str] | None = Field(None, description="URLs of external servers")
    enable_pd: bool = Field(False, description="separate engines for prefill and decode")
    num_prefill: Annotated[int, Field(ge=0)] = Field(0, description="engines that prefill")
    router_init_kwargs: dict[str, Any] = Field({}, description="parameters of the router, handed over as is")
    timeout_seconds: Positive = Field(600.0, description=ours("longest wait for one call to an engine"))
    max_batch_size: Count = Field(256, description=ours("transformers: rows decoded together"))

    @property
    def total_ranks(self) -> int:
        """Devices (on CPU: ranks) that all engines take together."""
        return self.num_engines * self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
