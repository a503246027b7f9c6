"""The root of the configuration, and the rules that span sections."""

from typing import Self

from pydantic import Field, model_validator

from skyrl_core.config.data import DataConfig
from skyrl_core.config.environment import EnvironmentConfig
from skyrl_core.config.flow import FlowConfig
from skyrl_core.config.generator import GeneratorConfig
from skyrl_core.config.hooks import HooksConfig
from skyrl_core.config.sampling import SamplingParams
from skyrl_core.config.section import Section
from skyrl_core.config.trainer import TrainerConfig
from skyrl_core.errors import NotAvailableYetError


class SkyRLConfig(Section):
    """All of a run's configuration. Values that derive from others are filled in when it is built."""

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
            data = data.model_copy(update={"dataloader": data.dataloader.model_copy(update={"num_workers": 8})})
        if trainer.algorithm.temperature is None and generator.sampling_params.temperature > 0:
            algorithm = trainer.algorithm.model_copy(update={"temperature": generator.sampling_params.temperature})
            trainer = trainer.model_copy(update={"algorithm": algorithm})
        if trainer.ref.model.path is None:
            model = trainer.ref.model.model_copy(update={"path": trainer.policy.model.path})
            trainer = trainer.model_copy(update={"ref": trainer.ref.model_copy(update={"model": model})})
        if generator.max_input_length is None:
            generator = generator.model_copy(update={"max_input_length": trainer.max_prompt_length})
        if generator.eval_sampling_params is None:
            sampling = SamplingParams(
                temperature=0.0, max_generate_length=generator.sampling_params.max_generate_length
            )
            generator = generator.model_copy(update={"eval_sampling_params": sampling})
        # The model is frozen for everyone else; a validator that runs while it is built is the one place that may set.
        for name, value in (("data", data), ("trainer", trainer), ("generator", generator)):
            object.__setattr__(self, name, value)
        return self

    def check_runnable(self) -> None:
        """Raise NotAvailableYetError when this version cannot run what the configuration validly describes."""
        if self.generator.inference_engine.backend == "vllm":
            raise NotAvailableYetError(
                "not available yet: generator.inference_engine.backend=vllm; "
                "use generator.inference_engine.backend=transformers"
            )
