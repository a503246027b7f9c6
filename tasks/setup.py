"""Setup as tasks. They run in the flow process, because what they make — actors above all — belongs to it."""

import logging
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.dataset import PromptDataset
from skyrl_core.data.loader import PromptLoader
from skyrl_core.environments.registry import environment_class
from skyrl_core.errors import ConfigurationError
from skyrl_core.generators.protocol import Generator
from skyrl_core.generators.templates import chat_template
from skyrl_core.hooks import load_hook
from skyrl_core.runtime.cluster import RayCluster
from skyrl_core.runtime.engines import EngineGroup, launch_engines, wait_started
from skyrl_core.runtime.placement import Placement, create_placement
from skyrl_core.runtime.trainer import Trainer, start_trainer
from tasks.context import make_generator, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_setup_task: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


class Datasets:
    """Training prompts (None for an evaluation alone) and validation prompts (None without evaluation)."""

    __slots__ = ("train", "validation")

    def __init__(self, train: PromptDataset | None, validation: PromptDataset | None) -> None:
        self.train = train
        self.validation = validation


class Inference:
    """Engines whose start is under way, and how to wait for it."""

    __slots__ = ("engines", "starts")

    def __init__(self, engines: EngineGroup, starts: list[Any]) -> None:
        self.engines = engines
        self.starts = starts

    def wait(self, timeout: float) -> None:
        """Return when every engine has its model."""
        wait_started(self.starts, timeout)


def load_datasets_default(
    config: SkyRLConfig, tokenizer: "PreTrainedTokenizerBase", *, training: bool, validation: bool
) -> Datasets:
    """Read, check and filter what the configuration names; validation data only when it will be used."""
    generator, data = config.generator, config.data
    common: dict[str, Any] = {
        "max_prompt_length": config.trainer.max_prompt_length,
        "default_env_class": config.environment.env_class,
        "chat_template": chat_template(generator.chat_template),
        "chat_template_kwargs": generator.chat_template_kwargs,
        "num_workers": data.dataloader.num_workers or 0,
    }
    train = (
        PromptDataset(data.train_data, tokenizer, min_rows=config.trainer.train_batch_size, **common)
        if training
        else None
    )
    return Datasets(train, PromptDataset(data.val_data, tokenizer, **common) if validation else None)


@task(name="tokenizer", task_run_name="load tokenizer", **_setup_task)
def load_tokenizer_task(config: SkyRLConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer of the policy model."""
    return make_tokenizer(config)


@task(name="datasets", task_run_name="load datasets", **_setup_task)
def load_datasets(
    config: SkyRLConfig, tokenizer: "PreTrainedTokenizerBase", training: bool, validation: bool
) -> Datasets:
    """Training and validation prompts. Raises ConfigurationError when nothing answers to an environment they name."""
    factory = load_hook(config.hooks.datasets, "hooks.datasets", load_datasets_default)
    datasets: Datasets = factory(config, tokenizer, training=training, validation=validation)
    for name, dataset in (("train", datasets.train), ("validation", datasets.validation)):
        if dataset is not None:
            for env_class in sorted(dataset.env_classes):
                environment_class(env_class)
            logger.info("%s data: %s", name, dataset.counts)
    return datasets


@task(name="placement", task_run_name="reserve placement", **_setup_task)
def reserve_placement(config: SkyRLConfig, cluster: RayCluster, datasets: Datasets) -> Placement:
    """Bundles for all actors, reserved only once the data is known to be good; none for a trainer without its data."""
    factory = load_hook(config.hooks.placement, "hooks.placement", create_placement)
    placement: Placement = factory(config, cluster, training=datasets.train is not None)
    logger.info(
        "device %s: %d policy, %d reference rank(s), %d engine(s)",
        placement.device,
        len(placement.policy),
        len(placement.ref),
        len(placement.engines),
    )
    return placement


@task(name="inference client", task_run_name="start inference client", **_setup_task)
def start_inference(config: SkyRLConfig, placement: Placement) -> Inference:
    """Engine actors. Their models load while the trainer's do."""
    factory = load_hook(config.hooks.inference_client, "hooks.inference_client", launch_engines)
    engines, starts = factory(config, placement)
    return Inference(engines, starts)


@task(name="generator", task_run_name="build generator", **_setup_task)
def build_generator(config: SkyRLConfig, tokenizer: "PreTrainedTokenizerBase", inference: Inference) -> Generator:
    """The generator that stages build on their workers, made here once so that mistakes in it show at once."""
    return make_generator(config, tokenizer, inference.engines.client())


@task(name="trainer", task_run_name="start trainer", **_setup_task)
def start_training(config: SkyRLConfig, placement: Placement, generator: Generator, total_steps: int) -> Trainer:
    """Policy and reference ranks with their models loaded."""
    factory = load_hook(config.hooks.trainer, "hooks.trainer", start_trainer)
    trainer: Trainer = factory(config, placement, total_steps)
    return trainer


def make_loader(config: SkyRLConfig, datasets: Datasets) -> PromptLoader:
    """The training prompts in their order."""
    if datasets.train is None:
        raise ConfigurationError("hooks.datasets made no training data")
    workers = config.data.dataloader
    return PromptLoader(
        datasets.train,
        config.trainer.train_batch_size,
        config.trainer.seed,
        workers.num_workers or 0,
        persistent_workers=workers.persistent_workers,
    )
