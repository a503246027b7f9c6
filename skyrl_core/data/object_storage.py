"""Storage on an object store through fsspec: single PUTs are atomic, there are no folders and no rename."""

import errno
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from skyrl_core.data.digests import sha256_of_bytes, sha256_of_stream
from skyrl_core.data.storage import Storage
from skyrl_core.errors import ConfigurationError

_T = TypeVar("_T")


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
    """

    can_rename = False

    def __init__(self, uri: str, effects: Callable[[Any], ObjectEffects] = ObjectEffects) -> None:
        super().__init__(uri.rstrip("/"))
        try:
            # Listings are never cached: another process's commit must be seen at once.
            self._filesystem, self._root = fsspec.core.url_to_fs(self.uri, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"{uri} cannot be used as a storage address: {error}") from error
        self._effects = effects(self._filesystem)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def _call(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        try:
            return function(*args, **options)
        except OSError:
            raise
        except Exception as error:  # Client libraries have exceptions of their own (no route, no credentials).
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.uri) from error

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._call(self._filesystem.open, self._path(path), "rb"))

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
