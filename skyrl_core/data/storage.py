"""Durable reads and writes under one root, on a local folder or an object store, with every effect replaceable.

What a crash may leave behind is decided here: `publish` and `create` show a file whole or not at all, and nothing else
may serve as a commit point.
"""

import errno
import os
import posixpath
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

import fsspec

from skyrl_core.data.digests import CHUNK_BYTES, sha256_of_bytes, sha256_of_stream
from skyrl_core.errors import ConfigurationError, StoreError

_T = TypeVar("_T")
_TEMPORARY_SUFFIX = ".tmp"


class LocalEffects:
    """Every change made to a local disk, one method an effect. Tests replace it to die before the k-th effect."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        with open(path, "ab" if append else "wb") as stream:
            stream.write(data)

    def fsync(self, path: Path) -> None:
        """Flush a file's or folder's content to the disk, also what another process wrote to it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Raises FileExistsError when the target exists."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


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


class Storage(ABC):
    """Files under one root. Paths are relative, with `/`; "" is the root itself.

    Methods raise OSError (FileNotFoundError where something is missing); callers turn it into an error of their own.
    """

    can_rename: ClassVar[bool]

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def uri_of(self, path: str) -> str:
        """The full address of a file or folder under the root."""
        return f"{self.uri}/{path}" if path else self.uri

    # reading

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A binary stream to read."""

    def read(self, path: str) -> bytes:
        with self.open(path) as stream:
            return stream.read()

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is no such file."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Names directly inside a folder, sorted; empty when it does not exist."""

    @abstractmethod
    def files(self, path: str) -> list[str]:
        """Every file below a folder, relative to it, sorted; empty when it does not exist."""

    # changing

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and its parents durably. Object stores have none: nothing is done."""

    @abstractmethod
    def write(self, path: str, source: bytes | Path) -> tuple[int, str]:
        """Write a file durably, (size, SHA-256) returned. A crash may leave a part of it: never a commit point."""

    @abstractmethod
    def publish(self, path: str, data: bytes) -> None:
        """Write or replace a file so that every reader, also after a crash, finds the old or the new one whole."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Publish a file that must not exist. False, and nothing changed, when it does; one of many callers wins."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file if it is there."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it, if it is there."""

    @abstractmethod
    def sync_tree(self, path: str) -> None:
        """Make durable what any process wrote below a folder. Object stores are durable once a write returns."""

    @abstractmethod
    def move_folder(self, source: str, target: str) -> None:
        """Rename a folder atomically and durably; the target must not exist. Only where `can_rename`."""

    @abstractmethod
    def copy_file(self, source: str, target: str) -> None:
        """Copy one file durably within the storage."""


class LocalStorage(Storage):
    """A folder of this machine or of a shared file system."""

    can_rename = True

    def __init__(self, root: str | Path, effects: LocalEffects | None = None) -> None:
        super().__init__(os.path.abspath(root))
        self._root = Path(self.uri)
        self._effects = effects or LocalEffects()

    def _path(self, path: str) -> Path:
        return self._root / path if path else self._root

    def open(self, path: str) -> BinaryIO:
        return open(self._path(path), "rb")

    def size(self, path: str) -> int | None:
        target = self._path(path)
        try:
            return target.stat().st_size if target.is_file() else None
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, path: str) -> list[str]:
        root = self._path(path)
        found = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
        return sorted(item.relative_to(root).as_posix() for item in found)

    def make_folder(self, path: str) -> None:
        missing, folder = [], self._path(path)
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            self._effects.make_folder(folder)
            self._effects.fsync(folder.parent)

    def write(self, path: str, source: bytes | Path) -> tuple[int, str]:
        target = self._path(path)
        written = self._write_chunks(target, source)
        self._effects.fsync(target)
        return written

    def _write_chunks(self, target: Path, source: bytes | Path) -> tuple[int, str]:
        self._effects.write(target, source if isinstance(source, bytes) else b"", append=False)
        if isinstance(source, bytes):
            return len(source), sha256_of_bytes(source)
        with open(source, "rb") as stream:
            return sha256_of_stream(cast(BinaryIO, _Tee(stream, lambda c: self._effects.write(target, c, append=True))))

    def _write_aside(self, target: Path, data: bytes) -> Path:
        self.make_folder(os.path.relpath(target.parent, self._root))
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
        self._effects.write(aside, data, append=False)
        self._effects.fsync(aside)
        return aside

    def publish(self, path: str, data: bytes) -> None:
        target = self._path(path)
        self._effects.replace(self._write_aside(target, data), target)
        self._effects.fsync(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        target = self._path(path)
        aside = self._write_aside(target, data)
        try:
            self._effects.link(aside, target)
        except FileExistsError:
            return False
        finally:
            self._effects.remove(aside)
        self._effects.fsync(target.parent)
        return True

    def remove(self, path: str) -> None:
        target = self._path(path)
        if target.exists():
            self._effects.remove(target)
            self._effects.fsync(target.parent)

    def remove_tree(self, path: str) -> None:
        root = self._path(path)
        if not root.is_dir():
            return
        for folder, _, names in os.walk(root, topdown=False):
            for name in sorted(names):
                self._effects.remove(Path(folder, name))
            self._effects.remove_folder(Path(folder))
        self._effects.fsync(root.parent)

    def sync_tree(self, path: str) -> None:
        for folder, _, names in os.walk(self._path(path), topdown=False):
            for name in sorted(names):
                self._effects.fsync(Path(folder, name))
            self._effects.fsync(Path(folder))

    def move_folder(self, source: str, target: str) -> None:
        if self._path(target).exists():
            raise FileExistsError(errno.EEXIST, "the target of a folder's rename exists", str(self._path(target)))
        self._effects.replace(self._path(source), self._path(target))
        self._effects.fsync(self._path(target).parent)

    def copy_file(self, source: str, target: str) -> None:
        self.make_folder(posixpath.dirname(target))
        self.write(target, self._path(source))


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


class _Tee:
    """Hands every chunk that is read to a second consumer."""

    def __init__(self, stream: BinaryIO, consume: Callable[[bytes], None]) -> None:
        self._stream, self._consume = stream, consume

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        chunk = self._stream.read(size)
        if chunk:
            self._consume(chunk)
        return chunk


def open_storage(uri: str | Path) -> Storage:
    """The storage at an address: a local path, `file://…`, or any fsspec URL. Relative paths are made absolute.

    Raises ConfigurationError for an address of an unknown kind.
    """
    text = str(uri)
    if text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    return ObjectStorage(text) if "://" in text else LocalStorage(text)


def is_temporary(name: str) -> bool:
    """True for what `publish` or `create` left beside its target when it was killed."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write or replace a local file so that it is never seen torn, also after a power cut. Makes its folder.

    Raises StoreError naming the file.
    """
    target = Path(path)
    try:
        LocalStorage(target.parent).publish(target.name, data)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error}") from error


def iterate_temporary(storage: Storage, folder: str) -> Iterator[str]:
    """Paths of leftovers of killed publishes directly inside a folder."""
    for name in storage.names(folder):
        if is_temporary(name):
            yield f"{folder}/{name}" if folder else name
