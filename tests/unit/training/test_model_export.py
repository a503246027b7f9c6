"""A checkpoint as a model folder: the weights of the checkpoint, loadable, and made once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_core.checkpoint.export import export_model
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.errors import CheckpointError
from skyrl_core.training.worker import PolicyWorker

FACTS = {"config_digest": "c", "dataset_fingerprint": "d", "data_position": {}, "world_size": 1, "run_name": "k"}


def checkpoint(policy: PolicyWorker, root: Path, step: int) -> str:
    writer = CheckpointWriter(root, step)
    policy.save(writer.directory, step)
    return writer.commit(policy_version=step, **FACTS).uri  # type: ignore[arg-type]


def test_an_export_holds_the_checkpoints_weights_with_the_models_tokenizer(
    tmp_path: Path,
    model_path: str,
    make_policy: Callable[..., PolicyWorker],
    weights_of: Callable[[PolicyWorker], dict[str, torch.Tensor]],
) -> None:
    policy = make_policy()
    saved = checkpoint(policy, tmp_path / "run", 0)
    folder = export_model(saved, model_path, tmp_path / "exports" / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = weights_of(policy)
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("1+2=") == AutoTokenizer.from_pretrained(model_path).encode("1+2=")

    before = (folder / "model.safetensors").stat().st_mtime_ns
    export_model(saved, model_path, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_missing_checkpoint_makes_no_folder(tmp_path: Path, model_path: str) -> None:
    with pytest.raises(CheckpointError):
        export_model(str(tmp_path / "global_step_3"), model_path, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()
