"""What a stage task needs on the Ray worker that runs it: references to actors and store, never data."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.tokenizer import load_tokenizer
from skyrl_core.generators.protocol import Generator, InferenceClient
from skyrl_core.generators.single_turn import SingleTurnGenerator
from skyrl_core.hooks import load_hook
from skyrl_core.runtime.engines import EngineGroup
from skyrl_core.runtime.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StageContext:
    """Handles that travel to a stage task. A plain class: Prefect walks into dataclasses and models, not into this."""

    __slots__ = ("config", "engines", "export_dir", "run_name", "store", "trainer")

    def __init__(
        self,
        *,
        config: SkyRLConfig,
        run_name: str,
        store: RunStore,
        export_dir: str,
        trainer: Trainer | None,
        engines: EngineGroup,
    ) -> None:
        self.config = config
        self.run_name = run_name
        self.store = store
        self.export_dir = export_dir
        self.trainer = trainer
        self.engines = engines

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The run's tokenizer, loaded once per worker process."""
        return _cached_tokenizer(_TokenizerKey(self.config))

    def generator(self, client: InferenceClient) -> Generator:
        """The run's generator over `client`."""
        return make_generator(self.config, self.tokenizer(), client)

    def require_trainer(self) -> Trainer:
        """The trainer; evaluation-only runs have none and never ask."""
        if self.trainer is None:
            raise TypeError("this run has no trainer")
        return self.trainer


class _TokenizerKey:
    """Hashes a configuration by what the tokenizer depends on."""

    def __init__(self, config: SkyRLConfig) -> None:
        self.config = config
        trainer = config.trainer
        self._key = (
            trainer.policy.model.path,
            trainer.disable_fast_tokenizer,
            trainer.trust_remote_code,
            config.hooks.tokenizer,
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TokenizerKey) and self._key == other._key


@lru_cache(maxsize=2)
def _cached_tokenizer(key: _TokenizerKey) -> Any:
    return make_tokenizer(key.config)


def make_tokenizer(config: SkyRLConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer by `hooks.tokenizer`, or the policy model's own."""
    return load_hook(config.hooks.tokenizer, "hooks.tokenizer", _default_tokenizer)(config)


def _default_tokenizer(config: SkyRLConfig) -> "PreTrainedTokenizerBase":
    trainer = config.trainer
    return load_tokenizer(
        str(trainer.policy.model.path),
        use_fast=not trainer.disable_fast_tokenizer,
        trust_remote_code=trainer.trust_remote_code,
    )


def make_generator(config: SkyRLConfig, tokenizer: "PreTrainedTokenizerBase", client: InferenceClient) -> Generator:
    """The generator by `hooks.generator`, or the single-turn one."""
    return load_hook(config.hooks.generator, "hooks.generator", _default_generator)(config, tokenizer, client)  # type: ignore[no-any-return]


def _default_generator(config: SkyRLConfig, tokenizer: "PreTrainedTokenizerBase", client: InferenceClient) -> Generator:
    return SingleTurnGenerator(tokenizer, client, config)
