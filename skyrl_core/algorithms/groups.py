"""Statistics over the samples of each prompt, in float64, with failed rows left out."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_core.algorithms.types import AdvantageInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a batch by prompt. index [B] numbers the groups 0..G-1; valid [B] bool says which rows count.

    Statistics are returned per row, [B] float64: each row gets its group's, so no caller handles G itself.
    """

    index: Tensor
    valid: Tensor
    count: int

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> "Groups":
        """The groups of a batch."""
        names, index = torch.unique(inputs.group_ids, return_inverse=True)
        return cls(index=index, valid=inputs.valid, count=len(names))

    def _sum(self, values: Tensor) -> Tensor:
        counted = torch.where(self.valid, values.double(), 0.0)
        return torch.zeros(self.count, dtype=torch.float64, device=values.device).index_add_(0, self.index, counted)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the valid rows of each row's group."""
        return self._sum(values)[self.index]

    def size(self) -> Tensor:
        """Number of valid rows of each row's group."""
        return self.total(torch.ones_like(self.index, dtype=torch.float64))

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the valid rows of each row's group; 0 for a group without any."""
        return self.total(values) / self.size().clamp(min=1.0)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation with n - 1 (torch.std) over the valid rows of each row's group; 0 for fewer than two."""
        squares = self.total((values - self.mean(values)).square())
        return (squares / (self.size() - 1.0).clamp(min=1.0)).sqrt()

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value among the valid rows of each row's group (±inf for a group without any)."""
        low = torch.where(self.valid, values.double(), torch.inf)
        high = torch.where(self.valid, values.double(), -torch.inf)
        shape = (self.count,)
        smallest = torch.full(shape, torch.inf, dtype=torch.float64, device=values.device)
        largest = torch.full(shape, -torch.inf, dtype=torch.float64, device=values.device)
        smallest.scatter_reduce_(0, self.index, low, "amin")
        largest.scatter_reduce_(0, self.index, high, "amax")
        return smallest[self.index], largest[self.index]

    def varied(self, values: Tensor, tolerance: float = 0.0) -> Tensor:
        """[B] bool: the row is valid and its group's values differ by more than `tolerance`.

        False for a group of one. The smallest and largest value are compared rather than the standard deviation
        tested, because rounding can give equal rewards a deviation that is not 0.
        """
        smallest, largest = self.extremes(values)
        return self.valid & (largest - smallest > tolerance)

    def warn_about_singles(self, estimator: str) -> None:
        """One warning a batch when prompts have one valid sample only: there is nothing to compare it with."""
        alone = int((self.valid & (self.size() == 1)).sum())
        if alone:
            logger.warning(
                "%s compares the samples of a prompt, but %d of %d prompts have one valid sample: their advantage is 0 "
                "(raise generator.n_samples_per_prompt, or look for failing environments)",
                estimator,
                alone,
                self.count,
            )
