"""`trainer`: models, algorithm, batches, checkpoints, evaluation and logging of a run."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from skyrl_core.config.algorithm import AlgorithmConfig
from skyrl_core.config.asynchronous import FullyAsyncConfig, MTPConfig
from skyrl_core.config.placement import PlacementConfig
from skyrl_core.config.section import Count, EveryNSteps, Items, PathText, Section, Share, ours
from skyrl_core.config.workers import CriticConfig, PolicyConfig, RefConfig

_RUN_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_LONGEST_RUN_NAME = 128

Backend = Literal["wandb", "mlflow", "swanlab", "tensorboard", "console"]


def _strategy_name(value: Any) -> Any:
    # SkyRL's scripts write both names for the one implementation on fully_shard.
    return "fsdp" if value == "fsdp2" else value


def _none_is_a_mode(value: Any) -> Any:
    # SkyRL takes null and "none" for the same.
    return "none" if value is None else value


class TrainerConfig(Section):
    """`trainer`."""

    placement: PlacementConfig = Field(PlacementConfig(), description="ranks and devices")
    use_expandable_segments: bool = Field(True, description="PyTorch's expandable CUDA segments in training processes")
    sequence_parallel_backend: Literal["ulysses"] = Field("ulysses", description="kind of sequence parallelism")
    strategy: Annotated[Literal["fsdp", "megatron"], BeforeValidator(_strategy_name)] = Field(
        "fsdp", description="how models are sharded: fsdp (PyTorch's fully_shard; fsdp2 means the same) or megatron"
    )
    policy: PolicyConfig = Field(PolicyConfig(), description="the model that learns")
    ref: RefConfig = Field(RefConfig(), description="the model that KL is measured against")
    critic: CriticConfig = Field(CriticConfig(), description="the model that predicts values")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="advantages and losses")
    mtp: MTPConfig = Field(MTPConfig(), description="multi-token prediction")
    fully_async: FullyAsyncConfig = Field(FullyAsyncConfig(), description="asynchronous training")
    gradient_checkpointing: bool = Field(True, description="recompute activations to save memory")
    gradient_checkpointing_use_reentrant: bool = Field(False, description="PyTorch's reentrant variant of it")
    seed: Annotated[int, Field(ge=0)] = Field(42, description="seed of everything random in a run")
    resume_mode: Annotated[Literal["none", "latest", "from_path"], BeforeValidator(_none_is_a_mode)] = Field(
        "latest",
        description="where to continue from: nowhere (none, or null), the run's newest checkpoint, or resume_path",
    )
    resume_path: PathText | None = Field(None, description="checkpoint folder for resume_mode=from_path")
    log_path: PathText = Field("/tmp/skyrl-logs", description="folder for logs of engines and workers")
    ckpt_path: PathText = Field("~/ckpts/", description="folder or s3:// URI for checkpoints and the run's record")
    max_ckpts_to_keep: int = Field(-1, description="newest checkpoints to keep; -1 keeps all")
    ckpt_interval: EveryNSteps = Field(10, description="steps between checkpoints")
    hf_save_interval: EveryNSteps = Field(-1, description="steps between Hugging Face exports; -1 for none")
    export_path: PathText = Field("~/exports/", description="folder for metrics, plots, exports and dumps")
    bf16: bool = Field(True, description="train in bf16 on GPUs; CPU ranks always use fp32")
    epochs: Count = Field(1, description="passes over the training data")
    max_training_steps: Count | None = Field(None, description="stop after this many steps")
    update_epochs_per_batch: Count = Field(1, description="passes over each step's batch (PPO epochs)")
    train_batch_size: Count = Field(1024, description="prompts per step")
    policy_mini_batch_size: Count = Field(256, description="prompts per optimizer step of the policy")
    critic_mini_batch_size: Count = Field(256, description="prompts per optimizer step of the critic")
    micro_train_batch_size_per_gpu: Count = Field(1, description="sequences per forward and backward on a rank")
    micro_forward_batch_size_per_gpu: Count = Field(1, description="sequences per forward only on a rank")
    max_tokens_per_microbatch: int = Field(
        -1, description="form microbatches by this many tokens instead, padding counted; -1 for not"
    )
    recompute_old_logprobs_per_minibatch: bool = Field(
        True, description="compute old log-probabilities in the microbatches that the update will use"
    )
    update_ref_every_epoch: bool = Field(False, description="the reference becomes the policy after every epoch")
    remove_microbatch_padding: bool = Field(True, description="pack sequences without padding where kernels allow it")
    eval_batch_size: Count = Field(1024, description="prompts per batch of an evaluation")
    eval_before_train: bool = Field(True, description="evaluate the start model")
    eval_interval: EveryNSteps = Field(5, description="steps between evaluations; -1 for none")
    max_prompt_length: Count = Field(512, description="longer prompts are left out, in tokens")
    flash_attn: bool = Field(True, description="use flash attention where the hardware has it")
    disable_fast_tokenizer: bool = Field(False, description="use the tokenizer's slow implementation")
    project_name: str = Field("skyrl", description="project at the trackers")
    run_name: str | None = Field(
        None, description="name of the run and its folders; null makes a new one (SkyRL's default: test_run)"
    )
    logger: Backend | Items[Backend] = Field("wandb", description="trackers; one name, or (ours) a list of names")
    enable_ray_gpu_monitor: bool = Field(True, description="log GPU and memory use of the cluster")
    tags: Items[str] | None = Field(None, description="tags of the run at the trackers")
    dump_data_batch: bool = Field(False, description="write each step's training batch to export_path")
    dump_eval_results: bool = Field(True, description="write each evaluation's trajectories to export_path")
    print_example_interval: EveryNSteps = Field(1, description="steps between printed examples; -1 for none")
    num_logger_eval_samples: int = Field(-1, description="evaluation trajectories to send to the tracker; -1 for none")
    num_logger_train_samples: int = Field(-1, description="training trajectories to send to the tracker; -1 for none")
    log_example_interval: EveryNSteps = Field(-1, description="deprecated: print_example_interval")
    logprobs_chunk_size: Count | None = Field(1024, description="tokens per chunk when computing log-probabilities")
    vocab_entropy_chunk_size: Annotated[int, Field(ge=0)] | None = Field(
        0, description="megatron: tokens per chunk of the entropy; 0 chooses, null does not chunk"
    )
    vocab_entropy_chunk_memory_mb: Count = Field(512, description="megatron: memory of such a chunk, in MB")
    fused_lm_head_logprob: bool = Field(False, description="megatron: never hold all logits at once")
    fused_lm_head_logprob_backend: Literal["torch", "triton"] = Field("torch", description="megatron: its kernel")
    trust_remote_code: bool = Field(False, description=ours("run Python code that comes with a model or tokenizer"))
    eval_greedy: bool = Field(False, description=ours("also decode greedily at every evaluation"))
    allow_changed_data: bool = Field(False, description=ours("resume although the training data changed"))
    restore_optimizer: bool = Field(True, description=ours("resume with the optimizer's state, not weights only"))
    max_failed_fraction: Share = Field(
        0.1, description=ours("share of trajectories whose environment may fail before a step is an error")
    )

    @field_validator("run_name")
    @classmethod
    def _run_name_is_a_safe_folder_name(cls, name: str | None) -> str | None:
        if name is None:
            return None
        if not name or name[0] in ".-" or len(name) > _LONGEST_RUN_NAME or not set(name) <= _RUN_NAME_CHARACTERS:
            raise ValueError(
                f"must be a plain folder name: 1 to {_LONGEST_RUN_NAME} letters, digits, '.', '_' or '-', "
                "not beginning with '.' or '-'"
            )
        return name

    @field_validator("logger")
    @classmethod
    def _each_logger_once(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(names, str) and len(set(names)) < len(names):
            raise ValueError("must name each tracker once")
        return names

    @property
    def loggers(self) -> tuple[str, ...]:
        """The trackers, as a tuple whether one or several were given."""
        return (self.logger,) if isinstance(self.logger, str) else self.logger
