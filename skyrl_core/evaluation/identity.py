"""Which evaluations may be compared: those of the same prompts, sampled in the same way."""

from typing import Any

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.digests import digest_of

# What a rollout of training depends on and an evaluation does not, and where and how fast it is computed.
_TRAINING_ONLY = {"sampling_params", "eval_sampling_params", "n_samples_per_prompt", "batched", "inference_engine"}


def evaluation_settings(config: SkyRLConfig) -> str:
    """Digest of everything an evaluation depends on besides weights and prompts."""
    generator, trainer = config.generator, config.trainer
    sampling = generator.eval_sampling_params or generator.sampling_params
    others: dict[str, Any] = generator.model_dump(mode="json", exclude=_TRAINING_ONLY)
    return digest_of(
        {
            "sampling": sampling.model_dump(mode="json"),
            "generator": others,
            "greedy": trainer.eval_greedy,
            "seed": trainer.seed,
            "environment": config.environment.model_dump(mode="json"),
        }
    )


def evaluation_identity(config: SkyRLConfig, prompts_sha256: str) -> str:
    """Digest of the serialized prompts' digest and the settings. Scores under one identity may be compared."""
    return digest_of({"prompts": prompts_sha256, "settings": evaluation_settings(config)})
