"""Stages are recorded whole or not at all, found by their inputs, and written by one process only."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.data.carriers import Prompt, Rollout, RolloutBatch, TrainingBatch
from skyrl_core.data.lease import Lease
from skyrl_core.data.run_store import RunStore
from skyrl_core.data.serialization import (
    prompts_from_bytes,
    prompts_to_bytes,
    rollouts_from_bytes,
    rollouts_to_bytes,
    training_batch_from_bytes,
    training_batch_to_bytes,
)
from skyrl_core.errors import DatasetError, LeaseLostError, RunBusyError, StoreError

HOLDER = """
import sys, time
from skyrl_core.data.lease import Lease
lease = Lease.acquire(sys.argv[1], {"flow_run_id": "old"})
print("held", flush=True)
time.sleep(600)
"""
RACER = """
import sys
from skyrl_core.data.lease import Lease
from skyrl_core.errors import RunBusyError
sys.stdin.readline()
try:
    lease = Lease.acquire(sys.argv[1])
    print("won", lease.token, flush=True)
    sys.stdin.readline()
except RunBusyError:
    print("busy", flush=True)
"""


def writer(root: Path) -> tuple[RunStore, Lease]:
    lease = Lease.acquire(root)
    return RunStore.open(root, fence=lease.token), lease


def test_a_committed_stage_is_found_for_the_same_inputs_only(tmp_path: Path) -> None:
    store, lease = writer(tmp_path)
    with lease:
        made = store.write_stage("score", 3, "inputs", files={"a.bin": b"abc"}, summary={"n": 1}, seconds=0.5)
        assert not made.recorded
        found = store.find_stage("score", 3, "inputs")
        assert found is not None
        assert found.recorded
        assert found.digest == made.digest
        assert store.read_file(found, "a.bin") == b"abc"
        assert store.find_stage("score", 3, "other inputs") is None
        assert store.find_stage("score", 4, "inputs") is None


def test_a_slow_first_attempt_does_not_replace_what_others_went_on_with(tmp_path: Path) -> None:
    store, lease = writer(tmp_path)
    with lease:
        first = store.write_stage("generate", 1, "i", files={"a": b"first"}, summary={}, seconds=0)
        second = store.write_stage("generate", 1, "i", files={"a": b"second"}, summary={}, seconds=0)
        assert second.recorded
        assert second.digest == first.digest
        assert store.read_file(second, "a") == b"first"


def test_an_altered_file_is_named(tmp_path: Path) -> None:
    store, lease = writer(tmp_path)
    with lease:
        record = store.write_stage("score", 1, "i", files={"a.bin": b"abc"}, summary={}, seconds=0)
        (tmp_path / "stages/step_000001/score" / record.files[0].path).write_bytes(b"abd")
        with pytest.raises(StoreError, match=r"a\.bin"):
            store.read_file(record, "a.bin")


def test_a_torn_record_counts_as_not_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, lease = writer(tmp_path)
    with lease:
        store.write_stage("score", 1, "i", files={}, summary={}, seconds=0)
        record = tmp_path / "stages/step_000001/score/record.json"
        record.write_bytes(record.read_bytes()[:-20])
        assert store.find_stage("score", 1, "i") is None
        assert "record.json" in caplog.text


def test_pruned_records_keep_their_metrics_and_lose_their_files(tmp_path: Path) -> None:
    store, lease = writer(tmp_path)
    with lease:
        for step in (1, 2, 3):
            store.write_stage("score", step, "i", files={"a": b"x" * 10}, summary={"reward": step}, seconds=0)
        store.prune_before(3)
        assert [record.summary["reward"] for record in store.records("score")] == [1, 2, 3]
        assert [record.pruned for record in store.records("score")] == [True, True, False]
        assert store.find_stage("score", 2, "i") is None
        store.drop_from(2)
        assert store.steps_with("score") == [1]


def test_a_reader_cannot_write_and_a_store_crosses_processes(tmp_path: Path) -> None:
    store, lease = writer(tmp_path)
    with lease:
        store.write_json("run.json", {"a": 1})
        copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
        assert copy.read_json("run.json") == {"a": 1}
        assert copy.fence == lease.token
        with pytest.raises(RunBusyError, match="reading only"):
            RunStore.open(tmp_path).write_json("run.json", {})


def test_a_superseded_writer_can_publish_nothing(tmp_path: Path) -> None:
    store, old = writer(tmp_path)
    old.release()
    with Lease.acquire(tmp_path), pytest.raises(LeaseLostError, match="took over"):
        store.write_stage("score", 1, "i", files={}, summary={}, seconds=0)
    assert RunStore.open(tmp_path).read_stage("score", 1) is None


def test_a_living_holder_is_respected_and_named(tmp_path: Path) -> None:
    with Lease.acquire(tmp_path), pytest.raises(RunBusyError, match=f"process {os.getpid()}"):
        Lease.acquire(tmp_path)


def test_a_holder_killed_with_9_is_superseded_at_once_and_known(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunBusyError, match=f"process {holder.pid}"):
        Lease.acquire(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Lease.acquire(tmp_path) as lease:
        assert lease.token == 2
        assert lease.previous is not None
        assert lease.previous.info["flow_run_id"] == "old"


def test_of_processes_that_race_exactly_one_wins(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.stdout.readline().split()[0] for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("done\n")
    assert sorted(answers) == ["busy", "busy", "won"]


lengths = st.integers(0, 4)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    size = draw(lengths)
    numbers = st.floats(-5, 5, width=32)
    logprobs = draw(st.none() | st.lists(numbers, min_size=size, max_size=size))
    return Rollout(
        uid=draw(st.text(max_size=4)),
        sample_index=draw(st.integers(0, 9)),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=3)), dtype=np.int64),
        response_ids=np.arange(size, dtype=np.int64),
        loss_mask=np.ones(size, dtype=np.int64),
        rollout_logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
        token_rewards=np.full(max(size, 1), draw(numbers), dtype=np.float32),
        stop_reason="stop",
        policy_versions=(draw(st.integers(0, 99)),),
        env_metrics={"format": draw(st.floats(0, 1))},
        error=draw(st.none() | st.just("ValueError: no")),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(rollouts(), max_size=4))
def test_rollouts_survive_storing_exactly_and_the_same_content_has_the_same_bytes(items: list[Rollout]) -> None:
    batch = RolloutBatch(step=3, rollouts=items)
    data = rollouts_to_bytes(batch)
    assert data == rollouts_to_bytes(batch)
    back = rollouts_from_bytes(data)
    assert back.step == 3
    for before, after in zip(items, back.rollouts, strict=True):
        assert (before.uid, before.sample_index, before.error) == (after.uid, after.sample_index, after.error)
        assert before.env_metrics == after.env_metrics
        assert before.policy_versions == after.policy_versions
        for name in ("prompt_ids", "response_ids", "loss_mask", "token_rewards"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        if before.rollout_logprobs is None:
            assert after.rollout_logprobs is None
        else:
            np.testing.assert_array_equal(before.rollout_logprobs, after.rollout_logprobs)


def test_a_training_batch_keeps_absent_fields_absent() -> None:
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    batch = TrainingBatch(
        step=1,
        prompt_width=1,
        input_ids=ids,
        attention_mask=np.ones_like(ids),
        loss_mask=np.ones_like(ids),
        token_rewards=np.zeros((2, 3), dtype=np.float32),
        group_ids=np.array([0, 1]),
        valid=np.array([True, False]),
        advantages=np.full((2, 3), 0.1, dtype=np.float32),
    )
    back = training_batch_from_bytes(training_batch_to_bytes(batch))
    np.testing.assert_array_equal(back.input_ids, ids)
    np.testing.assert_array_equal(back.advantages, batch.advantages)
    np.testing.assert_array_equal(back.valid, batch.valid)
    assert back.ref_logprobs is None
    assert back.values is None


def test_prompts_survive_as_json_and_what_json_cannot_hold_is_named() -> None:
    prompt = Prompt(
        uid="a:1",
        messages=({"role": "user", "content": "12+39="},),
        env_class="arithmetic",
        env_extras={"reward_spec": {"ground_truth": "51"}},
    )
    assert prompts_from_bytes(prompts_to_bytes([prompt])) == [prompt]
    json.loads(prompts_to_bytes([prompt]))
    with pytest.raises(DatasetError, match="a:1"):
        prompts_to_bytes([Prompt(uid="a:1", messages=(), env_class="x", env_extras={"bad": object()})])
