"""What every configuration section shares: frozen, strict, no unknown keys; and the field types they use."""

import os
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
