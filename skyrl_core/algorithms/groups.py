"""Statistics over the samples of each prompt, in float64, with failed rows left out."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """R rows by prompt. index [R] numbers the groups 0..count-1; valid [R] bool says which rows are counted.

    Statistics come back per row, [R] float64: each row gets its group's, so that no caller handles groups itself.
    """

    index: Tensor
    valid: Tensor
    count: int

    @classmethod
    def of(cls, group_ids: Tensor, valid: Tensor) -> "Groups":
        """Groups of rows with equal numbers in `group_ids` [R]."""
        names, index = torch.unique(group_ids, return_inverse=True)
        return cls(index=index, valid=valid, count=len(names))

    def total(self, values: Tensor) -> Tensor:
        """Sum over the valid rows of each row's group."""
        counted = torch.where(self.valid, values.double(), 0.0)
        per_group = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return per_group.index_add_(0, self.index, counted)[self.index]

    def size(self) -> Tensor:
        """Number of valid rows of each row's group."""
        return self.total(torch.ones_like(self.index))

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the valid rows of each row's group; 0 for a group without any."""
        return self.total(values) / self.size().clamp(min=1.0)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation with n - 1 (torch.std) over the valid rows of each row's group; 0 for fewer than two."""
        squares = self.total((values - self.mean(values)).square())
        return (squares / (self.size() - 1.0).clamp(min=1.0)).sqrt()

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest value among the valid rows of each row's group; +inf for a group without any."""
        return self._extreme(values, torch.inf, "amin")

    def largest(self, values: Tensor) -> Tensor:
        """Largest value among the valid rows of each row's group; -inf for a group without any."""
        return self._extreme(values, -torch.inf, "amax")

    def _extreme(self, values: Tensor, neutral: float, reduce: str) -> Tensor:
        counted = torch.where(self.valid, values.double(), neutral)
        per_group = torch.full((self.count,), neutral, dtype=torch.float64, device=values.device)
        return per_group.scatter_reduce_(0, self.index, counted, reduce)[self.index]

    def varied(self, values: Tensor, tolerance: float = 0.0) -> Tensor:
        """[R] bool: the row is valid and its group's values differ by more than `tolerance`.

        False for a group of one. The smallest and largest value are compared, because rounding can give equal rewards
        a standard deviation that is not 0.
        """
        return self.valid & (self.largest(values) - self.smallest(values) > tolerance)

    def warn_about_singles(self, estimator: str) -> None:
        """One warning when prompts have one valid sample only: there is nothing to compare it with."""
        alone = int((self.valid & (self.size() == 1)).sum())
        if alone:
            logger.warning(
                "%s compares the samples of a prompt, but %d of %d prompts have one valid sample: their advantage is 0 "
                "(raise generator.n_samples_per_prompt, or look for failing environments)",
                estimator,
                alone,
                self.count,
            )
