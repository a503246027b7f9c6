"""Keys that SkyRL users still write and that stand elsewhere now, or nowhere."""

ALIASES = {
    # SkyRL's newest tree has a section trainer.eval and still takes the flat keys, which are ours.
    "trainer.eval.interval": "trainer.eval_interval",
    "trainer.eval.before_train": "trainer.eval_before_train",
    "trainer.eval.batch_size": "trainer.eval_batch_size",
    "trainer.eval.dump_results": "trainer.dump_eval_results",
    "trainer.eval.num_logger_samples": "trainer.num_logger_eval_samples",
    # The name before "packing" became "no padding"; SkyRL takes both.
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
}
"""Other spellings that SkyRL accepts, and so do we: the value is taken as the right-hand key's."""

IGNORED = {"generator.inference_engine.async_engine": True}
"""Removed keys that SkyRL accepts at one value, which says what is always so. Any other value is refused."""

_ENGINE = "generator.inference_engine"

MOVED = {
    "generator.num_inference_engines": f"{_ENGINE}.num_engines",
    "generator.backend": f"{_ENGINE}.backend",
    "generator.model_dtype": f"{_ENGINE}.model_dtype",
    "generator.run_engines_locally": f"{_ENGINE}.run_engines_locally",
    "generator.weight_sync_backend": f"{_ENGINE}.weight_sync_backend",
    "generator.weight_transfer_threshold_cuda_ipc_GB": f"{_ENGINE}.weight_transfer_threshold_cuda_ipc_GB",
    "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": f"{_ENGINE}.pipeline_parallel_size",
    "generator.inference_engine_expert_parallel_size": f"{_ENGINE}.expert_parallel_size",
    "generator.inference_engine_data_parallel_size": f"{_ENGINE}.data_parallel_size",
    "generator.vllm_v1_disable_multiproc": f"{_ENGINE}.vllm_v1_disable_multiproc",
    "generator.enable_prefix_caching": f"{_ENGINE}.enable_prefix_caching",
    "generator.enable_chunked_prefill": f"{_ENGINE}.enable_chunked_prefill",
    "generator.max_num_batched_tokens": f"{_ENGINE}.max_num_batched_tokens",
    "generator.max_num_seqs": f"{_ENGINE}.max_num_seqs",
    "generator.enforce_eager": f"{_ENGINE}.enforce_eager",
    "generator.fully_sharded_loras": f"{_ENGINE}.fully_sharded_loras",
    "generator.enable_ray_prometheus_stats": f"{_ENGINE}.enable_ray_prometheus_stats",
    "generator.gpu_memory_utilization": f"{_ENGINE}.gpu_memory_utilization",
    "generator.served_model_name": f"{_ENGINE}.served_model_name",
    "generator.engine_init_kwargs": f"{_ENGINE}.engine_init_kwargs",
    "generator.external_proxy_url": f"{_ENGINE}.external_proxy_url",
    "generator.external_server_urls": f"{_ENGINE}.external_server_urls",
    "generator.remote_inference_engine_urls": f"{_ENGINE}.external_server_urls",
    f"{_ENGINE}.remote_urls": f"{_ENGINE}.external_server_urls",
    f"{_ENGINE}.fp8_weight_sync_mode": f"{_ENGINE}.serialized_weight_sync_mode",
    "generator.model_name": "trainer.policy.model.path",
    "generator.step_wise_training": "generator.step_wise_trajectories",
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.use_abs_kl": "trainer.algorithm.kl_estimator_type",
    "trainer.algorithm.use_kl_estimator_k3": "trainer.algorithm.kl_estimator_type",
    "trainer.algorithm.kl_target": "trainer.algorithm.kl_ctrl.kl_target",
    "trainer.algorithm.init_kl_coef": "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.normalize_reward": "trainer.algorithm.advantage_batch_normalize",
    "trainer.policy.deepspeed_config": "trainer.policy.fsdp_config",
    "trainer.ref.deepspeed_config": "trainer.ref.fsdp_config",
    "trainer.critic.deepspeed_config": "trainer.critic.fsdp_config",
    "trainer.algorithm.overlong_buffer_len": "trainer.algorithm.overlong_buffer.len",
    "trainer.algorithm.overlong_buffer_penalty_factor": "trainer.algorithm.overlong_buffer.penalty_factor",
    "trainer.target_modules": "trainer.policy.model.lora.target_modules",
    "environment.max_env_workers": "environment.skyrl_gym.max_env_workers",
}
"""Keys of earlier SkyRL versions and where their values belong now. Refused by name, so that no script half works."""

_ROPE = (
    "set generator.inference_engine.engine_init_kwargs.hf_overrides.rope_parameters and "
    "trainer.policy.model_config_kwargs.rope_parameters to the same value"
)
_HTTP = "engines are reached without an HTTP endpoint of the trainer's: remove it"
_REWARD_MODEL = "rewards come from environments, there is no reward model: remove it"

REMOVED = {
    "trainer.reward": _REWARD_MODEL,
    "trainer.use_orm_score": _REWARD_MODEL,
    "trainer.placement.colocate_critic_reward": _REWARD_MODEL,
    "trainer.placement.reward_num_nodes": _REWARD_MODEL,
    "trainer.placement.reward_num_gpus_per_node": _REWARD_MODEL,
    "generator.async_engine": "engines always work asynchronously: remove it",
    f"{_ENGINE}.async_engine": "engines always work asynchronously: remove it",
    "generator.enable_http_endpoint": _HTTP,
    "generator.http_endpoint_host": _HTTP,
    "generator.http_endpoint_port": _HTTP,
    f"{_ENGINE}.enable_http_endpoint": _HTTP,
    f"{_ENGINE}.http_endpoint_host": _HTTP,
    f"{_ENGINE}.http_endpoint_port": _HTTP,
    "generator.use_inference_http_server": _HTTP,
    "generator.inference_http_server_host": _HTTP,
    "generator.inference_http_server_port": _HTTP,
    "generator.override_existing_update_group": "the group for weight sync is managed by itself: remove it",
    f"{_ENGINE}.override_existing_update_group": "the group for weight sync is managed by itself: remove it",
    "trainer.rope_scaling": _ROPE,
    "trainer.rope_theta": _ROPE,
    "trainer.rope_parameters": _ROPE,
    "generator.rope_scaling": _ROPE,
    "generator.rope_theta": _ROPE,
    "generator.rope_parameters": _ROPE,
    f"{_ENGINE}.rope_scaling": _ROPE,
    f"{_ENGINE}.rope_theta": _ROPE,
    f"{_ENGINE}.rope_parameters": _ROPE,
}
"""Keys that are gone, with what to do instead."""

ENVIRONMENT_FLAGS = {
    "_SKYRL_USE_NEW_INFERENCE": "there is one inference layer and nothing to choose: unset it",
    "SKYRL_RAY_PG_TIMEOUT_IN_S": "unset it and set trainer.placement.timeout_seconds",
}
"""Environment variables that configure SkyRL. They would be ignored silently, so they are refused."""
