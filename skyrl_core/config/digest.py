"""Tells whether two configurations describe the same training, so that a run may be continued with one of them."""

import hashlib
import json
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from skyrl_core.config.root import SkyRLConfig
from skyrl_core.config.schema import leaves
from skyrl_core.config.values import plain, value_at

LEFT_OUT = (
    # What a run is called, where it writes, and who is told.
    "trainer.project_name",
    "trainer.run_name",
    "trainer.tags",
    "trainer.logger",
    "trainer.log_path",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.dump_*",
    "trainer.print_example_interval",
    "trainer.log_example_interval",
    "trainer.num_logger_*",
    "trainer.enable_ray_gpu_monitor",
    # How long it goes on, and how often it saves: a run can be extended.
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.ckpt_interval",
    "trainer.hf_save_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_*",
    "trainer.restore_optimizer",
    "trainer.allow_changed_data",
    "trainer.max_failed_fraction",
    # A bound, at which a run stops: it can be raised.
    "trainer.algorithm.dynamic_sampling.max_sample_batches",
    # Evaluation never touches training.
    "trainer.eval_*",
    "generator.eval_*",
    "data.val_data",
    # Training data are told by their content: the dataset's fingerprint is compared by itself.
    "data.train_data",
    "data.recipe",
    "data.dataloader.*",
    # Where and how fast it is computed: a run may continue on other devices, in other pieces.
    "trainer.placement.*",
    "trainer.micro_*",
    "trainer.max_tokens_per_microbatch",
    "trainer.gradient_checkpointing*",
    "trainer.use_expandable_segments",
    "trainer.*.fsdp_config.*",
    "trainer.*.optimizer_config.offload_after_step",
    "trainer.policy.record_memory",
    "trainer.policy.torch_profiler_config.*",
    "trainer.policy.use_torch_compile",
    "trainer.logprobs_chunk_size",
    "generator.inference_engine.num_engines",
    "generator.inference_engine.*_parallel_size",
    "generator.inference_engine.gpu_memory_utilization",
    "generator.inference_engine.max_num_*",
    "generator.inference_engine.max_batch_size",
    "generator.inference_engine.enforce_eager",
    "generator.inference_engine.enable_ray_prometheus_stats",
    "generator.inference_engine.use_expandable_segments",
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB",
    "generator.inference_engine.timeout_seconds",
    "environment.skyrl_gym.max_env_workers",
    "environment.timeout_seconds",
    "flow.*",
)
"""Keys, as patterns, that may differ between a run and its continuation."""


def config_digest(config: SkyRLConfig) -> str:
    """SHA-256 in hex over every key that is not LEFT_OUT."""
    text = json.dumps(_relevant(config), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def diff_configs(a: SkyRLConfig, b: SkyRLConfig) -> list[tuple[str, Any, Any]]:
    """The keys in which two configurations differ and must not, with the value of each."""
    paths = dict.fromkeys((*_covered(a), *_covered(b)))
    values = [(path, plain(value_at(a, path)), plain(value_at(b, path))) for path in paths]
    return [(path, before, after) for path, before, after in values if before != after]


@cache
def digest_keys() -> tuple[str, ...]:
    """The keys that every digest covers."""
    return tuple(path for path in leaves() if not any(fnmatchcase(path, pattern) for pattern in LEFT_OUT))


def _covered(config: SkyRLConfig) -> tuple[str, ...]:
    """The keys that this configuration's digest covers."""
    if config.trainer.algorithm.loss_reduction == "token_mean_legacy":
        # The one reduction whose loss the size of a microbatch changes.
        return (*digest_keys(), "trainer.micro_train_batch_size_per_gpu")
    return digest_keys()


def _relevant(config: SkyRLConfig) -> dict[str, Any]:
    return {path: plain(value_at(config, path)) for path in _covered(config)}
