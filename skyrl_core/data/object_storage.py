"""Storage on an object store through fsspec: single PUTs are atomic, there are no folders and no rename.

A store that throttles or is away for a moment is asked again: every request here may be repeated, a conditional create
among them, since what it wrote can be recognised.
"""

import errno
import io
import logging
import posixpath
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from skyrl_core.data.digests import sha256_of_bytes, sha256_of_stream
from skyrl_core.data.storage import Storage
from skyrl_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_READ_BYTES = 8 << 20
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_PASSING_NUMBERS = frozenset(
    {errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
# Base classes of botocore and aiohttp, by name: whichever client fsspec uses is imported by fsspec alone.
_PASSING_CLASSES = frozenset({"ConnectionError", "HTTPClientError", "ResponseParserError", "ClientConnectionError"})


class ObjectEffects:
    """Every change made to an object store, one method an effect; each is atomic for its one object."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def put(self, path: str, data: bytes) -> None:
        self._filesystem.pipe_file(path, data)

    def put_file(self, path: str, source: Path) -> None:
        self._filesystem.put_file(str(source), path)

    def put_new(self, path: str, data: bytes) -> None:
        """Put only where nothing is; raises an OSError (FileExistsError where the store says so) otherwise."""
        self._filesystem.pipe_file(path, data, mode="create")

    def copy(self, source: str, target: str) -> None:
        self._filesystem.cp_file(source, target)

    def delete(self, path: str) -> None:
        self._filesystem.rm_file(path)


class ObjectStorage(Storage):
    """A prefix of an fsspec object store (`s3://bucket/prefix`): single PUTs are atomic, there is no rename.

    Credentials and endpoints come from the environment (AWS_*, FSSPEC_S3_*), so that nothing secret is pickled.
    `patience_seconds` is how long a request is repeated while the store cannot be reached or asks to slow down.
    """

    can_rename = False
    patience_seconds = 30.0

    def __init__(self, uri: str, effects: Callable[[Any], ObjectEffects] = ObjectEffects) -> None:
        super().__init__(uri.rstrip("/"))
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(self.uri, **_options(self.uri))
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"{uri} cannot be used as a storage address: {error}") from error
        self._effects = effects(self._filesystem)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def _call(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """The function's result; repeated while it fails in a way that may pass. Raises OSError."""
        deadline = time.monotonic() + self.patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return function(*args, **options)
            except Exception as error:
                left = deadline - time.monotonic()
                if not _may_pass(error) or left <= 0:
                    if isinstance(error, OSError):
                        raise
                    # Client libraries have exceptions of their own (no route, no credentials).
                    raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.uri) from error
                if pause == _FIRST_PAUSE_SECONDS:
                    logger.warning("%s does not answer (%s): trying again for up to %.0f s", self.uri, error, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def open(self, path: str) -> BinaryIO:
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.uri_of(path))

        def read(start: int, stop: int) -> bytes:
            return cast(bytes, self._call(self._filesystem.cat_file, self._path(path), start=start, end=stop))

        return io.BufferedReader(_Ranges(read, size), _READ_BYTES)

    def read(self, path: str) -> bytes:
        return cast(bytes, self._call(self._filesystem.cat_file, self._path(path)))

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            return list(self._call(self._filesystem.ls, self._path(path), detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        try:
            found = self._call(self._filesystem.info, self._path(path))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def modified(self, path: str) -> float:
        return float(self._call(self._filesystem.modified, self._path(path)).timestamp())

    def names(self, path: str) -> list[str]:
        own = self._path(path)
        entries = (str(entry["name"]).rstrip("/") for entry in self._list(path))
        return sorted(posixpath.basename(name) for name in entries if name != own)

    def files(self, path: str) -> list[str]:
        root = self._path(path)
        try:
            found = self._call(self._filesystem.find, root)
        except FileNotFoundError:
            return []
        return sorted(str(name)[len(root) + 1 :] for name in found if str(name).startswith(f"{root}/"))

    def make_folder(self, path: str) -> None:
        return

    def write(self, path: str, source: bytes | Path) -> tuple[int, str]:
        if isinstance(source, bytes):
            self._call(self._effects.put, self._path(path), source)
            return len(source), sha256_of_bytes(source)
        with open(source, "rb") as stream:
            written = sha256_of_stream(stream)
        self._call(self._effects.put_file, self._path(path), source)
        return written

    def publish(self, path: str, data: bytes) -> None:
        self._call(self._effects.put, self._path(path), data)

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._call(self._effects.put_new, self._path(path), data)
        except FileExistsError:
            return False
        except OSError:
            # Stores answer a failed precondition in different words: what is there now tells.
            if self.size(path) is None:
                raise
        return self.read(path) == data

    def remove(self, path: str) -> None:
        if self.size(path) is not None:
            self._call(self._effects.delete, self._path(path))

    def remove_tree(self, path: str) -> None:
        for name in self.files(path):
            self._call(self._effects.delete, f"{self._path(path)}/{name}")

    def sync_tree(self, path: str) -> None:
        return

    def move_folder(self, source: str, target: str) -> None:
        raise OSError(errno.ENOSYS, "object stores cannot rename a folder", self.uri_of(source))

    def copy_file(self, source: str, target: str) -> None:
        self._call(self._effects.copy, self._path(source), self._path(target))


class _Ranges(io.RawIOBase):
    """An object as a stream that asks for one range after the other; `read(start, stop)` fetches a range."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        if stop == self._at:
            return 0
        data = self._read(self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _options(uri: str) -> dict[str, Any]:
    # Listings are never cached: another process's commit must be seen at once.
    options: dict[str, Any] = {"use_listings_cache": False}
    if uri.partition("://")[0] in ("s3", "s3a"):
        # Its client would repeat requests by rules of its own, for a time that nobody can tell.
        configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {**configured, "retries": {"total_max_attempts": 1}}
    return options


def _may_pass(error: Exception) -> bool:
    """True for throttling, time-outs and broken connections; False for what asking again cannot change."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_NUMBERS:
        return True
    return not _PASSING_CLASSES.isdisjoint(kind.__name__ for kind in type(error).__mro__)
