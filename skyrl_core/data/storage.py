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
from typing import BinaryIO, ClassVar, cast

from skyrl_core.data.digests import CHUNK_BYTES, sha256_of_bytes, sha256_of_stream
from skyrl_core.errors import StoreError

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

    @abstractmethod
    def modified(self, path: str) -> float:
        """When a file was last written, in seconds since 1970 by the storage's own clock."""

    # changing

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and its parents durably. Object stores have none: nothing is done."""

    @abstractmethod
    def write(self, path: str, source: bytes | Path) -> tuple[int, str]:
        """Write a file; (size, SHA-256) returned. Until `sync_tree` a crash may lose or tear it: no commit point."""

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
        """Copy one file within the storage. Until `sync_tree` a crash may lose or tear it."""


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

    def modified(self, path: str) -> float:
        return self._path(path).stat().st_mtime

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


class _Tee:
    """Hands every chunk that is read to a second consumer."""

    def __init__(self, stream: BinaryIO, consume: Callable[[bytes], None]) -> None:
        self._stream, self._consume = stream, consume

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        chunk = self._stream.read(size)
        if chunk:
            self._consume(chunk)
        return chunk


def open_storage(uri: str | Path | Storage) -> Storage:
    """The storage at an address: a local path, `file://…`, or any fsspec URL. Relative paths are made absolute.

    A storage that is open already is returned as it is. Raises ConfigurationError for an address of an unknown kind.
    """
    if isinstance(uri, Storage):
        return uri
    text = str(uri)
    if text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    if "://" in text:
        from skyrl_core.data.object_storage import ObjectStorage  # It derives from this module's Storage.

        return ObjectStorage(text)
    return LocalStorage(text)


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
