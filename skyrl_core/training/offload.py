"""Move a sharded model and its optimizer between an accelerator and host memory, for colocation with an engine."""

import torch
from torch import nn


def move_model(model: nn.Module, device: torch.device, *, to_device: bool) -> None:
    """Move the shards of `model` to `device` or to the host. Nothing when the device is the host."""
    if device.type == "cpu":
        return
    model.to(device if to_device else torch.device("cpu"))
    _release(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, *, to_device: bool) -> None:
    """Move the optimizer's moments likewise. Scalars (step counts) stay where they are."""
    if device.type == "cpu":
        return
    target = device if to_device else torch.device("cpu")
    for slots in optimizer.state.values():
        for name, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                slots[name] = value.to(target)
    _release(device)


def _release(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
