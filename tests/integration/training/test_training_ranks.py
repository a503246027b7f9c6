"""Two and three ranks compute what one rank computes, agree on every error, and read each other's checkpoints."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skyrl_core.training.sharded_state import read_policy_weights

PROGRAM = Path(__file__).with_name("several_ranks.py")
ROOT = Path(__file__).parents[3]


def write_batch(path, batch):
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})


# Losses whose terms look beyond a token, and every way of reducing them.
VARIANTS = [
    {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"},
    {"policy_loss_type": "kl_cov", "kl_cov": {"kl_cov_frac": 0.3}, "loss_reduction": "prompt_mean"},
    {"policy_loss_type": "clip_cov", "clip_cov": {"clip_ratio": 0.5, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}},
    {"policy_loss_type": "dppo", "loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 12},
    {"policy_loss_type": "cispo", "loss_reduction": "token_mean_legacy"},
    {"off_policy_correction": {"tis_ratio_type": "sequence", "sequence_mask_metric": "product"}},
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def one_rank(shared, make_config, make_policy, make_batch, trajectories, weights_of):
    """What one rank computes for the batches; also writes the programs' inputs."""
    config = make_config()
    (shared / "config.json").write_text(config.model_dump_json())
    # The fourth has a single row: with more ranks, all but one run fillers.
    rows = {1: trajectories(1), 2: trajectories(2, 3, 3), 3: trajectories(3), 4: trajectories(4, 1, 1)}
    batches = {step: make_batch(trajectory, step=step) for step, trajectory in rows.items()}
    for step, batch in batches.items():
        write_batch(shared / f"batch_{step}.npz", batch)
    broken = batches[4].advantages.copy()
    broken[batches[4].loss_mask != 0] = np.nan
    write_batch(shared / "broken.npz", replace(batches[4], advantages=broken))

    (shared / "variants.json").write_text(json.dumps(VARIANTS))
    varied = []
    for variant in VARIANTS:
        other = make_policy(algorithm=dict(variant))
        varied.append((dict(other.update(batches[1], 1, "1").metrics), weights_of(other)))

    worker = make_policy()
    numbers, values = worker.logprobs(batches[1])
    metrics = []
    weights = {}
    for step, batch in batches.items():
        metrics.append(dict(worker.update(batch, step, str(step)).metrics))
        weights[step] = weights_of(worker)
        if step == 2:
            worker.save(str(shared / "one"), 2)
    return {"logprobs": values[np.argsort(numbers)], "metrics": metrics, "weights": weights, "varied": varied}


@pytest.fixture(scope="module")
def several(shared, one_rank):
    """The folder where groups of two and of three ranks left their results."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), str(shared), "2", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return shared


def close(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        assert float((left[name] - right[name]).abs().max()) <= tolerance, name


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_ranks_equal_one(several, one_rank, world_size):
    results = several / f"of_{world_size}"
    reports = [json.loads((results / f"report_{rank}.json").read_text()) for rank in range(world_size)]
    assert all(report == reports[0] for report in reports)
    for expected, measured in zip(one_rank["metrics"], reports[0]["metrics"], strict=True):
        assert measured == pytest.approx(expected, rel=1e-5, abs=1e-5)
    close(load_file(results / "weights_3.safetensors"), one_rank["weights"][3])
    close(load_file(results / "weights_4.safetensors"), one_rank["weights"][4])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_no_loss_and_no_reduction_depends_on_how_ranks_share_the_rows(several, one_rank, world_size, number):
    results = several / f"of_{world_size}"
    report = json.loads((results / "report_0.json").read_text())
    metrics, weights = one_rank["varied"][number]
    assert report["varied"][number] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    # AdamW's first steps are of size 1e-3 whatever the gradient's size: rounding in a tiny one shows.
    close(load_file(results / f"variant_{number}.safetensors"), weights, tolerance=1e-4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_of_logprobs_cover_every_row_once(several, one_rank, world_size):
    shares = [np.load(several / f"of_{world_size}" / f"logprobs_{rank}.npz") for rank in range(world_size)]
    rows = np.concatenate([share["rows"] for share in shares])
    assert sorted(rows.tolist()) == list(range(len(rows)))
    values = np.concatenate([share["values"] for share in shares])
    np.testing.assert_allclose(values[np.argsort(rows)], one_rank["logprobs"], atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_resuming_on_as_many_ranks_is_exact(several, world_size):
    results = several / f"of_{world_size}"
    report = json.loads((results / "report_0.json").read_text())
    assert report["resumed"] == report["metrics"][2]
    resumed, uninterrupted = (load_file(results / f"{name}_3.safetensors") for name in ("resumed", "weights"))
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpoints_are_read_by_any_number_of_ranks(several, one_rank, make_policy, weights_of, world_size):
    results = several / f"of_{world_size}"
    report = json.loads((results / "report_0.json").read_text())
    assert report["from_one"] == pytest.approx(one_rank["metrics"][2], rel=1e-5, abs=1e-5)
    close(load_file(results / "from_one_3.safetensors"), one_rank["weights"][3])
    alone = make_policy()
    alone.load(str(results / "two"))
    assert alone.status() == (2, "2")
    close(weights_of(alone), one_rank["weights"][2])
    close(read_policy_weights(results / "two"), one_rank["weights"][2])


@pytest.mark.parametrize("world_size", [2, 3])
def test_failure_of_one_rank_is_the_error_of_all(several, world_size):
    for rank in range(world_size):
        errors = json.loads((several / f"of_{world_size}" / f"report_{rank}.json").read_text())["errors"]
        assert "CheckpointError" in errors["save"]
        assert "rank(s) [1] could not write" in errors["save"]
        assert errors["update"].startswith("NonFiniteLossError: step 4, pass 1, minibatch 1 of 1: loss nan")
        assert errors["version"] == "None"
