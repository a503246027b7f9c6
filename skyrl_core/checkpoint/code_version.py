"""Which code wrote a checkpoint: the package's version, with the commit when it runs from a git checkout."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_GIT_SECONDS = 10


@cache
def code_version() -> str:
    """`0.1.0`, or `0.1.0+g1a2b3c4d5e6f` (`.dirty` appended when tracked files were changed)."""
    try:
        release = version("skyrl-flows")
    except PackageNotFoundError:
        release = "unknown"
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return release
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=.dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release}+g{result.stdout.strip()}"
