"""Defaults are SkyRL's: a table written from its dataclasses (skyrl/train/config/config.py), not from our models."""

import os
from typing import Any

import pytest

from skyrl_core.config import SkyRLConfig
from skyrl_core.config.values import value_at

HOME = os.path.expanduser("~")

TRAINER = {
    "placement.colocate_all": True,
    "placement.colocate_policy_ref": True,
    "placement.policy_num_nodes": 1,
    "placement.policy_num_gpus_per_node": 1,
    "placement.critic_num_nodes": 1,
    "placement.critic_num_gpus_per_node": 1,
    "placement.ref_num_nodes": 1,
    "placement.ref_num_gpus_per_node": 1,
    "use_expandable_segments": True,
    "sequence_parallel_backend": "ulysses",
    "strategy": "fsdp",
    "policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "policy.model.lora.rank": 0,
    "policy.model.lora.alpha": 16,
    "policy.model.lora.dropout": 0.0,
    "policy.model.lora.lora_sync_path": "/tmp/skyrl_lora_sync",
    "policy.model.lora.target_modules": "all-linear",
    "policy.model.lora.exclude_modules": None,
    "policy.model.lora.init_method": "kaiming",
    "policy.model.lora.max_loras": 1,
    "policy.model.lora.max_cpu_loras": None,
    "policy.model.fake_int4_qat.group_size": 32,
    "policy.model.fake_int4_qat.scale_divisor": 7.5,
    "policy.model.fake_int4_qat.q_min": -8.0,
    "policy.model.expert_mxfp8.enabled": False,
    "policy.model.expert_mxfp8.training": True,
    "policy.optimizer_config.lr": 1e-6,
    "policy.optimizer_config.adam_betas": (0.9, 0.999),
    "policy.optimizer_config.weight_decay": 1e-2,
    "policy.optimizer_config.max_grad_norm": 1.0,
    "policy.optimizer_config.offload_after_step": True,
    "policy.optimizer_config.num_warmup_steps": 0,
    "policy.optimizer_config.scheduler": "constant_with_warmup",
    "policy.fsdp_config.cpu_offload": False,
    "policy.fsdp_config.reshard_after_forward": True,
    "policy.fsdp_config.fsdp_size": -1,
    "policy.fsdp_config.mixed_precision": None,
    "policy.fsdp_config.wrap_policy": {},
    "policy.sequence_parallel_size": 1,
    "policy.use_torch_compile": False,
    "policy.record_memory": False,
    "policy.torch_profiler_config.enable": False,
    "policy.torch_profiler_config.ranks": (0,),
    "policy.torch_profiler_config.skip_first": 10,
    "policy.torch_profiler_config.activities": ("cpu", "cuda"),
    "policy.torch_profiler_config.export_type": "chrome_trace",
    "policy.megatron_config.tensor_model_parallel_size": 1,
    "policy.megatron_config.expert_tensor_parallel_size": None,
    "policy.megatron_config.moe_token_dispatcher_type": "alltoall",
    "policy.megatron_config.moe_router_dtype": "fp32",
    "policy.megatron_config.ddp_config.grad_reduce_in_fp32": True,
    "policy.megatron_config.ddp_config.average_in_collective": True,
    "policy.megatron_config.lora_config.merge_lora": True,
    "policy.megatron_config.optimizer_config_kwargs": {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    },
    "policy.megatron_config.transformer_config_kwargs": {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "gradient_accumulation_fusion": False,
    },
    "policy.megatron_config.empty_cuda_cache": True,
    "policy.megatron_config.mtp_loss_chunk_size": 1024,
    "policy.megatron_config.async_dist_ckpt_strategy": "mcore",
    "policy.model_config_kwargs": {},
    "policy.language_model_only": False,
    "policy.inference_only_init": False,
    "critic.model.path": None,
    "critic.optimizer_config.lr": 5e-6,
    "critic.optimizer_config.weight_decay": 1e-2,
    "critic.sequence_parallel_size": 1,
    "ref.sequence_parallel_size": 1,
    "ref.fsdp_config.cpu_offload": False,
    "mtp.enabled": False,
    "mtp.num_speculative_tokens": 1,
    "mtp.loss_weight": 0.1,
    "fully_async.enabled": False,
    "fully_async.max_staleness_steps": 4,
    "fully_async.num_parallel_generation_workers": 768,
    "fully_async.sample_full_batch": False,
    "fully_async.simulate_training_step_seconds": 30.0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_use_reentrant": False,
    "seed": 42,
    "resume_mode": "latest",
    "resume_path": None,
    "log_path": "/tmp/skyrl-logs",
    "ckpt_path": f"{HOME}/ckpts/",
    "max_ckpts_to_keep": -1,
    "ckpt_interval": 10,
    "hf_save_interval": -1,
    "export_path": f"{HOME}/exports/",
    "bf16": True,
    "epochs": 1,
    "max_training_steps": None,
    "update_epochs_per_batch": 1,
    "train_batch_size": 1024,
    "policy_mini_batch_size": 256,
    "critic_mini_batch_size": 256,
    "micro_train_batch_size_per_gpu": 1,
    "micro_forward_batch_size_per_gpu": 1,
    "max_tokens_per_microbatch": -1,
    "recompute_old_logprobs_per_minibatch": True,
    "update_ref_every_epoch": False,
    "remove_microbatch_padding": True,
    "eval_batch_size": 1024,
    "eval_before_train": True,
    "eval_interval": 5,
    "max_prompt_length": 512,
    "flash_attn": True,
    "disable_fast_tokenizer": False,
    "project_name": "skyrl",
    "logger": "wandb",
    "enable_ray_gpu_monitor": True,
    "tags": None,
    "dump_data_batch": False,
    "dump_eval_results": True,
    "print_example_interval": 1,
    "num_logger_eval_samples": -1,
    "num_logger_train_samples": -1,
    "log_example_interval": -1,
    "logprobs_chunk_size": 1024,
    "vocab_entropy_chunk_size": 0,
    "vocab_entropy_chunk_memory_mb": 512,
    "fused_lm_head_logprob": False,
    "fused_lm_head_logprob_backend": "torch",
}
ALGORITHM = {
    "advantage_estimator": "grpo",
    "kl_ctrl.type": "fixed",
    "kl_ctrl.kl_target": 0.1,
    "kl_ctrl.horizon": 10000,
    "kl_estimator_type": "k3",
    "use_kl_in_reward": False,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "use_entropy_loss": False,
    "entropy_loss_coef": 0.01,
    "advantage_batch_normalize": False,
    "value_head_prefix": "value_head",
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "grpo_norm_by_std": True,
    "zero_variance_filter": False,
    "zero_variance_filter_tol": 1e-6,
    "lambd": 1.0,
    "gamma": 1.0,
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "tis_imp_ratio_cap": -1.0,
    "use_tis": False,
    "value_clip": 0.2,
    "max_seq_len": None,
    "off_policy_correction.tis_ratio_type": None,
    "off_policy_correction.token_tis_ratio_clip_high": 2.0,
    "off_policy_correction.sequence_tis_ratio_clip_high": 5.0,
    "off_policy_correction.sequence_mask_metric": None,
    "off_policy_correction.geo_mask_high": 1.01,
    "off_policy_correction.geo_mask_low": 0.99,
    "off_policy_correction.product_mask_high": 2.0,
    "off_policy_correction.product_mask_low": 0.5,
    "off_policy_correction.outlier_token_is_threshold_low": None,
    "off_policy_correction.outlier_token_is_threshold_high": None,
    "off_policy_correction.token_mask_is_threshold_low": None,
    "off_policy_correction.token_mask_is_threshold_high": None,
    "sapo.tau_pos": 1.0,
    "sapo.tau_neg": 1.05,
    "dynamic_sampling.type": None,
    "dynamic_sampling.max_sample_batches": 30,
    "dynamic_sampling.min_replace_ratio": 0.3,
    "clip_cov.clip_ratio": 0.0002,
    "clip_cov.clip_cov_lb": 1.0,
    "clip_cov.clip_cov_ub": 5.0,
    "kl_cov.kl_cov_frac": 0.2,
    "kl_cov.ppo_kl_coef": 1.0,
    "cispo.cispo_eps_clip_low": 1.0,
    "cispo.cispo_eps_clip_high": 4.0,
    "cispo.cispo_anchor": "old",
    "dppo.dppo_type": "binary_tv",
    "dppo.delta_low": 0.2,
    "dppo.delta_high": 0.2,
}
ENGINE = {
    "model_dtype": "bfloat16",
    "serialized_weight_sync_mode": None,
    "run_engines_locally": True,
    "num_engines": 1,
    "backend": "vllm",
    "weight_sync_backend": "nccl",
    "weight_transfer_threshold_cuda_ipc_GB": 1.0,
    "delta_weight_sync": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "expert_parallel_size": 1,
    "data_parallel_size": 1,
    "vllm_v1_disable_multiproc": True,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "enable_return_routed_experts": False,
    "max_num_batched_tokens": 8192,
    "enforce_eager": False,
    "fully_sharded_loras": False,
    "enable_ray_prometheus_stats": True,
    "gpu_memory_utilization": 0.8,
    "offload_kv_for_weight_sync": False,
    "use_expandable_segments": False,
    "max_num_seqs": 1024,
    "served_model_name": None,
    "distributed_executor_backend": "ray",
    "language_model_only": False,
    "engine_init_kwargs": {},
    "speculative_config": None,
    "external_proxy_url": None,
    "external_server_urls": None,
    "enable_pd": False,
    "num_prefill": 0,
    "router_init_kwargs": {},
}
GENERATOR = {
    "n_samples_per_prompt": 5,
    "batched": False,
    "max_turns": 1,
    "chat_template.source": "name",
    "chat_template.name_or_path": None,
    "chat_template_kwargs": {},
    "sampling_params.max_generate_length": 1024,
    "sampling_params.repetition_penalty": 1.0,
    "sampling_params.temperature": 1.0,
    "sampling_params.top_p": 1.0,
    "sampling_params.min_p": 0.0,
    "sampling_params.top_k": -1,
    "sampling_params.logprobs": 1,
    "sampling_params.stop": None,
    "sampling_params.additional_kwargs": None,
    "use_conversation_multi_turn": True,
    "append_eos_token_after_stop_str_in_multi_turn": True,
    "eval_n_samples_per_prompt": 1,
    "zero_reward_on_non_stop": False,
    "use_cache_salt": True,
    "apply_overlong_filtering": False,
    "step_wise_trajectories": False,
    "vision_language_generator": False,
    "merge_stepwise_output": False,
}
REST = {
    "data.train_data": (f"{HOME}/data/gsm8k/train.parquet",),
    "data.val_data": (f"{HOME}/data/gsm8k/validation.parquet",),
    "data.dataloader.persistent_workers": False,
    "environment.env_class": "gsm8k",
    "environment.skyrl_gym.max_env_workers": 32,
    "environment.skyrl_gym.text2sql.db_path": "/home/ray/default/sql_data",
    "environment.skyrl_gym.llm_as_a_judge.model": "gpt-4o-mini",
    "environment.skyrl_gym.llm_as_a_judge.base_url": None,
    "environment.skyrl_gym.search.log_requests": False,
    "environment.skyrl_gym.search.search_url": "http://127.0.0.1:8000/retrieve",
    "environment.skyrl_gym.search.topk": 3,
    "environment.skyrl_gym.search.timeout": 30,
}
FILLED_IN = {
    # SkyRL derives these when its configuration is built.
    "trainer.ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.algorithm.temperature": 1.0,
    "generator.max_input_length": 512,
    "generator.eval_sampling_params.temperature": 0.0,
    "generator.eval_sampling_params.max_generate_length": 1024,
    "data.dataloader.num_workers": 8,
}
DEFAULTS: dict[str, Any] = {
    **{f"trainer.{key}": value for key, value in TRAINER.items()},
    **{f"trainer.algorithm.{key}": value for key, value in ALGORITHM.items()},
    **{f"generator.inference_engine.{key}": value for key, value in ENGINE.items()},
    **{f"generator.{key}": value for key, value in GENERATOR.items()},
    **REST,
    **FILLED_IN,
}


def test_the_table_is_long_enough_to_mean_something() -> None:
    assert len(DEFAULTS) >= 120


@pytest.mark.parametrize("path", DEFAULTS)
def test_default_is_skyrls(path: str) -> None:
    value = value_at(SkyRLConfig(), path)
    assert value == DEFAULTS[path]
    assert type(value) is type(DEFAULTS[path])


def test_run_name_differs_from_skyrl_so_that_runs_do_not_overwrite_each_other() -> None:
    assert SkyRLConfig().trainer.run_name is None


def test_skyrl_gyms_own_defaults_are_ours() -> None:
    from skyrl_gym.envs.search.env import SearchEnvConfig
    from skyrl_gym.envs.sql.env import Text2SQLEnvConfig

    gym = SkyRLConfig().environment.skyrl_gym
    assert gym.search.model_dump() == vars(SearchEnvConfig())
    assert gym.text2sql.model_dump() == vars(Text2SQLEnvConfig())


def test_algorithm_names_are_those_of_the_library() -> None:
    from skyrl_core.algorithms.registry import list_advantage_estimators, list_policy_losses
    from skyrl_core.config.algorithm import AlgorithmConfig
    from skyrl_core.config.algorithm_rules import KL_ESTIMATORS, REDUCTIONS

    for name in list_advantage_estimators():
        assert AlgorithmConfig(advantage_estimator=name).advantage_estimator == name
    for name in list_policy_losses():
        assert AlgorithmConfig(policy_loss_type=name).policy_loss_type == name
    for name in REDUCTIONS:
        assert AlgorithmConfig(loss_reduction=name).loss_reduction == name
    for name in KL_ESTIMATORS:
        assert AlgorithmConfig(kl_estimator_type=name).kl_estimator_type == name
