"""The team stack on this machine: an S3 server, PostgreSQL, and a Prefect server on it, one each for all tests."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import new_project
from tests.integration.operations.stack import services
from tests.integration.operations.stack.services import BUCKET, Server

__all__ = ["new_project"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3:
    """The S3 server; `environment` holds its endpoint and credentials as AWS_* variables."""

    server: Server
    environment: dict[str, str]

    def uri(self, prefix: str) -> str:
        """Address of a prefix in the tests' bucket."""
        return f"s3://{BUCKET}/{prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefect:
    """The Prefect server on PostgreSQL."""

    server: Server
    api_url: str


@pytest.fixture(scope="session")
def s3_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """SeaweedFS with the bucket `team`, as an object that can stop and start it."""
    server, environment = services.s3_server(tmp_path_factory.mktemp("s3"))
    with server.running():
        yield S3(server=server, environment=environment)


@pytest.fixture(scope="session")
def s3_server(s3_stack: S3) -> dict[str, str]:
    """Endpoint and credentials of the S3 server as AWS_* variables."""
    return s3_stack.environment


@pytest.fixture(scope="session")
def prefect_stack(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Prefect]:
    """A Prefect server on PostgreSQL, as an object that can stop and start it."""
    server, api_url = services.prefect_server(tmp_path_factory.mktemp("prefect-server"), postgres)
    with server.running():
        yield Prefect(server=server, api_url=api_url)


@pytest.fixture(scope="session")
def prefect_server(prefect_stack: Prefect) -> str:
    """Address of the API of a Prefect server on PostgreSQL."""
    return prefect_stack.api_url


@pytest.fixture(scope="session")
def prefect_api(prefect_server: str) -> str:
    """The server that `new_project` points its commands to."""
    return prefect_server


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's sessions and logs. Its sockets lie there too, so its path must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodes:
    """A Ray cluster of two nodes; `environment` is that of a program that joins it."""

    head: Server
    second: Server
    environment: dict[str, str]
    folder: Path


@pytest.fixture
def ray_cluster(ray_folder: Path) -> Iterator[RayNodes]:
    """Two real Ray nodes of one CPU each."""
    head, second, environment = services.ray_nodes(ray_folder)
    with head.running(), second.running():
        yield RayNodes(head=head, second=second, environment=environment, folder=ray_folder)
