"""Where the object store is and who may use it: environment variables, handed to Ray workers without being shown."""

import os

STORE_PREFIXES = ("AWS_", "FSSPEC_S3_")


def store_environment() -> dict[str, str]:
    """The variables of this process that say where the object store is and who may use it."""
    return {name: value for name, value in os.environ.items() if name.startswith(STORE_PREFIXES)}
