"""`skyrl-flows doctor` with the whole team stack running, and with each service stopped in turn: it is named."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import COMMAND, Project
from tests.integration.operations.stack.conftest import S3, Prefect, RayNodes

pytestmark = pytest.mark.service

Findings = dict[str, dict[str, str]]


def doctor(project: Project, *words: str) -> tuple[int, Findings]:
    """Exit code and findings by check."""
    command = [*COMMAND, "doctor", "--json", "--config", str(project.config), *words]
    result = subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.startswith("["), result.stdout + result.stderr
    assert "only-on-loopback" not in result.stdout + result.stderr
    return result.returncode, {found["check"]: found for found in json.loads(result.stdout)}


def failed(findings: Findings) -> list[str]:
    return [name for name, found in findings.items() if found["status"] == "fail"]


@contextmanager
def frozen(process: "subprocess.Popen[bytes] | None"):
    """The process does not run inside the block: it keeps its port and answers nothing."""
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_all_is_well_then_each_service_is_stopped_in_turn_and_named(
    new_project: Callable[[], Project], s3_stack: S3, prefect_stack: Prefect, postgres: str, ray_cluster: RayNodes
) -> None:
    project = new_project()
    project.environment |= s3_stack.environment | ray_cluster.environment
    project.environment |= {"PREFECT_API_DATABASE_CONNECTION_URL": postgres}
    store = f"trainer.ckpt_path={s3_stack.uri(uuid.uuid4().hex)}"

    code, found = doctor(project, store)
    assert (code, failed(found)) == (0, []), found
    assert "3.7.7" in found["Prefect"]["message"]
    assert found["database"]["message"] == "PostgreSQL with pg_trgm"
    assert "2 node(s), Ray 2.60.0, CPU: 1 of 2 asked for" in found["Ray"]["message"]
    assert found["store"]["message"].endswith("write, read, create once, delete work")

    code, found = doctor(project, store, "generator.inference_engine.num_engines=3",
                         "trainer.placement.colocate_all=false")  # fmt: skip
    assert (code, failed(found)) == (1, ["Ray"])
    assert "CPU: 4 of 2 asked for" in found["Ray"]["message"]

    with prefect_stack.server.stopped():
        code, found = doctor(project, store)
        assert (code, failed(found)) == (1, ["Prefect"])
        assert f"{prefect_stack.api_url} does not answer" in found["Prefect"]["message"]
    with frozen(prefect_stack.server.process):
        code, found = doctor(project, store)
        assert (code, failed(found)) == (1, ["Prefect"])
    with s3_stack.server.stopped():
        code, found = doctor(project, store)
        assert (code, failed(found)) == (1, ["store"])
        assert s3_stack.environment["AWS_ENDPOINT_URL"] in found["store"]["advice"]
    token = project.environment.pop("RAY_AUTH_MODE")
    code, found = doctor(project, store)
    assert (code, failed(found)) == (1, ["Ray"])
    assert "RAY_AUTH_TOKEN_PATH" in found["Ray"]["advice"]
    project.environment["RAY_AUTH_MODE"] = token
    ray_cluster.second.stop()
    ray_cluster.head.stop()
    code, found = doctor(project, store)
    assert (code, failed(found)) == (1, ["Ray"])
    assert ray_cluster.environment["RAY_ADDRESS"] in found["Ray"]["message"]


def test_wrong_credentials_and_a_database_that_is_away_are_named(
    new_project: Callable[[], Project], s3_stack: S3
) -> None:
    project = new_project()
    project.environment |= {**s3_stack.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    project.environment |= {
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://me:hunter2@127.0.0.1:9/prefect"
    }
    code, found = doctor(project, f"trainer.ckpt_path={s3_stack.uri('doctor')}")
    assert (code, failed(found)) == (1, ["store", "database"])
    assert "AWS_* credentials" in found["store"]["advice"]
    assert "hunter2" not in json.dumps(found)
