"""What the ranks of a role exchange: gathered weights, and sums and maxima of plain numbers.

Owns the process group over which numbers are exchanged. It has one rank of each data-parallel part,
because ranks that compute the same rows would count them twice. All ranks of a pool must make the
same calls in the same order.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolepool.placement.parallel import ParallelDims


def rank_and_count() -> tuple[int, int]:
    """This process's rank in its pool, and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def whole(tensor: Tensor) -> Tensor:
    """The gathered tensor if it is sharded, else the tensor itself. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class PartSums:
    """Sums and maxima over the parts of a batch, which the data-parallel ranks of a role have."""

    def __init__(self, dims: ParallelDims, device: str) -> None:
        """All ranks of the pool must create it."""
        self.dims = dims
        self.device = device
        self._group = _one_rank_of_each_part(dims)

    def sum(self, numbers: Iterable[float]) -> list[float]:
        """Every number summed over the parts. All ranks must have as many numbers."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """The largest of the parts' values."""
        return int(self._reduce([value], dist.ReduceOp.MAX)[0])

    def _reduce(self, numbers: Iterable[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        values = torch.tensor(list(numbers), dtype=torch.float64)
        if len(values) and self.dims.dp > 1:
            values = values.to(self.device)
            dist.all_reduce(values, op=operation, group=self._group)
        return values.tolist()


def _one_rank_of_each_part(dims: ParallelDims) -> dist.ProcessGroup | None:
    """The group of this rank and of the ranks with the same place in the other parts. None is the
    group of the whole pool."""
    if dims.dp in (1, dims.world_size):
        return None
    groups: list[list[int]] = []
    for place in range(dims.ranks_per_part):
        ranks = range(place, dims.world_size, dims.ranks_per_part)
        groups.append(list(ranks))
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group
