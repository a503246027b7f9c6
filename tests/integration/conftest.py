"""One local Ray for all integration tests: starting it takes as long as most of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_core.runtime.cluster import RayCluster, ensure_ray
from skyrl_core.testing.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """A local Ray with four logical CPUs."""
    os.environ.pop("RAY_ADDRESS", None)
    with ensure_ray("tests", num_cpus=4) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of a few ten thousand parameters."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
