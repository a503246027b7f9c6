"""What a process imports is what its start costs: only actors pay for the libraries that hold models."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        pytest.param("flows.train", {"torch", "transformers", "vllm", "datasets"}, id="the flow"),
        pytest.param("tasks.stages", {"torch", "transformers", "vllm", "datasets"}, id="a stage's worker"),
        pytest.param("skyrl_core.training.scoring", {"transformers", "vllm"}, id="the score stage"),
        pytest.param("skyrl_core.runtime.actor_host", {"torch", "transformers", "prefect"}, id="an actor's host"),
    ],
)
def test_a_process_imports_only_what_it_uses(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(loaded.stdout.split()) & absent == set()
