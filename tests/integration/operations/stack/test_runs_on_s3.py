"""The main job with store and checkpoints on S3: killed with -9 and continued, bit for bit, showing no secret."""

import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from tests.e2e.conftest import RUN, Project
from tests.integration.operations.stack.conftest import S3
from tests.integration.operations.stack.services import SECRET_KEY, s3_filesystem

pytestmark = pytest.mark.service

SHORT = [RUN, "trainer.max_training_steps=3", "trainer.ckpt_interval=1", "trainer.eval_interval=3"]


def local_weights(project: Project, step: int) -> dict[str, torch.Tensor]:
    files = sorted((project.checkpoint("k", step) / "policy").glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def remote_weights(s3: S3, root: str, step: int) -> dict[str, torch.Tensor]:
    client = s3_filesystem(s3.environment)
    files = sorted(client.glob(f"{root}/k/global_step_{step}/policy/*.safetensors"))
    return {
        f"{Path(file).name}/{name}": tensor for file in files for name, tensor in load(client.cat_file(file)).items()
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 10
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def prefect_record(api_url: str) -> str:
    """Everything the server keeps of flow runs, task runs, logs, events and artifacts, as text."""
    kinds = ("flow_runs", "task_runs", "logs", "events", "artifacts")
    answers = [httpx.post(f"{api_url}/{kind}/filter", json={}, timeout=30.0) for kind in kinds]
    assert all(answer.is_success for answer in answers)
    return "".join(answer.text for answer in answers)


def test_a_run_on_s3_killed_with_9_continues_bit_for_bit_and_shows_no_secret(
    new_project: Callable[[], Project], s3_stack: S3, prefect_server: str, ray_folder: Path
) -> None:
    local, remote = new_project(), new_project()
    local.run(*SHORT)
    root = s3_stack.uri(uuid.uuid4().hex)
    remote.environment |= s3_stack.environment | {"RAY_TMPDIR": str(ray_folder)}
    words = [*SHORT, f"trainer.ckpt_path={root}"]
    killed = remote.start(*words, faults="update.between_minibatches@step=2,minibatch=0:kill-flow")
    output, _ = killed.communicate(timeout=900)
    assert killed.returncode == -signal.SIGKILL, output
    output += remote.run(*words)
    assert "restoring checkpoint global_step_1" in output
    assert_equal(remote_weights(s3_stack, root, 3), local_weights(local, 3))
    assert [line.step for line in remote.metrics("k")] == [0, 1, 2, 3]
    assert not list((remote.root / "checkpoints").glob("*"))

    output += remote.run("--checkpoint", f"{root}/k/global_step_3", command="evaluate")
    final = remote.metrics("k")[-1].metrics["eval/all/avg_score"]
    assert f"{final:.3f}"[:5] in output

    logs = [path for path in ray_folder.rglob("*") if path.is_file() and "log" in path.parts[-2]]
    assert any(path.name.startswith("runtime_env_agent") for path in logs)
    seen = output + prefect_record(prefect_server) + "".join(path.read_text(errors="replace") for path in logs)
    assert SECRET_KEY not in seen
    kept = s3_filesystem(s3_stack.environment)
    assert all(SECRET_KEY.encode() not in kept.cat_file(name) for name in kept.find(root))
