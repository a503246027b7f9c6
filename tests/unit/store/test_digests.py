"""Canonical JSON is the same for the same content, exact for every number, and refuses what it cannot hold."""

import hashlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.data.digests import (
    CHUNK_BYTES,
    canonical_json,
    digest_of,
    parse_json,
    sha256_of_bytes,
    sha256_of_file,
    sha256_of_stream,
)

# FIPS 180-2, appendix B.1.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda k: k != "$float"), inner),
    max_leaves=10,
)


def test_the_canonical_form_is_sorted_compact_ascii() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, True, "é"]}) == b'{"a":[1.5,null,true,"\\u00e9"],"b":1}'
    assert digest_of({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


def test_order_of_keys_and_numpy_types_do_not_change_a_digest_but_values_do() -> None:
    assert digest_of({"a": np.int64(3), "b": np.array([1, 2])}) == digest_of({"b": (1, 2), "a": 3})
    assert len({digest_of(value) for value in (1, 1.0, True, "1", None, [1], {"a": 1})}) == 7


@given(trees)
def test_what_is_written_is_read_back_exactly(value: Any) -> None:
    assert parse_json(canonical_json(value)) == value
    assert parse_json(canonical_json(value, indent=2)) == value


def test_nan_and_infinities_survive_in_valid_json() -> None:
    data = canonical_json({"loss": math.nan, "high": math.inf, "low": [-math.inf], "zero": -0.0})
    assert b"NaN" not in data
    assert b"Infinity" not in data
    back = parse_json(data)
    assert math.isnan(back["loss"])
    assert (back["high"], back["low"]) == (math.inf, [-math.inf])
    assert math.copysign(1, back["zero"]) == -1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [{"b": object()}]}, r"value\.a\[0\]\.b is a object"),
        ({"a": b"bytes"}, r"value\.a is a bytes"),
        ({1: "a"}, r"key 1"),
        ({"$float": "nan"}, "reserved"),
        ({"a": {1, 2}}, r"value\.a is a set"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_place(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        digest_of(value)


def test_files_and_streams_have_the_published_digest(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "abc") == sha256_of_bytes(b"abc") == ABC
    assert sha256_of_stream(io.BytesIO(b"abc")) == (3, ABC)


def test_a_stream_longer_than_a_chunk_is_read_to_its_end_in_bounded_pieces() -> None:
    class Pieces(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= CHUNK_BYTES
            return super().read(size)

    data = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
    assert sha256_of_stream(Pieces(data)) == (len(data), hashlib.sha256(data).hexdigest())
