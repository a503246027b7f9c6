"""Tiny models, hand-made batches and a worker in this process, for the tests of training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import TrainingBatch
from skyrl_core.testing.tiny_model import build_tiny_model
from skyrl_core.training.worker import PolicyWorker, ReferenceWorker

Trajectory = tuple[list[int], list[int], list[int], float, int]
"""prompt ids, response ids, loss mask of the response, advantage, group."""

BatchMaker = Callable[..., TrainingBatch]
WorkerMaker = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("models") / "tied", vocab="0123456789+=", hidden_size=16))


@pytest.fixture(scope="session")
def untied_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "untied"
    return str(build_tiny_model(folder, vocab="0123456789+=", hidden_size=16, tied=False, seed=5))


def random_trajectories(seed: int, prompts: int = 4, samples: int = 2) -> list[Trajectory]:
    """Trajectories of many lengths, with observation gaps in some masks."""
    draw = np.random.default_rng(seed)
    trajectories: list[Trajectory] = []
    for group in range(prompts):
        prompt = draw.integers(8, 20, size=int(draw.integers(1, 6))).tolist()
        for _ in range(samples):
            length = int(draw.integers(1, 9))
            mask = [1] * length
            if length > 4:
                mask[2] = 0
            response = draw.integers(8, 20, size=length).tolist()
            trajectories.append((prompt, response, mask, float(draw.normal()), group))
    return trajectories


def pad(
    trajectories: list[Trajectory], *, step: int = 1, left: int = 0, right: int = 0, seed: int = 0
) -> TrainingBatch:
    """A scored batch with `left` and `right` extra padding columns and made-up log-probabilities of the others."""
    prompt_width = max(len(prompt) for prompt, *_ in trajectories) + left
    width = prompt_width + max(len(response) for _, response, *_ in trajectories) + right
    arrays = {name: np.zeros((len(trajectories), width), dtype=np.int64) for name in ("ids", "attention", "mask")}
    names = ("old", "ref", "rollout", "advantage")
    floats = {name: np.zeros((len(trajectories), width), dtype=np.float32) for name in names}
    for row, (prompt, response, mask, advantage, _) in enumerate(trajectories):
        start, stop = prompt_width - len(prompt), prompt_width + len(response)
        arrays["ids"][row, start:stop] = prompt + response
        arrays["attention"][row, start:stop] = 1
        arrays["mask"][row, prompt_width:stop] = mask
        # Seeded by the trajectory, so that another row order or padding gives a row the same values.
        noise = np.random.default_rng([seed, *response])
        trained = np.array(mask, dtype=bool)
        for name in ("old", "ref"):
            values = -3.0 + 0.3 * noise.normal(size=len(response)).astype(np.float32)
            floats[name][row, prompt_width:stop] = np.where(trained, values, 0.0)
        gap = 0.2 * noise.normal(size=len(response)).astype(np.float32)
        floats["rollout"][row, prompt_width:stop] = np.where(trained, floats["old"][row, prompt_width:stop] + gap, 0.0)
        floats["advantage"][row, prompt_width:stop] = np.where(trained, np.float32(advantage), 0.0)
    return TrainingBatch(
        step=step,
        prompt_width=prompt_width,
        input_ids=arrays["ids"],
        attention_mask=arrays["attention"],
        loss_mask=arrays["mask"],
        token_rewards=np.zeros((len(trajectories), width), dtype=np.float32),
        group_ids=np.array([group for *_, group in trajectories], dtype=np.int64),
        valid=np.ones(len(trajectories), dtype=np.bool_),
        rollout_logprobs=floats["rollout"],
        old_logprobs=floats["old"],
        ref_logprobs=floats["ref"],
        advantages=floats["advantage"],
    )


@pytest.fixture(scope="session")
def trajectories() -> Callable[..., list[Trajectory]]:
    return random_trajectories


@pytest.fixture(scope="session")
def make_batch() -> BatchMaker:
    return pad


@pytest.fixture(scope="session")
def make_config(model_path: str) -> Callable[..., SkyRLConfig]:
    """A configuration with the tiny model; keyword arguments change `trainer` and `trainer.algorithm`."""

    def build(algorithm: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **trainer: Any) -> Any:
        values = {
            "policy": {
                "model": {"path": trainer.pop("path", model_path)},
                "optimizer_config": {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0, **(optimizer or {})},
            },
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "critic_mini_batch_size": 2,
            "micro_train_batch_size_per_gpu": 2,
            "micro_forward_batch_size_per_gpu": 3,
            "placement": {"device": "cpu"},
            "algorithm": {"kl_loss_coef": 0.1, "temperature": 1.0, **(algorithm or {})},
        }
        return SkyRLConfig.model_validate({"trainer": {**values, **trainer}})

    return build


@pytest.fixture(scope="session")
def make_policy(make_config: Callable[..., SkyRLConfig]) -> Callable[..., PolicyWorker]:
    """A policy of one rank in this process, at version 0."""

    def build(**settings: Any) -> PolicyWorker:
        worker = PolicyWorker(make_config(**settings), 0, 1)
        worker.setup(*worker.rendezvous(), "cpu")
        return worker

    return build


@pytest.fixture(scope="session")
def make_reference(make_config: Callable[..., SkyRLConfig]) -> Callable[..., ReferenceWorker]:
    def build(**settings: Any) -> ReferenceWorker:
        worker = ReferenceWorker(make_config(**settings), 0, 1)
        worker.setup(*worker.rendezvous(), "cpu")
        return worker

    return build


def _weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in worker.export_weights(1 << 20) for name, tensor in bucket.items()}


@pytest.fixture(scope="session")
def weights_of() -> Callable[[PolicyWorker], dict[str, torch.Tensor]]:
    """All weights of a policy by name."""
    return _weights


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
