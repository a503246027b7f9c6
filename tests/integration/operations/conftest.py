"""The team stack, each part real: PostgreSQL, a Prefect server on it, process workers, deployments, a tiny project."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from skyrl_core.testing.tiny_model import build_tiny_model
from tests.e2e.conftest import DIGIT_ENV, TINY_CONFIG, armed, write_problems
from tests.integration.operations.stack import services

REPOSITORY = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.3


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 300.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout:g} s"
        time.sleep(POLL_SECONDS)


def end(process: "subprocess.Popen[Any]") -> None:
    """End a process and everything below it."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=20)
        for member in alive:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A real PostgreSQL on a free port; yields its address as Prefect takes it."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    assert binaries, "PostgreSQL is not installed; on Debian: apt-get install postgresql"
    # Not below pytest's folder: that one is closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    (port,) = services.free_ports(1)
    # PostgreSQL refuses to run as root; its package brings a user.
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    if as_user:
        shutil.chown(folder, "postgres", "postgres")

    def run(*words: str) -> None:
        result = subprocess.run([*as_user, *words], cwd=folder, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    bin_folder, data = binaries[-1], folder / "data"
    run(str(bin_folder / "initdb"), "-D", str(data), "-U", "prefect", "--auth=trust", "--encoding=UTF8", "--locale=C")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    run(str(bin_folder / "pg_ctl"), "-D", str(data), "-l", str(folder / "log"), "-o", options, "-w", "start")
    try:
        run(str(bin_folder / "psql"), "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "postgres", "-c",
            "CREATE DATABASE prefect")  # fmt: skip
        run(str(bin_folder / "psql"), "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "prefect", "-c",
            "CREATE EXTENSION pg_trgm")  # fmt: skip
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"
    finally:
        run(str(bin_folder / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def team_server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on PostgreSQL; yields its API's address."""
    server, api_url = services.prefect_server(tmp_path_factory.mktemp("team-server"), postgres)
    with server.running():
        yield api_url


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead a child to another server, cluster or fault."""
    dropped = ("SKYRL_FLOWS_", "PREFECT_", "RAY_ADDRESS")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


@dataclass(slots=True, kw_only=True)
class Team:
    """A project folder deployed to a server, with commands, workers and queries."""

    root: Path
    api_url: str
    client: SyncPrefectClient
    pool: str
    environment: dict[str, str]
    processes: list["subprocess.Popen[Any]"] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def command(self, *words: str, timeout: float = 300.0) -> str:
        """`skyrl-flows words` in the project; returns its output."""
        result = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def deploy(self, **changes: Any) -> str:
        """Deploy with this project's configuration; `changes` are laid over each deployment of that name."""
        import yaml

        folder = self.root / "deployments"
        shutil.copytree(REPOSITORY / "deployments", folder, dirs_exist_ok=True)
        file = folder / "prefect.yaml"
        project = yaml.safe_load(file.read_text())
        for item in project["deployments"]:
            if "config" in item.get("parameters", {}):
                item["parameters"]["config"] = str(self.config)
            item.update(changes.get(item["name"].replace("-", "_"), {}))
            if "schedules" in item and item["name"].replace("-", "_") not in changes:
                item["schedules"] = []
        file.write_text(yaml.safe_dump(project))
        return self.command("deploy", "--pool", self.pool)

    def worker(self, queue: str, faults: str | None = None) -> "subprocess.Popen[Any]":
        """Start a process worker for one queue."""
        environment = self.environment | armed(self.root, faults)
        words = ["worker", "start", "--pool", self.pool, "--work-queue", queue, "--type", "process", "--name", queue]
        with (self.root / f"worker-{queue}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *words],
                cwd=self.root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def start(self, deployment: str, **parameters: Any) -> FlowRun:
        """Ask the server for a run of `flow/deployment`."""
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters)

    def runs(self, deployment: str) -> list[FlowRun]:
        """This project's flow runs of a deployment, the earliest first; projects share the server's deployments."""
        found = self.client.read_deployment_by_name(deployment)
        answer = self.client._client.post(
            "/flow_runs/filter",
            json={"deployments": {"id": {"any_": [str(found.id)]}}, "sort": "EXPECTED_START_TIME_ASC"},
        )
        runs = [FlowRun.model_validate(item) for item in answer.json()]
        return [run for run in runs if str(self.root) in str(run.parameters)]

    def state(self, run: FlowRun) -> str:
        """Name of a run's present state."""
        return str(self.client.read_flow_run(run.id).state_name)

    def ended(self, run: FlowRun, timeout: float = 600.0) -> FlowRun:
        """The run once it is in a final state."""

        def final() -> FlowRun | None:
            found = self.client.read_flow_run(run.id)
            return found if found.state is not None and found.state.is_final() else None

        result: FlowRun = wait_for(final, f"the end of {run.name} ({self.state(run)})", timeout)
        return result

    def logs(self, queue: str) -> str:
        return (self.root / f"worker-{queue}.log").read_text()


@pytest.fixture
def new_team(team_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Team]]:
    """Makes projects on the team's server; their workers and every process below them end with the test."""
    made: list[Team] = []
    with temporary_settings({PREFECT_API_URL: team_server}), get_client(sync_client=True) as client:

        def make(pool: str, environment: Mapping[str, str] | None = None) -> Team:
            root = tmp_path_factory.mktemp(pool)
            write_problems(root / "train.parquet", 0, 14)
            write_problems(root / "test.parquet", 50, 8)
            build_tiny_model(root / "model")
            (root / "digit_env.py").write_text(DIGIT_ENV)
            (root / "config.yaml").write_text(TINY_CONFIG.format(root=root))
            variables = {
                **clean_environment(),
                "PREFECT_API_URL": team_server,
                "PREFECT_HOME": str(root / "prefect"),
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "PYTHONPATH": os.pathsep.join([str(root), str(REPOSITORY)]),
                **(environment or {}),
            }
            made.append(Team(root=root, api_url=team_server, client=client, pool=pool, environment=variables))
            return made[-1]

        yield make
        for team in made:
            for process in team.processes:
                end(process)
