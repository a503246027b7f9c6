"""Tiny models that the engine tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_core.testing.tiny_model import build_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tied") / "model", max_position_embeddings=64)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("untied") / "model", tied=False, seed=1, max_position_embeddings=64)


@pytest.fixture(scope="session")
def tokenizer(tied_model: Path) -> Any:
    from skyrl_core.data.tokenizer import load_tokenizer

    return load_tokenizer(str(tied_model))
