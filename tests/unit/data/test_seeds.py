"""Derived seeds: reproducible, distinct by purpose, within 63 bits."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.data.seeds import derive_seed

PART = st.one_of(st.integers(), st.text())


def test_is_the_first_63_bits_of_a_sha256_over_type_length_and_text() -> None:
    written = hashlib.sha256(b"i1:7" + b"s7:rollout" + b"i2:12" + b"s3:t:0" + b"i1:3").hexdigest()
    assert derive_seed(7, "rollout", 12, "t:0", 3) == int(written[:16], 16) // 2


def test_integers_differ_from_their_text_and_joined_parts_from_split_ones() -> None:
    purposes = [(1,), ("1",), ("ab", "c"), ("a", "bc"), ("abc",), (), ("",), (12, 3), (1, 23), (-1,)]
    assert len({derive_seed(0, *parts) for parts in purposes}) == len(purposes)


@given(st.integers(), st.lists(PART, max_size=4))
def test_fits_a_signed_64_bit_integer_and_never_changes(run_seed: int, parts: list[int | str]) -> None:
    seed = derive_seed(run_seed, *parts)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(run_seed, *parts)


@given(st.lists(PART, max_size=3), st.lists(PART, max_size=3))
def test_different_purposes_get_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    if left != right:
        assert derive_seed(0, *left) != derive_seed(0, *right)


@pytest.mark.parametrize("part", [True, 1.0, None, b"x", np.int64(3)])
def test_other_types_are_refused_by_name(part: object) -> None:
    with pytest.raises(TypeError, match=type(part).__name__):
        derive_seed(0, part)  # type: ignore[arg-type]
