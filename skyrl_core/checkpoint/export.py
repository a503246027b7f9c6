"""A checkpoint's policy as a model folder in Hugging Face format, for transformers, vLLM, or the next run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.recipes.folder import make_folder
from skyrl_core.training.sharded_state import read_policy_weights


def export_model(checkpoint: str, base_model: str, folder: Path, *, trust_remote_code: bool = False) -> Path:
    """Make `folder` from a checkpoint's weights and the configuration and tokenizer of the model it was trained from.

    A folder made from the same checkpoint stands. Weights keep the precision they were saved in. Raises CheckpointError
    when the checkpoint is missing or damaged, ConfigurationError when `folder` holds something else.
    """
    saved, manifest = checkpoint_at(checkpoint)

    def build(partial: Path) -> Mapping[str, Any]:
        from huggingface_hub import save_torch_state_dict
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        model_config = AutoConfig.from_pretrained(base_model, trust_remote_code=trust_remote_code)
        model_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(base_model, trust_remote_code=trust_remote_code).save_pretrained(partial)
        try:
            generation = GenerationConfig.from_pretrained(base_model, trust_remote_code=trust_remote_code)
        except OSError:  # the base model has none of its own
            generation = GenerationConfig.from_model_config(model_config)
        generation.save_pretrained(partial)
        save_torch_state_dict(read_policy_weights(checkpoint), partial)
        return {
            "made_from": f"{manifest.run_name}, step {saved.step}",
            "content_digest": manifest.content_digest,
            "code_version": manifest.code_version,
        }

    made, _ = make_folder(folder, build)
    if made.get("content_digest") != manifest.content_digest:
        make_folder(folder, build, force=True)
    return folder
