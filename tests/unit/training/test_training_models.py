"""Loading a model: what is no complete model is refused; dropout is off; every layer is sharded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from skyrl_core.errors import ConfigurationError
from skyrl_core.training.models import choose_attention, decoder_layers


@pytest.fixture
def copied_model(model_path, tmp_path):
    return Path(shutil.copytree(model_path, tmp_path / "model"))


def test_model_with_missing_weights_is_refused_instead_of_filled_at_random(make_policy, copied_model):
    weights = load_file(copied_model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copied_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lacks 1 of the model's weights, model\.layers\.1\.mlp\.up_proj"):
        make_policy(path=str(copied_model))


def test_cut_short_weights_file_is_a_configuration_error(make_policy, copied_model):
    path = copied_model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"trainer\.policy\.model\.path=.* cannot be loaded"):
        make_policy(path=str(copied_model))


def test_folder_without_a_model_is_named(make_policy, make_reference, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "empty"), str(tmp_path / "absent")):
        with pytest.raises(ConfigurationError, match=rf"trainer\.policy\.model\.path={path} cannot be loaded"):
            make_policy(path=path)
    with pytest.raises(ConfigurationError, match=r"trainer\.ref\.model\.path="):
        make_reference(path=str(tmp_path / "empty"))


def test_dropout_of_the_model_is_off_so_that_the_ratio_starts_at_one(
    make_policy, make_batch, trajectories, copied_model
):
    config = json.loads((copied_model / "config.json").read_text())
    (copied_model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    worker = make_policy(path=str(copied_model))
    assert worker.model.config.attention_dropout == 0.0
    plain = make_policy()
    batch = make_batch(trajectories(seed=1))
    assert worker.update(batch, 1, "a").metrics == plain.update(batch, 1, "a").metrics


def test_every_decoder_layer_and_the_root_are_sharded_in_fp32(make_policy):
    model = make_policy().model
    assert all(isinstance(module, FSDPModule) for module in [*model.model.layers, model])
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_decoder_layers_are_found_by_the_model_s_own_list(model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert decoder_layers(model) == list(model.model.layers)


def test_reference_is_frozen(make_reference):
    model = make_reference().model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_the_cpu_always_uses_sdpa():
    assert choose_attention(True, torch.device("cpu")) == "sdpa"
    assert choose_attention(False, torch.device("cuda")) == "sdpa"
