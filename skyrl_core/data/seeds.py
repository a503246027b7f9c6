"""Seeds that depend on what they are for, never on when or where they are asked for."""

import hashlib


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) for the purpose that `parts` names, a pure function of its arguments.

    `parts` are integers and strings, `derive_seed(seed, "rollout", step, uid, sample_index)` for example. Each is
    written with its type and length before hashing (SHA-256), so that ("ab", "c"), ("a", "bc"), (1,) and ("1",) are
    four different purposes. Raises TypeError for any other type (a bool or a float would be a mistake, no purpose).
    """
    digest = hashlib.sha256()
    for part in (run_seed, *parts):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a seed is derived from integers and strings, got {type(part).__name__}: {part!r}")
        kind = b"s" if isinstance(part, str) else b"i"
        text = str(part).encode("utf-8", "surrogatepass")
        digest.update(kind + str(len(text)).encode("ascii") + b":" + text)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
