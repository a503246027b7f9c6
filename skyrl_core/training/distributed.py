"""Process group, device mesh and determinism of one training rank."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_core.data.seeds import derive_seed
from skyrl_core.errors import ConfigurationError, TrainingError

DeviceKind = Literal["cpu", "cuda"]

# Long enough for the slowest rank's model load or checkpoint write, short enough that a lost rank ends the wait.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where one rank stands: its number, the group's size, its device, and the mesh over all ranks."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh


def own_address(single_node: bool) -> str:
    """The address other ranks reach this process at: loopback on a single node, else the outward interface's."""
    if single_node:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket sends nothing on connect; it only makes the kernel choose the outward interface.
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def open_rendezvous(host: str, world_size: int) -> dist.TCPStore:
    """Rank 0's store, listening on a port that the kernel chose. It keeps the port until the group forms, so that no
    other process can take it in between."""
    return dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)


def init_process_group(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: DeviceKind,
    *,
    store: dist.TCPStore | None = None,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> RankContext:
    """Join the ranks (gloo on the CPU, nccl and gloo on CUDA) and return this rank's context. Called by every rank.

    `store` is the one rank 0 opened; the other ranks connect to it. A process that already joined a group of the same
    shape keeps it, so that two workers may share a process. Raises ConfigurationError when CUDA was asked for and is
    not there, TrainingError when the process belongs to a different group.
    """
    torch_device = _select_device(rank, device)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise TrainingError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and cannot also be rank "
                f"{rank} of {world_size}; start the worker in a process of its own"
            )
    else:
        if store is None:
            store = dist.TCPStore(master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    return RankContext(rank=rank, world_size=world_size, device=torch_device, mesh=mesh)


def _select_device(rank: int, device: DeviceKind) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigurationError(
            "training was asked to run on CUDA and this process sees no CUDA device; set trainer.placement.device=cpu "
            "or start it where a GPU is visible"
        )
    # Ray shows each actor its own GPU alone; without Ray the ranks of a node take its GPUs in turn.
    selected = torch.device("cuda", rank % count)
    torch.cuda.set_device(selected)
    return selected


def make_deterministic(seed: int, rank: int, device: DeviceKind) -> None:
    """Seed this rank and fix the order of floating-point sums.

    On the CPU one thread sums in one order, so equal inputs give equal bits. On CUDA the kernels keep their own order:
    forcing deterministic ones is slow and some lack them, so a repeat is equal up to rounding there.
    """
    torch.manual_seed(derive_seed(seed, "trainer", rank))
    if device == "cpu":
        torch.set_num_threads(1)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """`values` summed over all ranks, in place. Sums are exact under any split; means of means are not."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The element-wise maximum of `values` over all ranks, in place."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
