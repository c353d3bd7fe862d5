"""Tensor parallelism: the part of each weight that a rank holds, and the collectives between the ranks.

Attention heads and inner features of the MLP are divided over the ranks, so each layer needs two all-reduces. The
embedding and the head are not divided: they are often one tensor, and complete logits on every rank need no gathering.
This costs vocabulary x hidden weights per rank. Does not know how a layer is computed, nor where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from rolepool.errors import ConfigError
from rolepool.placement.models import why_not_parallel

_BY_OUTPUT, _BY_INPUT = 0, 1


class Shard:
    """The part of a model that rank `rank` of `size` holds. Ranks share key-value heads if there are fewer heads."""

    def __init__(self, model_config: Any, size: int, rank: int) -> None:
        num_kv_heads = model_config.num_key_value_heads
        counts = (model_config.num_attention_heads, num_kv_heads, model_config.intermediate_size)
        if (problem := why_not_parallel(*counts, size)) is not None:
            raise ConfigError(problem)
        self._size, self._rank = size, rank
        by_kv_heads = (_BY_OUTPUT, min(size, num_kv_heads))
        self._cuts = {
            "q_proj": (_BY_OUTPUT, size),
            "k_proj": by_kv_heads,
            "v_proj": by_kv_heads,
            "o_proj": (_BY_INPUT, size),
            "gate_proj": (_BY_OUTPUT, size),
            "up_proj": (_BY_OUTPUT, size),
            "down_proj": (_BY_INPUT, size),
        }

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a weight, as a view. A bias after an all-reduce is zero on all ranks but the first."""
        dim, num_parts = self._cut_of(name)
        if num_parts == 1:
            return whole
        if dim >= whole.dim():
            return whole if self._rank == 0 else torch.zeros_like(whole)
        length = whole.shape[dim] // num_parts
        return whole.narrow(dim, self._rank * num_parts // self._size * length, length)

    def whole_shape(self, name: str, part_shape: Size) -> Size:
        """The shape of the whole weight, from the shape of a part."""
        dim, num_parts = self._cut_of(name)
        return Size(length * num_parts if index == dim else length for index, length in enumerate(part_shape))

    def cut(self, model: nn.Module) -> None:
        """Replace the weights of a whole model with this rank's parts."""
        for name, parameter in model.named_parameters():
            whole = parameter.data
            part = self.part(name, whole)
            if part is not whole:
                parameter.data = part.clone()  # a view would keep the whole tensor

    def _cut_of(self, name: str) -> tuple[int, int]:
        """The axis along which a weight is divided, and the number of parts. A bias has only the axis of outputs."""
        return self._cuts.get(name.split(".")[-2], (_BY_OUTPUT, 1))


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share one copy of the weights. All must make the same calls in the same order."""

    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def over_neighbours(size: int) -> TensorParallel:
        """Groups of `size` adjacent ranks. All ranks of the process group must call this."""
        return TensorParallel(size, dist.new_subgroups(size)[0]) if size > 1 else TensorParallel()

    def sum(self, partial: Tensor) -> Tensor:
        """Add up the ranks' tensors in place. The result is identical on all ranks."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def first(self, tensor: Tensor) -> Tensor:
        """Replace the tensor with the first rank's, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def smallest(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        held = torch.tensor(number, device=device)
        dist.all_reduce(held, op=dist.ReduceOp.MIN, group=self.group)
        return int(held)
