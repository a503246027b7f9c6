"""Workers as they are in a Ray actor. Imported in the actors alone: see actor_host."""

from typing import Any

import ray

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.tokenizer import load_tokenizer
from skyrl_core.inference.transformers_engine import TransformersEngine
from skyrl_core.testing import faults
from skyrl_core.training.worker import PolicyWorker


class PolicyActor(PolicyWorker):
    """A policy rank whose exported weights go to the object store instead of back to the caller."""

    def export_references(self, bucket_bytes: int) -> list[Any]:
        """Object references of the weight buckets: rank 0 has them all, the other ranks none."""
        return [ray.put(bucket) for bucket in self.export_weights(bucket_bytes) if bucket]


class EngineActor(TransformersEngine):
    """An engine that loads in `start` rather than when made, so that a failure keeps its type and message."""

    def __init__(self, config: SkyRLConfig, index: int, device: str) -> None:
        self._config = config
        self._index = index
        self._device_name = device

    def start(self) -> None:
        """Load tokenizer and model. Raises ConfigurationError when the path is no model."""
        trainer, engine = self._config.trainer, self._config.generator.inference_engine
        path = str(trainer.policy.model.path)
        tokenizer = load_tokenizer(
            path, use_fast=not trainer.disable_fast_tokenizer, trust_remote_code=trainer.trust_remote_code
        )
        super().__init__(
            path,
            tokenizer=tokenizer,
            device=self._device_name,
            dtype=engine.model_dtype,
            max_batch_size=engine.max_batch_size,
            trust_remote_code=trainer.trust_remote_code,
            name=f"engine-{self._index}",
        )

    def generate(self, *args: Any) -> Any:
        """See TransformersEngine.generate."""
        faults.point("engine.generate", engine=self._index, version=self.version())
        return super().generate(*args)
