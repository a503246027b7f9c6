"""Stored batches come back to the bit; damaged, foreign or hostile bytes are one clear error."""

import io
import zipfile
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.data.carriers import Prompt, Rollout, RolloutBatch, TrainingBatch
from skyrl_core.data.serialization import (
    prompts_from_bytes,
    prompts_to_bytes,
    rollouts_from_bytes,
    rollouts_to_bytes,
    training_batch_from_bytes,
    training_batch_to_bytes,
)
from skyrl_core.errors import StoreError


def rollout(ids: list[int], **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "uid": "train:7",
        "sample_index": 2,
        "prompt_ids": np.array([3, 4], dtype=np.int64),
        "response_ids": np.array(ids, dtype=np.int64),
        "loss_mask": np.ones(len(ids), dtype=np.int64),
        "rollout_logprobs": None,
        "token_rewards": np.zeros(max(len(ids), 1), dtype=np.float32),
        "stop_reason": "length",
        "policy_versions": (4, 5),
        "data_source": "addition",
        "env_class": "arithmetic",
        "turns": 3,
        "env_metrics": {"format": 0.1, "nan": float("nan")},
        "error": None,
    }
    return Rollout(**{**values, **changes})


def same(left: object, right: object) -> None:
    for field in fields(left):  # type: ignore[arg-type]
        before, after = getattr(left, field.name), getattr(right, field.name)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes()
        else:
            assert repr(before) == repr(after)


@pytest.mark.parametrize("largest", [0, 255, 256, 2**31 - 1, 2**31, 2**63 - 1])
def test_token_ids_of_any_size_keep_value_and_type(largest: int) -> None:
    before = rollout([largest, 0])
    same(before, rollouts_from_bytes(rollouts_to_bytes(RolloutBatch(step=1, rollouts=[before]))).rollouts[0])


def test_absent_empty_and_present_logprobs_stay_apart() -> None:
    rows = [
        rollout([], rollout_logprobs=None, token_rewards=np.array([0.25], dtype=np.float32)),
        rollout([], rollout_logprobs=np.zeros(0, dtype=np.float32)),
        rollout([1, 2], rollout_logprobs=np.array([-0.0, np.nan], dtype=np.float32), error="ValueError: no"),
    ]
    back = rollouts_from_bytes(rollouts_to_bytes(RolloutBatch(step=9, rollouts=rows)))
    assert back.step == 9
    for before, after in zip(rows, back.rollouts, strict=True):
        same(before, after)
    assert back.rollouts[0].reward == 0.25


def test_a_batch_without_rollouts_is_stored_too() -> None:
    assert len(rollouts_from_bytes(rollouts_to_bytes(RolloutBatch(step=1, rollouts=[])))) == 0


def test_floats_of_another_width_are_refused_rather_than_rounded() -> None:
    row = rollout([1], rollout_logprobs=np.array([0.1], dtype=np.float64))
    with pytest.raises(TypeError, match="rollout_logprobs is float64"):
        rollouts_to_bytes(RolloutBatch(step=1, rollouts=[row]))


@st.composite
def training_batches(draw: st.DrawFn) -> TrainingBatch:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 99)))

    def floats() -> Any:
        return random.normal(size=(rows, columns)).astype(np.float32)

    def integers() -> Any:
        return random.integers(-5, 2 ** draw(st.sampled_from([3, 20, 40])), size=(rows, columns))

    optional = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
    return TrainingBatch(
        step=draw(st.integers(1, 99)),
        prompt_width=draw(st.integers(0, columns)),
        input_ids=integers(),
        attention_mask=integers(),
        loss_mask=integers(),
        token_rewards=floats(),
        group_ids=np.arange(rows),
        valid=random.integers(0, 2, size=rows).astype(bool),
        **{name: floats() for name in optional if draw(st.booleans())},
    )


@settings(max_examples=40, deadline=None)
@given(training_batches())
def test_every_field_of_a_training_batch_survives(batch: TrainingBatch) -> None:
    data = training_batch_to_bytes(batch)
    same(batch, training_batch_from_bytes(data))
    # Bytes depend on content alone, not on how the arrays lie in memory.
    turned = {field.name: getattr(batch, field.name) for field in fields(batch)}
    turned = {name: np.asfortranarray(v) if isinstance(v, np.ndarray) else v for name, v in turned.items()}
    assert training_batch_to_bytes(TrainingBatch(**turned)) == data


def test_stored_archives_carry_no_clock() -> None:
    data = rollouts_to_bytes(RolloutBatch(step=1, rollouts=[rollout([1])]))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_truncated_bytes_are_never_a_batch() -> None:
    data = rollouts_to_bytes(RolloutBatch(step=1, rollouts=[rollout([1, 2, 3])]))
    for size in range(0, len(data), 7):
        with pytest.raises(StoreError, match="hold no RolloutBatch"):
            rollouts_from_bytes(data[:size])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_is_an_error_of_ours_or_changes_no_type(data: st.DataObject) -> None:
    stored = bytearray(rollouts_to_bytes(RolloutBatch(step=1, rollouts=[rollout([1, 2, 3])])))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(StoreError):
        assert isinstance(rollouts_from_bytes(bytes(stored)), RolloutBatch)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled something",)


def test_a_pickle_inside_an_archive_is_not_loaded() -> None:
    data = rollouts_to_bytes(RolloutBatch(step=1, rollouts=[rollout([1])]))
    hostile, target = io.BytesIO(), io.BytesIO()
    np.save(hostile, np.array([Bomb()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, hostile.getvalue() if name == "prompt_ids.npy" else source.read(name))
    with pytest.raises(StoreError, match="pickle"):
        rollouts_from_bytes(target.getvalue())


def test_one_kind_is_not_read_as_another_nor_a_later_format_as_this_one() -> None:
    rollouts = rollouts_to_bytes(RolloutBatch(step=1, rollouts=[]))
    with pytest.raises(StoreError, match=r"found 'RolloutBatch' instead of TrainingBatch"):
        training_batch_from_bytes(rollouts)
    prompts = prompts_to_bytes([]).replace(b'"format":1', b'"format":9')
    with pytest.raises(StoreError, match="format 9; this version reads format 1"):
        prompts_from_bytes(prompts)


def test_numpy_columns_of_prompts_become_plain() -> None:
    prompt = Prompt(
        uid="u",
        messages=({"role": "user", "content": "?"},),
        env_class="e",
        env_extras={"index": np.int64(4), "levels": np.array([0.5, 1.0]), "tags": ("a", "b"), "none": None},
    )
    (back,) = prompts_from_bytes(prompts_to_bytes([prompt]))
    assert back.env_extras == {"index": 4, "levels": [0.5, 1.0], "tags": ["a", "b"], "none": None}
    assert back.messages == prompt.messages
