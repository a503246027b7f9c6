"""The root of the configuration, what is filled in from other keys, and the rules that span sections."""

from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_validator

from skyrl_core.config.algorithm_checks import RunFacts, algorithm_problems
from skyrl_core.config.data import DataConfig
from skyrl_core.config.environment import EnvironmentConfig
from skyrl_core.config.flow import FlowConfig
from skyrl_core.config.generator import GeneratorConfig
from skyrl_core.config.hooks import HooksConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.config.section import Section
from skyrl_core.config.trainer import TrainerConfig

_DEFAULT_LOADER_WORKERS = 8


class SkyRLConfig(Section):
    """All of a run's configuration. Values that derive from others are filled in when it is built.

    Building it checks each key by itself. `load_config` also checks the rules between keys and refuses features
    that this version lacks; `check_runnable` in `skyrl_core.config.availability` does so for one built in code.
    """

    data: DataConfig = Field(DataConfig(), description="prompts")
    trainer: TrainerConfig = Field(TrainerConfig(), description="training")
    generator: GeneratorConfig = Field(GeneratorConfig(), description="rollouts")
    environment: EnvironmentConfig = Field(EnvironmentConfig(), description="environments")
    flow: FlowConfig = Field(FlowConfig(), description="the workflow")
    hooks: HooksConfig = Field(HooksConfig(), description="replaceable factories")

    @model_validator(mode="after")
    def _fill_dependent_defaults(self) -> Self:
        trainer, generator, data = self.trainer, self.generator, self.data
        if data.dataloader.num_workers is None:
            data = _with(data, dataloader=_with(data.dataloader, num_workers=_DEFAULT_LOADER_WORKERS))
        if trainer.algorithm.temperature is None and generator.sampling_params.temperature > 0:
            algorithm = _with(trainer.algorithm, temperature=generator.sampling_params.temperature)
            trainer = _with(trainer, algorithm=algorithm)
        if trainer.algorithm.use_tis and trainer.algorithm.tis_imp_ratio_cap > 0:
            # SkyRL's older spelling of the same.
            token = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": trainer.algorithm.tis_imp_ratio_cap}
            correction = _with(trainer.algorithm.off_policy_correction, **token)
            trainer = _with(trainer, algorithm=_with(trainer.algorithm, off_policy_correction=correction))
        if trainer.ref.model.path is None:
            model = _with(trainer.ref.model, path=trainer.policy.model.path)
            trainer = _with(trainer, ref=_with(trainer.ref, model=model))
        if trainer.log_example_interval > 0:
            trainer = _with(trainer, print_example_interval=trainer.log_example_interval)
        if generator.max_input_length is None:
            generator = _with(generator, max_input_length=trainer.max_prompt_length)
        if generator.eval_sampling_params is None:
            length = generator.sampling_params.max_generate_length
            sampling = SamplingParams(temperature=0.0, max_generate_length=length)
            generator = _with(generator, eval_sampling_params=sampling)
        # Frozen for everyone else; a validator that runs while the model is built is the one place that may set.
        for name, value in (("data", data), ("trainer", trainer), ("generator", generator)):
            object.__setattr__(self, name, value)
        return self

    @property
    def uses_reference(self) -> bool:
        """True when log-probabilities of the reference model are needed."""
        return self.trainer.algorithm.use_kl_loss or self.trainer.algorithm.use_kl_in_reward

    @property
    def uses_critic(self) -> bool:
        return self.trainer.critic.model.path is not None

    def own_code(self) -> dict[str, str]:
        """The functions and classes of the user's own, `module:name` or `/path/to/file.py:name`, by their keys."""
        algorithm = self.trainer.algorithm
        named = {f"hooks.{name}": own for name, own in self.hooks if own is not None}
        named |= {
            f"environment.rewards.{name}.function": item.function for name, item in self.environment.rewards.items()
        }
        named |= {
            "environment.env_class": self.environment.env_class,
            "trainer.algorithm.advantage_estimator": algorithm.advantage_estimator,
            "trainer.algorithm.policy_loss_type": algorithm.policy_loss_type,
        }
        return {key: own for key, own in named.items() if ":" in own}

    def check_runnable(self) -> None:
        """Raise what keeps `train` and `evaluate` from running this configuration.

        ConfigurationError for broken rules between keys; NotAvailableYetError for features this version lacks, among
        them the vllm engine, which the configuration itself accepts.
        """
        from skyrl_core.config.availability import check_runnable

        check_runnable(self)

    def broken_rules(self) -> list[str]:
        """One message for each rule between keys that does not hold."""
        rules: tuple[Callable[[], str | None], ...] = (
            self._policy_minibatches_fill_the_batch,
            self._critic_minibatches_fill_the_batch,
            self._every_rank_gets_a_row,
            self._overlong_buffer_fits_the_response,
            self._chunks_are_bounded,
            self._training_samples_randomly,
            self._colocated_engines_match_the_policy,
            self._colocated_reference_matches_the_policy,
            self._colocated_critic_matches_the_policy,
            self._colocated_engines_are_ours,
            self._external_engines_have_addresses,
            self._experts_are_shared_by_all,
            self._prefill_leaves_decode,
            self._transformers_engine_is_one_device,
            self._transformers_engine_has_no_vllm_parameters,
            self._prompts_fit_the_input,
            self._batched_is_plain_single_turn,
            self._rope_parameters_agree,
            self._loader_workers_exist,
            self._evaluation_has_data,
            self._checkpoints_to_keep,
            self._resume_path_is_given,
        )
        broken = [message for rule in rules if (message := rule()) is not None]
        return broken + algorithm_problems(self.trainer.algorithm, **self.algorithm_facts())

    # Batches. SkyRL also wants each minibatch to divide evenly over ranks and microbatches. Ours pads shares of ranks
    # with rows of weight zero and weighs losses by the whole minibatch, so that is not asked for.

    def _policy_minibatches_fill_the_batch(self) -> str | None:
        return _divides(self.trainer.train_batch_size, "policy_mini_batch_size", self.trainer.policy_mini_batch_size)

    def _critic_minibatches_fill_the_batch(self) -> str | None:
        if not self.uses_critic:
            return None
        return _divides(self.trainer.train_batch_size, "critic_mini_batch_size", self.trainer.critic_mini_batch_size)

    def _every_rank_gets_a_row(self) -> str | None:
        rows = self.trainer.policy_mini_batch_size * self.generator.n_samples_per_prompt
        ranks = self.trainer.placement.policy_ranks
        if self.uses_reference:
            ranks = max(ranks, self.trainer.placement.ref_ranks)
        if rows >= ranks:
            return None
        return (
            f"trainer.policy_mini_batch_size x generator.n_samples_per_prompt is {rows}, fewer rows than the {ranks} "
            "ranks that share them: raise one of them or use fewer ranks"
        )

    # Algorithm

    def algorithm_facts(self) -> RunFacts:
        """What `algorithm_problems` asks of the other sections."""
        return RunFacts(
            samples_per_prompt=self.generator.n_samples_per_prompt,
            has_critic=self.uses_critic,
            step_wise=self.generator.step_wise_trajectories,
            rollout_logprobs=self.generator.sampling_params.logprobs is not None,
        )

    def _overlong_buffer_fits_the_response(self) -> str | None:
        buffer, longest = self.trainer.algorithm.overlong_buffer.len, self.generator.sampling_params.max_generate_length
        if buffer is None or buffer <= longest:
            return None
        return (
            f"trainer.algorithm.overlong_buffer.len={buffer} must not be above "
            f"generator.sampling_params.max_generate_length={longest}"
        )

    def _chunks_are_bounded(self) -> str | None:
        if self.trainer.logprobs_chunk_size is not None or self.trainer.strategy == "megatron":
            return None
        return "trainer.logprobs_chunk_size=null is only for trainer.strategy=megatron: give a number of tokens"

    def _training_samples_randomly(self) -> str | None:
        if self.generator.sampling_params.temperature > 0:
            return None
        return (
            "generator.sampling_params.temperature=0 gives a prompt the same answer every time, which teaches nothing: "
            "give a number above 0 (evaluation has generator.eval_sampling_params.temperature)"
        )

    # Placement

    def _colocated_engines_match_the_policy(self) -> str | None:
        placement, engines = self.trainer.placement, self.generator.inference_engine
        if not placement.colocate_all or placement.policy_ranks == engines.total_ranks:
            return None
        return (
            f"trainer.placement.colocate_all puts engines and policy on the same devices, but the engines need "
            f"{engines.total_ranks} (num_engines x tensor x pipeline x data parallel size) and the policy has "
            f"{placement.policy_ranks} (policy_num_nodes x policy_num_gpus_per_node): make them equal or set "
            "trainer.placement.colocate_all=false"
        )

    def _colocated_reference_matches_the_policy(self) -> str | None:
        placement = self.trainer.placement
        shared = placement.colocate_all or placement.colocate_policy_ref
        same = (placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (
            placement.ref_num_nodes,
            placement.ref_num_gpus_per_node,
        )
        if not (shared and self.uses_reference) or same:
            return None
        return (
            f"the reference model shares the policy's devices, but has {placement.ref_num_nodes} x "
            f"{placement.ref_num_gpus_per_node} ranks to its {placement.policy_num_nodes} x "
            f"{placement.policy_num_gpus_per_node}: set trainer.placement.ref_num_nodes and "
            "ref_num_gpus_per_node to the policy's"
        )

    def _colocated_critic_matches_the_policy(self) -> str | None:
        placement = self.trainer.placement
        if not (placement.colocate_all and self.uses_critic) or placement.policy_ranks == placement.critic_ranks:
            return None
        return (
            f"trainer.placement.colocate_all puts critic and policy on the same devices, but they have "
            f"{placement.critic_ranks} and {placement.policy_ranks} ranks: set trainer.placement.critic_num_nodes and "
            "critic_num_gpus_per_node to the policy's"
        )

    # Engines

    def _colocated_engines_are_ours(self) -> str | None:
        engines = self.generator.inference_engine
        outside = engines.external_proxy_url is not None or engines.external_server_urls is not None
        if not (self.trainer.placement.colocate_all and outside):
            return None
        return "external engines cannot share devices with training: set trainer.placement.colocate_all=false"

    def _external_engines_have_addresses(self) -> str | None:
        engines = self.generator.inference_engine
        outside = engines.external_proxy_url is not None or engines.external_server_urls is not None
        if engines.run_engines_locally or outside:
            return None
        return (
            "generator.inference_engine.run_engines_locally=false needs external_proxy_url or external_server_urls "
            "of generator.inference_engine"
        )

    def _experts_are_shared_by_all(self) -> str | None:
        engines = self.generator.inference_engine
        together = engines.data_parallel_size * engines.tensor_parallel_size
        if engines.expert_parallel_size in (1, together):
            return None
        return (
            f"generator.inference_engine.expert_parallel_size={engines.expert_parallel_size} must be 1 or "
            f"data_parallel_size x tensor_parallel_size, which is {together}"
        )

    def _prefill_leaves_decode(self) -> str | None:
        engines = self.generator.inference_engine
        if not engines.enable_pd or 0 < engines.num_prefill < engines.num_engines:
            return None
        return (
            "generator.inference_engine.enable_pd needs at least one engine to prefill and one to decode: num_prefill "
            f"is {engines.num_prefill} of {engines.num_engines} engines"
        )

    def _transformers_engine_is_one_device(self) -> str | None:
        engines = self.generator.inference_engine
        if engines.backend != "transformers" or engines.total_ranks == engines.num_engines:
            return None
        return (
            "generator.inference_engine.backend=transformers holds each engine on one device: set tensor, pipeline and "
            "data parallel sizes to 1 and num_engines to the number of devices"
        )

    def _transformers_engine_has_no_vllm_parameters(self) -> str | None:
        engines = self.generator.inference_engine
        if engines.backend != "transformers" or not engines.engine_init_kwargs:
            return None
        return (
            "generator.inference_engine.engine_init_kwargs goes to vLLM; backend=transformers takes none of "
            f"{', '.join(engines.engine_init_kwargs)}"
        )

    # Generation and data

    def _prompts_fit_the_input(self) -> str | None:
        given, needed = self.generator.max_input_length, self.trainer.max_prompt_length
        if given is None or given == needed or (self.generator.max_turns > 1 and given > needed):
            return None
        relation = "equal" if self.generator.max_turns == 1 else "be at least"
        return (
            f"generator.max_input_length={given} must {relation} trainer.max_prompt_length={needed} "
            f"with generator.max_turns={self.generator.max_turns}"
        )

    def _batched_is_plain_single_turn(self) -> str | None:
        generator = self.generator
        if not generator.batched:
            return None
        if generator.max_turns > 1 or generator.step_wise_trajectories:
            return "generator.batched=true is for single-turn generation: set it to false"
        if generator.chat_template_kwargs:
            return "generator.batched=true does not take generator.chat_template_kwargs: set generator.batched=false"
        return None

    def _rope_parameters_agree(self) -> str | None:
        overrides = self.generator.inference_engine.engine_init_kwargs.get("hf_overrides")
        engine = overrides.get("rope_parameters") if isinstance(overrides, dict) else None
        policy, path = self.trainer.policy, "trainer.policy.model_config_kwargs"
        trained = policy.model_config_kwargs.get("rope_parameters")
        if self.trainer.strategy == "megatron":
            path = "trainer.policy.megatron_config.transformer_config_kwargs"
            trained = policy.megatron_config.transformer_config_kwargs.get("rope_parameters")
        if engine is None or engine == trained:
            return None
        return (
            "generator.inference_engine.engine_init_kwargs.hf_overrides.rope_parameters must equal "
            f"{path}.rope_parameters, or engine and trainer compute different models"
        )

    def _loader_workers_exist(self) -> str | None:
        loader = self.data.dataloader
        if not loader.persistent_workers or loader.num_workers != 0:
            return None
        return "data.dataloader.persistent_workers=true needs data.dataloader.num_workers above 0"

    def _evaluation_has_data(self) -> str | None:
        if self.trainer.eval_interval <= 0 or self.data.val_data:
            return None
        return "data.val_data is empty: give evaluation data, or set trainer.eval_interval=-1"

    # Checkpoints

    def _checkpoints_to_keep(self) -> str | None:
        if self.trainer.max_ckpts_to_keep != 0:
            return None
        return "trainer.max_ckpts_to_keep=0 would keep none: give a number above 0, or -1 to keep all"

    def _resume_path_is_given(self) -> str | None:
        if self.trainer.resume_mode != "from_path" or self.trainer.resume_path:
            return None
        return "trainer.resume_mode=from_path needs trainer.resume_path: the checkpoint's folder (.../global_step_N)"


def _with(section: Any, **changes: Any) -> Any:
    return section.model_copy(update=changes)


def _divides(batch: int, name: str, minibatch: int) -> str | None:
    if batch % minibatch == 0:
        return None
    return (
        f"trainer.train_batch_size={batch} must be a multiple of trainer.{name}={minibatch}, "
        "so that every optimizer step sees as many prompts"
    )
