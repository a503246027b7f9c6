"""The receiving side of a weight update: named tensors copied into a model, checked for completeness."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from skyrl_core.errors import WeightSyncError


def _listed(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class WeightTarget:
    """Takes buckets of full tensors under their Hugging Face names.

    Tied parameters (an output head sharing the embedding) may come under any of their names, or under several if the
    values agree. Persistent buffers are taken when sent and not asked for.
    """

    def __init__(self, model: nn.Module, owner: str) -> None:
        self._owner = owner
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._received: set[str] = set()
        self._dropped: dict[str, torch.Size] = {}

    def begin(self) -> None:
        """Forget what earlier buckets brought."""
        self._received.clear()

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor]) -> None:
        """Copy one bucket; nothing is copied when a name or shape is wrong (WeightSyncError names them)."""
        # Read anew each time: moving a model between devices replaces its buffers.
        tensors: dict[str, Tensor] = dict(self._model.state_dict(keep_vars=True))
        canonical = {id(parameter): name for name, parameter in self._parameters.items()}
        unknown = [name for name in named if name not in tensors]
        if unknown:
            raise WeightSyncError(f"{self._owner}: the model has no parameter {_listed(unknown)}")
        wrong = [
            f"{name}: {tuple(tensor.shape)} for {tuple(tensors[name].shape)}"
            for name, tensor in named.items()
            if tensor.shape != tensors[name].shape
        ]
        if wrong:
            raise WeightSyncError(f"{self._owner}: shapes do not fit: {_listed(wrong)}")
        for name, tensor in named.items():
            target = tensors[name]
            first_name = canonical.get(id(target), name)
            incoming = tensor.to(device=target.device, dtype=target.dtype)
            if first_name in self._received and not torch.equal(incoming, target):
                raise WeightSyncError(
                    f"{self._owner}: {name} was sent twice (or is tied to {first_name}) with different values"
                )
            target.copy_(incoming)
            self._received.add(first_name)

    def check_complete(self) -> None:
        """Raises WeightSyncError naming the parameters that no bucket brought."""
        missing = [name for name in self._parameters if name not in self._received]
        if missing:
            raise WeightSyncError(f"{self._owner}: the update ended without {_listed(missing)}")
        self._received.clear()

    @torch.no_grad()
    def drop(self) -> None:
        """Release the parameters' memory; their values are lost."""
        for name, parameter in self._parameters.items():
            self._dropped[name] = parameter.shape
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Give dropped parameters their memory back, uninitialised: an update must follow."""
        for name, shape in self._dropped.items():
            parameter = self._parameters[name]
            parameter.data = parameter.data.new_empty(shape)
        self._dropped.clear()
