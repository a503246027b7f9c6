"""Features whose keys exist but that this version does not have yet. Building one of them deletes its lines here.

A key is listed when a value of it would be ignored or misread. Parameters of a feature that is switched off
(`trainer.fully_async.max_staleness_steps` and the like) are accepted: the switch is what is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_core.config.algorithm_rules import ESTIMATORS, EstimatorRules
from skyrl_core.config.placement import PlacementConfig
from skyrl_core.config.problems import Problem, raise_problems
from skyrl_core.config.root import SkyRLConfig
from skyrl_core.config.values import show, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Values of one key that this version can run, in words and as a test, and what other values would need."""

    path: str
    available: str
    allows: Callable[[Any, SkyRLConfig], bool]
    feature: str


def _only(path: str, feature: str, *values: Any) -> Limit:
    available = " or ".join(show(value) for value in values)
    return Limit(path=path, feature=feature, available=available, allows=lambda value, _: value in values)


def _off(path: str, feature: str) -> Limit:
    return _only(path, feature, False)


def _null(path: str, feature: str) -> Limit:
    return _only(path, feature, None)


def _never(path: str, feature: str) -> Limit:
    return Limit(path=path, feature=feature, available="-1", allows=lambda value, _: value <= 0)


def _sharded_over_all(model: str, ranks: Callable[[PlacementConfig], int]) -> Limit:
    return Limit(
        path=f"{model}.fsdp_config.fsdp_size",
        feature="hybrid sharding",
        available="-1 or the number of ranks",
        allows=lambda size, config: size in (-1, ranks(config.trainer.placement)),
    )


_MODELS = ("trainer.policy", "trainer.ref", "trainer.critic")
_ENGINE = "generator.inference_engine"
_SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)
_TRACKERS = ("wandb", "tensorboard", "console")

LIMITS: tuple[Limit, ...] = (
    # Algorithms
    Limit(
        path="trainer.algorithm.advantage_estimator",
        feature="estimators that need a critic",
        available=f"{', '.join(name for name, rules in ESTIMATORS.items() if not rules.needs_critic)}, or your own",
        allows=lambda name, _: not ESTIMATORS.get(name, EstimatorRules()).needs_critic,
    ),
    _null("trainer.critic.model.path", "training a critic"),
    # Training
    _only("trainer.strategy", "training with Megatron", "fsdp"),
    _off("trainer.mtp.enabled", "multi-token prediction"),
    _off("trainer.fully_async.enabled", "asynchronous training"),
    _off("trainer.fully_async.simulate_training", "simulated training"),
    _off("trainer.update_ref_every_epoch", "refreshing the reference model"),
    _off("trainer.fused_lm_head_logprob", "the fused head of Megatron"),
    _never("trainer.hf_save_interval", "Hugging Face exports during training"),
    _off("trainer.dump_data_batch", "dumping batches (the run's record holds each step's)"),
    _never("trainer.num_logger_eval_samples", "trajectories at the tracker"),
    _never("trainer.num_logger_train_samples", "trajectories at the tracker"),
    _off("trainer.policy.use_torch_compile", "compiling"),
    _off("trainer.policy.record_memory", "memory snapshots"),
    _off("trainer.policy.torch_profiler_config.enable", "profiling"),
    _off("trainer.policy.language_model_only", "multimodal models"),
    _off("trainer.ref.language_model_only", "multimodal models"),
    _off("trainer.policy.inference_only_init", "a policy without an optimizer"),
    *(_only(f"{model}.sequence_parallel_size", "sequence parallelism", 1) for model in _MODELS),
    *(_only(f"{model}.model.lora.rank", "LoRA", 0) for model in _MODELS),
    *(_off(f"{model}.model.expert_mxfp8.enabled", "MXFP8 experts") for model in _MODELS),
    *(_off(f"{model}.model.fake_int4_qat.enabled", "INT4-aware training") for model in _MODELS),
    *(_off(f"{model}.fsdp_config.cpu_offload", "keeping parameters on the host") for model in _MODELS),
    *(_null(f"{model}.fsdp_config.mixed_precision", "other number formats than bf16 and fp32") for model in _MODELS),
    *(_only(f"{model}.fsdp_config.wrap_policy", "other sharding than by layer", {}) for model in _MODELS),
    *(_only(f"{model}.model_config_kwargs", "changing the model's configuration", {}) for model in _MODELS),
    _sharded_over_all("trainer.policy", lambda placement: placement.policy_ranks),
    _sharded_over_all("trainer.ref", lambda placement: placement.ref_ranks),
    _sharded_over_all("trainer.critic", lambda placement: placement.critic_ranks),
    *(
        _only(f"{model}.optimizer_config.scheduler", "schedules with parameters of their own", *_SCHEDULERS)
        for model in ("trainer.policy", "trainer.critic")
    ),
    Limit(
        path="trainer.logger",
        feature="other trackers",
        available=", ".join(_TRACKERS),
        allows=lambda _, config: set(config.trainer.loggers) <= set(_TRACKERS),
    ),
    # Engines
    _only(f"{_ENGINE}.run_engines_locally", "engines outside the cluster", True),
    _null(f"{_ENGINE}.external_proxy_url", "engines outside the cluster"),
    _null(f"{_ENGINE}.external_server_urls", "engines outside the cluster"),
    _off(f"{_ENGINE}.enable_pd", "separate prefill and decode"),
    _null(f"{_ENGINE}.speculative_config", "speculative decoding"),
    _null(f"{_ENGINE}.serialized_weight_sync_mode", "quantised weight sync"),
    _only(f"{_ENGINE}.weight_sync_backend", "weight sync through storage", "nccl", "gloo"),
    _null(f"{_ENGINE}.delta_weight_sync", "weight sync through storage"),
    _off(f"{_ENGINE}.enable_return_routed_experts", "replaying expert choices"),
    _off(f"{_ENGINE}.offload_kv_for_weight_sync", "moving the cache during weight sync"),
    _off(f"{_ENGINE}.language_model_only", "multimodal models"),
    # Rollouts
    _only("generator.max_turns", "multi-turn generation", 1),
    _off("generator.step_wise_trajectories", "step-wise training"),
    _off("generator.vision_language_generator", "images in prompts"),
    _only("generator.sampling_params.additional_kwargs", "further sampling parameters", None, {}),
    _only("generator.eval_sampling_params.additional_kwargs", "further sampling parameters", None, {}),
)


def missing_features(config: SkyRLConfig) -> Iterator[Problem]:
    """One problem for each key whose value this version cannot run."""
    for limit in LIMITS:
        value = value_at(config, limit.path)
        if not limit.allows(value, config):
            text = f"not available yet: {limit.path}={show(value)} ({limit.feature}; available: {limit.available})"
            yield Problem(text=text, path=limit.path, unavailable=True)


def check_runnable(config: SkyRLConfig) -> None:
    """Raise what keeps a validly written configuration from running in this version."""
    problems = [Problem(text=rule) for rule in config.broken_rules()]
    problems += missing_features(config)
    if config.generator.inference_engine.backend == "vllm":
        text = (
            "not available yet: generator.inference_engine.backend=vllm (vLLM engines); "
            "write generator.inference_engine.backend=transformers"
        )
        problems.append(Problem(text=text, path="generator.inference_engine.backend", unavailable=True))
    raise_problems(problems)
