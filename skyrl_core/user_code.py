"""Loads what the configuration names as `module:attribute` or `path/to/file.py:attribute`.

Nothing is shared between processes: a name is resolved where it is used, so it works in every Ray worker and after Ray
restarts, as long as the module can be imported there, or the file read.
"""

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_core.errors import ConfigurationError

# Episodes run in threads: none may see a module that another is still executing.
_loading = threading.RLock()


def load_callable(name: str, key: str) -> Any:
    """The function or class that `name` means, for the configuration key `key`.

    A file is read once in each process. Raises ConfigurationError when there is no such module or file, when it raises
    while it is imported, or has no such callable.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigurationError(f"{key}={name}: must be written module:function or path/to/file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # user code may raise anything while it is imported
        raise ConfigurationError(
            f"{key}={name}: cannot import {where} ({type(error).__name__}: {error}). A module must be installed or "
            "on PYTHONPATH; a file must be readable under this path on every node"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigurationError(f"{key}={name}: {where} has no {attribute}")
    if not callable(found):
        raise ConfigurationError(f"{key}={name}: {attribute} is not callable")
    return found


def file_digests(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 in hex of each file that `names` load from, by its path. What a file imports in turn is not looked at."""
    paths = sorted({where for where, _, _ in (name.rpartition(":") for name in names) if where.endswith(".py")})
    return {path: hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest() for path in paths}


def _load_file(path: Path) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise FileNotFoundError(f"no such file: {full}")
    # Two files of the same base name must not shadow each other, hence the whole path in the module's name.
    name = f"skyrl_user_file_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:12]}"
    with _loading:
        return sys.modules.get(name) or _execute(name, full)


def _execute(name: str, full: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ImportError(f"{full} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
