"""Folders for libraries that only write and read local files, wherever the files belong."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_core.data.storage import open_storage
from skyrl_core.errors import SkyRLError


@contextmanager
def folder_to_write(address: str | Path) -> Iterator[Path]:
    """A local folder whose files will be at `address`: that folder itself, or one that is uploaded when the block ends.

    Nothing is uploaded when the block raises. What is in `address` already stays, so several processes may each upload
    their own files. The scratch folder is made where TMPDIR says. Raises OSError when the upload fails.
    """
    if "://" not in str(address):
        folder = Path(address)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with _scratch(str(address)) as folder:
        yield folder
        storage = open_storage(address)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            storage.write(file.relative_to(folder).as_posix(), file)


@contextmanager
def folder_to_read(address: str | Path) -> Iterator[Path]:
    """A local folder with every file that is at `address`: that folder itself, or a downloaded copy.

    Raises OSError when the download fails; where there is nothing, the folder is empty.
    """
    if "://" not in str(address):
        yield Path(address)
        return
    with _scratch(str(address)) as folder:
        storage = open_storage(address)
        for name in storage.files(""):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with storage.open(name) as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream)
        yield folder


@contextmanager
def _scratch(address: str) -> Iterator[Path]:
    """A temporary folder. Errors of ours that are raised inside name the address instead of it."""
    with tempfile.TemporaryDirectory(prefix="skyrl-flows-") as folder:
        try:
            yield Path(folder)
        except SkyRLError as error:
            if folder not in str(error):
                raise
            raise type(error)(str(error).replace(folder, address)) from error
