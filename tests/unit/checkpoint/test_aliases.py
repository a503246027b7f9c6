"""Aliases: when they move, what they remember, and what retention leaves alone because of them and of pins."""

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from skyrl_core.checkpoint.aliases import alias_history, aliased_steps, list_aliases, move_alias, promote, read_alias
from skyrl_core.checkpoint.catalog import list_runs, read_run
from skyrl_core.checkpoint.discovery import list_checkpoints, read_manifest
from skyrl_core.checkpoint.pins import pinned, pinned_steps, remove_stale_pins
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.retention import apply_retention
from skyrl_core.checkpoint.scores import CheckpointScore, find_score, record_score, scores_of
from skyrl_core.data.digests import canonical_json
from skyrl_core.errors import CheckpointError, ConfigurationError, StoreError

METRIC = "eval/all/avg_score"


def save(root: Path, run: str, step: int) -> None:
    writer = CheckpointWriter(root / run, step)
    (Path(writer.directory) / "weights.bin").write_bytes(f"{run} {step}".encode())
    facts: dict[str, Any] = {"config_digest": "c", "dataset_fingerprint": "d", "data_position": {}, "world_size": 1}
    writer.commit(policy_version=step, run_name=run, **facts)


def scored(root: Path, run: str, step: int, value: float, identity: str = "same") -> CheckpointScore:
    (found,) = [found for found in list_checkpoints(root / run) if found.step == step]
    return CheckpointScore(
        run=run,
        step=step,
        content_digest=read_manifest(found).content_digest,
        identity=identity,
        metrics={METRIC: value, "eval/digits/avg_score": value},
        code_version="0.1.0",
        created_at="2026-01-01T00:00:00+00:00",
        evaluated_by="somebody",
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for run, step in (("a", 2), ("a", 4), ("b", 2)):
        save(tmp_path, run, step)
    return tmp_path


def test_an_alias_moves_to_a_better_score_only_and_remembers_its_lineage(root: Path) -> None:
    first = promote(root, "best", scored(root, "a", 2, 0.5), metric=METRIC)
    assert first.moved
    assert first.target is not None
    assert (first.target.checkpoint, first.target.score, first.target.move) == ("a/global_step_2", 0.5, 1)
    lineage = first.target
    assert (lineage.config_digest, lineage.dataset_fingerprint, lineage.identity) == ("c", "d", "same")
    assert lineage.code_version
    assert lineage.evaluation == {METRIC: 0.5, "eval/digits/avg_score": 0.5}

    equal = promote(root, "best", scored(root, "a", 4, 0.5), metric=METRIC)
    assert not equal.moved
    assert "does not beat 0.5000 of a/global_step_2" in equal.reason

    better = promote(root, "best", scored(root, "b", 2, 0.6), metric=METRIC)
    assert better.moved
    assert [move.checkpoint for move in alias_history(root, "best")] == ["a/global_step_2", "b/global_step_2"]
    assert read_alias(root, "best") == better.target
    assert read_alias(root, "production") is None


def test_a_gain_below_the_wanted_one_and_a_score_below_the_threshold_move_nothing(root: Path) -> None:
    assert not promote(root, "best", scored(root, "a", 2, 0.5), metric=METRIC, min_score=0.51).moved
    assert promote(root, "best", scored(root, "a", 2, 0.5), metric=METRIC, min_score=0.5).moved
    assert not promote(root, "best", scored(root, "a", 4, 0.55), metric=METRIC, min_gain=0.1).moved
    assert promote(root, "best", scored(root, "a", 4, 0.61), metric=METRIC, min_gain=0.1).moved


def test_scores_from_other_prompts_or_sampling_are_not_compared(root: Path) -> None:
    promote(root, "best", scored(root, "a", 2, 0.5), metric=METRIC)
    other = promote(root, "best", scored(root, "a", 4, 0.9, identity="other"), metric=METRIC)
    assert not other.moved
    assert "not evaluated in the same way" in other.reason
    by_hand = move_alias(root, "best", "a", 4, reason="the evaluation set changed")
    assert (by_hand.move, by_hand.score, by_hand.reason) == (2, None, "the evaluation set changed")


def test_what_cannot_be_promoted_is_refused_with_the_reason(root: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no metric 'eval/x/avg_score'.*eval/all/avg_score"):
        promote(root, "best", scored(root, "a", 2, 0.5), metric="eval/x/avg_score")
    with pytest.raises(ConfigurationError, match="'Best' is no alias"):
        promote(root, "Best", scored(root, "a", 2, 0.5), metric=METRIC)
    with pytest.raises(CheckpointError, match="global_step_8"):
        move_alias(root, "best", "a", 8, reason="")
    anew = replace(scored(root, "a", 2, 0.9), content_digest="another")
    assert promote(root, "best", anew, metric=METRIC).reason == "the step was trained anew since"


def test_of_two_that_promote_at_once_the_better_one_stays(root: Path) -> None:
    scores = [scored(root, "a", 2, 0.5), scored(root, "a", 4, 0.7), scored(root, "b", 2, 0.6)]
    barrier = threading.Barrier(len(scores))

    def work(score: CheckpointScore) -> None:
        barrier.wait()
        promote(root, "best", score, metric=METRIC)

    threads = [threading.Thread(target=work, args=(score,)) for score in scores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target = read_alias(root, "best")
    assert target is not None
    assert (target.checkpoint, target.score) == ("a/global_step_4", 0.7)
    history = [move.score for move in alias_history(root, "best")]
    assert history == sorted(history, key=lambda score: score or 0.0)


def test_retention_leaves_aliased_and_pinned_checkpoints(root: Path) -> None:
    for step in (6, 8, 10):
        save(root, "a", step)
    promote(root, "production", scored(root, "a", 4, 0.5), metric=METRIC)
    assert aliased_steps(root, "a") == {4}
    assert aliased_steps(root, "b") == set()
    with pinned(root / "a", 6, "an evaluation"):
        assert pinned_steps(root / "a") == {6}
        assert apply_retention(root / "a", 1, pinned_steps(root / "a") | aliased_steps(root, "a")) == [2, 8]
    assert pinned_steps(root / "a") == set()
    assert apply_retention(root / "a", 1, aliased_steps(root, "a")) == [6]
    assert [found.step for found in list_checkpoints(root / "a")] == [4, 10]


def test_a_pin_of_a_killed_holder_is_removed_when_it_is_old(root: Path) -> None:
    abandoned = root / "a" / "pins" / "global_step_2" / "0123456789abcdef.json"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_bytes(canonical_json({"by": "killed", "created_at": "2026-01-01T00:00:00+00:00"}))
    with pinned(root / "a", 4, "at work"):
        assert remove_stale_pins(root / "a", timedelta(hours=24)) == 1
        assert pinned_steps(root / "a") == {4}


def test_a_score_is_recorded_once_and_belongs_to_the_weights_it_was_made_with(root: Path) -> None:
    first = scored(root, "a", 2, 0.5)
    assert record_score(root / "a", first) == first
    assert record_score(root / "a", replace(first, evaluated_by="a second one")) == first
    assert find_score(root / "a", 2, first.content_digest, "same") == first
    assert find_score(root / "a", 2, first.content_digest, "other") is None
    anew = replace(first, content_digest="another", metrics={METRIC: 0.1})
    assert find_score(root / "a", 2, "another", "same") is None
    assert record_score(root / "a", anew) == anew
    assert scores_of(root / "a", 2, first.content_digest) == []
    assert scores_of(root / "a", 2, "another") == [anew]


def test_a_store_lists_its_runs_with_scores_aliases_and_sizes(root: Path) -> None:
    for run in ("a", "b"):
        (root / run / "run.json").write_text('{"run_name": "x", "created_at": "2026-01-01T00:00:00+00:00"}')
    (root / "a" / "state.json").write_text('{"finished": true, "starts": 2, "total_steps": 4, "flow_run_id": ""}')
    score = scored(root, "a", 4, 0.5)
    record_score(root / "a", score)
    promote(root, "production", score, metric=METRIC)
    promote(root, "best", score, metric=METRIC)
    assert list_runs(root) == ["a", "b"]
    entry = read_run(root, "a")
    assert (entry.state.finished, entry.state.starts) == (True, 2)
    assert [(saved.step, saved.bytes, saved.aliases) for saved in entry.checkpoints] == [
        (2, len("a 2"), ()),
        (4, len("a 4"), ("best", "production")),
    ]
    assert entry.checkpoints[1].scores == (score,)
    assert not read_run(root, "b").state.finished
    assert [move.alias for move in list_aliases(root)] == ["best", "production"]


def test_a_damaged_move_is_named(root: Path) -> None:
    promote(root, "best", scored(root, "a", 2, 0.5), metric=METRIC)
    (root / "_aliases" / "best" / "move_00000001.json").write_text("{")
    with pytest.raises(StoreError, match=r"move_00000001\.json cannot be read"):
        read_alias(root, "best")
