"""What every configuration section shares: frozen, strict, no unknown keys; and the field types they use."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

ItemT = TypeVar("ItemT")


class Section(BaseModel):
    """Base of all sections. Values are checked strictly: `"2"` is not a number and `1` is not a truth value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


def ours(description: str) -> str:
    """Marks the description of a key that SkyRL does not have."""
    return f"ours: {description}"


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _expand_home(path: str) -> str:
    return os.path.expanduser(path)


_MODULE_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILE_ATTRIBUTE = re.compile(r"(?P<path>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


def own_code(name: str) -> str:
    """`module:attribute` as it is, `path/to/file.py:attribute` with its path made absolute: workers start elsewhere.

    Raises ValueError for anything else.
    """
    if file := _FILE_ATTRIBUTE.fullmatch(name):
        return f"{Path(file['path']).expanduser().absolute()}:{file['attribute']}"
    if _MODULE_ATTRIBUTE.fullmatch(name):
        return name
    raise ValueError("must be written module:function or path/to/file.py:function")


OwnCode = Annotated[str, AfterValidator(own_code)]
"""A function or class of the user's: `module:name` or `path/to/file.py:name`."""

Items = Annotated[tuple[ItemT, ...], BeforeValidator(_to_tuple)]
"""A list in YAML, an immutable tuple in Python."""

Pair = Annotated[tuple[ItemT, ItemT], BeforeValidator(_to_tuple)]

PathText = Annotated[str, AfterValidator(_expand_home)]
"""A path or URI; a leading `~` becomes the home folder."""

Count = Annotated[int, Field(ge=1)]
"""A number of things of which at least one is needed."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]

NonNegative = Annotated[float, Field(ge=0.0)]

Positive = Annotated[float, Field(gt=0.0)]

EveryNSteps = int
"""An interval in steps; 0 or below means never."""
