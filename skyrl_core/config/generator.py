"""`generator`: how prompts become rollouts."""

from typing import Any, Literal

from pydantic import Field

from skyrl_core.config.inference_engine import InferenceEngineConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.config.section import Count, PathText, Section


class ChatTemplateConfig(Section):
    """`generator.chat_template`: a template in place of the tokenizer's own."""

    source: Literal["name", "file"] = Field("name", description="whether name_or_path names a template or a file")
    name_or_path: PathText | None = Field(None, description="name or Jinja2 file; null keeps the tokenizer's template")


class GeneratorConfig(Section):
    """`generator`."""

    inference_engine: InferenceEngineConfig = Field(InferenceEngineConfig(), description="the engines")
    n_samples_per_prompt: Count = Field(5, description="trajectories per prompt and step")
    batched: bool = Field(False, description="hand all prompts to the engine in one call; single-turn only")
    max_turns: Count = Field(1, description="most turns of a trajectory")
    max_input_length: Count | None = Field(
        None, description="longest input of a turn, in tokens; null means trainer.max_prompt_length"
    )
    chat_template: ChatTemplateConfig = Field(ChatTemplateConfig(), description="chat template")
    chat_template_kwargs: dict[str, Any] = Field({}, description="variables handed to the chat template")
    sampling_params: SamplingParams = Field(SamplingParams(), description="sampling for training")
    use_conversation_multi_turn: bool = Field(True, description="each turn is a message of its own")
    append_eos_token_after_stop_str_in_multi_turn: bool = Field(
        True, description="close a turn that a stop string ended with the end-of-sequence token"
    )
    eval_sampling_params: SamplingParams | None = Field(
        None, description="sampling for evaluation; null: temperature 0 and training's max_generate_length"
    )
    eval_n_samples_per_prompt: Count = Field(1, description="trajectories per prompt in evaluation")
    zero_reward_on_non_stop: bool = Field(False, description="reward 0 for responses that did not end by themselves")
    use_cache_salt: bool = Field(True, description="share vLLM's prefix cache only within one policy version")
    apply_overlong_filtering: bool = Field(False, description="mask out responses that were cut off (DAPO)")
    step_wise_trajectories: bool = Field(False, description="train each turn as a trajectory of its own")
    vision_language_generator: bool = Field(False, description="prompts and observations may hold images")
    merge_stepwise_output: bool = Field(False, description="step-wise: merge turns that extend each other")
