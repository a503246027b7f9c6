"""The check every reward passes before it is used."""

import math
import numbers

from skyrl_core.errors import RewardError


def check_reward(reward: object, uid: str) -> float:
    """`reward` as a float. Raises RewardError naming the sample for None, NaN, an infinity, or what is no number.

    Python's and NumPy's numbers and truth values pass. A list of per-token rewards does not: it is another kind of
    reward, not a number to be summed on the quiet.
    """
    item = getattr(reward, "item", None)
    value = item() if callable(item) and getattr(reward, "shape", None) == () else reward
    if not isinstance(value, numbers.Real):
        raise RewardError(f"the environment of {uid} returned {_named(value)} as reward; it must be a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the environment of {uid} returned {number} as reward; it must be finite")
    return number


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:40]!r})"
