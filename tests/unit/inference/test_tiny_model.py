"""The tiny model that tests build on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_core.testing.tiny_model import build_tiny_model


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_be(tmp_path: Path):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = _weights(build_tiny_model(tmp_path / "first", seed=3))
    assert torch.equal(torch.rand(1), expected)
    second = _weights(build_tiny_model(tmp_path / "second", seed=3))
    other = _weights(build_tiny_model(tmp_path / "other", seed=4))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    name = "model.embed_tokens.weight"
    assert not torch.equal(first[name], other[name])


def test_only_an_untied_model_has_a_head_of_its_own(tied_model: Path, untied_model: Path):
    assert "lm_head.weight" not in _weights(tied_model)
    assert "lm_head.weight" in _weights(untied_model)


def test_each_character_is_a_token_and_unknown_ones_are_marked(tokenizer: Any):
    assert tokenizer.encode("09a+", add_special_tokens=False) == [8, 17, 18, 8 + 10 + 52 + 1]
    assert tokenizer.encode("é", add_special_tokens=False) == [3]
    assert tokenizer.decode([8, 9, 2], skip_special_tokens=True) == "01"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_a_vocabulary_with_a_character_twice_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="twice"):
        build_tiny_model(tmp_path, vocab="aa")
