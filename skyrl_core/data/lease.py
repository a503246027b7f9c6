"""One writer per run name: a lease with a growing fencing token, kept as files in the run's own store.

Token files are created exclusively and never removed, so tokens only grow. A holder that lives is respected, a dead one
superseded at once; a superseded process that wakes up again finds the higher token before it can publish anything.
"""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from skyrl_core.data.digests import canonical_json, parse_json
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.errors import LeaseLostError, RunBusyError, StoreError

logger = logging.getLogger(__name__)

FOLDER = "lease"
_TOKEN_FILE = re.compile(r"token_(\d{8})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """Who holds, or held, a token. Times are seconds since 1970 by the holder's clock.

    `boot_id`, `pid_namespace` and `process_start` tell whether `pid` can be looked up from here and still is the same
    process. `info` is the holder's own text (`flow_run_id`, …).
    """

    token: int
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start: str
    acquired_at: float
    heartbeat_at: float
    ttl_seconds: float
    nonce: str
    released: bool = False
    info: Mapping[str, str] = field(default_factory=dict)


class Lease:
    """The right to write a run, held until `release`. Usable as a context manager. Not picklable: pass `token` on.

    `previous` is the dead holder that this lease superseded, or None when the run was free.
    """

    def __init__(self, storage: Storage, holder: LeaseHolder, previous: LeaseHolder | None) -> None:
        self.previous = previous
        self._storage = storage
        self._holder = holder
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{holder.token}", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        store_root: str | Path | Storage,
        owner_info: Mapping[str, str] | None = None,
        ttl_seconds: float = 60.0,
    ) -> Self:
        """Become the writer of the run at `store_root`.

        A holder in a process that can be looked up from here lives while its process does; any other one while its
        heartbeat is younger than its own ttl. Clocks of machines that share a store must agree within the ttl.

        Raises RunBusyError when the holder lives, StoreError when the store cannot be used.
        """
        storage = open_storage(store_root)
        try:
            while True:
                newest = _highest_token(storage)
                holder = _read_holder(storage, newest) if newest else None
                if holder is not None and not holder.released and _is_alive(holder):
                    raise RunBusyError(_busy_message(storage, holder))
                mine = _describe_self(newest + 1, owner_info or {}, ttl_seconds)
                if storage.create(_token_path(mine.token), _encode(mine)):
                    previous = holder if holder is not None and not holder.released else None
                    return cls(storage, mine, previous)
        except OSError as error:
            raise StoreError(f"the lease of the run at {storage.uri} cannot be taken: {error}") from error

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier writer of this run."""
        return self._holder.token

    @property
    def info(self) -> Mapping[str, str]:
        """What this holder says about itself."""
        return self._holder.info

    def check(self) -> None:
        """Raises LeaseLostError when a newer writer took the run over."""
        verify_fence(self._storage, self.token)

    def update(self, **info: str) -> None:
        """Add to the information others see about this holder; written before it returns. Raises StoreError."""
        try:
            self._write(info={**self._holder.info, **info})
        except OSError as error:
            raise StoreError(f"the lease at {self._storage.uri} cannot be written: {error}") from error

    def release(self) -> None:
        """Give the run free. Idempotent; the token stays used. Raises StoreError when the store cannot be written."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        try:
            self._write(released=True)
        except OSError as error:
            raise StoreError(f"the lease at {self._storage.uri} cannot be released: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._holder = replace(self._holder, heartbeat_at=time.time(), **changes)
            self._storage.publish(_token_path(self.token), _encode(self._holder))

    def _beat(self) -> None:
        while not self._stop.wait(self._holder.ttl_seconds / 4):
            try:
                self._write()
            except OSError as error:
                # The next beat tries again; should the store stay away, publishing fails there with its own error.
                logger.warning("heartbeat of the lease at %s failed: %s", self._storage.uri, error)


def verify_fence(storage: Storage, token: int) -> None:
    """Raises LeaseLostError when a writer newer than `token` exists, StoreError when that cannot be found out."""
    try:
        newest = _highest_token(storage)
    except OSError as error:
        raise StoreError(f"the lease of the run at {storage.uri} cannot be read: {error}") from error
    if newest > token:
        holder = _read_holder(storage, newest)
        who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
        raise LeaseLostError(
            f"{who} took over the run at {storage.uri} (token {newest}, this process holds {token}): "
            "nothing more is written by this process; let the newer one go on"
        )


def _token_path(token: int) -> str:
    return f"{FOLDER}/token_{token:08d}.json"


def _highest_token(storage: Storage) -> int:
    matches = (_TOKEN_FILE.fullmatch(name) for name in storage.names(FOLDER))
    return max((int(match[1]) for match in matches if match), default=0)


def _encode(holder: LeaseHolder) -> bytes:
    return canonical_json(asdict(holder), indent=1)


def _read_holder(storage: Storage, token: int) -> LeaseHolder | None:
    path = _token_path(token)
    try:
        return LeaseHolder(**parse_json(storage.read(path)))
    except (ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s): its holder is taken for dead", storage.uri_of(path), error)
        return None


def _describe_self(token: int, info: Mapping[str, str], ttl_seconds: float) -> LeaseHolder:
    now = time.time()
    return LeaseHolder(
        token=token,
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        acquired_at=now,
        heartbeat_at=now,
        ttl_seconds=ttl_seconds,
        nonce=secrets.token_hex(8),
        info=dict(info),
    )


def _is_alive(holder: LeaseHolder) -> bool:
    if holder.boot_id == _boot_id() and holder.pid_namespace == _pid_namespace():
        return _process_start(holder.pid) == holder.process_start
    return time.time() - holder.heartbeat_at < holder.ttl_seconds


def _boot_id() -> str:
    """One value per boot of one machine; containers of a machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}@{psutil.boot_time():.0f}"


def _pid_namespace() -> str:
    """Process ids mean something only inside one namespace (each container has its own)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When a process started, so that a reused id is not mistaken for it; None when it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        try:
            # Ticks since boot, unlike a wall-clock start time, stay the same when the clock is set.
            stat = Path(f"/proc/{pid}/stat").read_text()
            return f"tick {stat.rpartition(')')[2].split()[19]}"
        except FileNotFoundError:
            return f"time {process.create_time():.2f}"
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def _busy_message(storage: Storage, holder: LeaseHolder) -> str:
    since = datetime.fromtimestamp(holder.acquired_at, UTC).isoformat(timespec="seconds")
    age = max(0.0, time.time() - holder.heartbeat_at)
    details = "".join(f", {key} {value}" for key, value in sorted(holder.info.items()))
    return (
        f"the run at {storage.uri} is being written by process {holder.pid} on {holder.host} since {since} "
        f"(last heartbeat {age:.0f} s ago{details}). Wait until it ends, end that process, or choose another "
        f"trainer.run_name. A holder that cannot be looked up counts as dead {holder.ttl_seconds:.0f} s after its "
        "last heartbeat."
    )
