"""Tensor parallelism: the part of each weight that a rank holds, and what the ranks of one copy agree on.

Heads of attention and inner features of the MLP are divided over the ranks, so a layer is two sums over them. The
embedding and the head stay whole: often they are one tensor, and whole logits on every rank need no gathering, at the
price of vocabulary x hidden weights per rank. Does not know how a layer is computed, nor where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from rolepool.errors import ConfigError
from rolepool.placement.engines import why_not_parallel

_BY_OUTPUT, _BY_INPUT = 0, 1


class Shard:
    """The part of a model that rank `rank` of `size` holds. Of fewer key-value heads than ranks, several hold one."""

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
        """This rank's part of a weight: a view, or of what is added after a sum over ranks, zeros on all but one."""
        dim, num_parts = self._cut_of(name)
        if num_parts == 1:
            return whole
        if dim >= whole.dim():
            return whole if self._rank == 0 else torch.zeros_like(whole)
        length = whole.shape[dim] // num_parts
        return whole.narrow(dim, self._rank * num_parts // self._size * length, length)

    def whole_shape(self, name: str, part_shape: Size) -> Size:
        """The shape of a weight of whose part this is the shape."""
        dim, num_parts = self._cut_of(name)
        return Size(length * num_parts if index == dim else length for index, length in enumerate(part_shape))

    def cut(self, model: nn.Module) -> None:
        """Replace the weights of a whole model by this rank's parts."""
        for name, parameter in model.named_parameters():
            whole = parameter.data
            part = self.part(name, whole)
            if part is not whole:
                parameter.data = part.clone()  # a view would keep the whole

    def _cut_of(self, name: str) -> tuple[int, int]:
        """The axis along which a weight is cut, and into how many parts. A bias has one axis, that of outputs."""
        return self._cuts.get(name.split(".")[-2], (_BY_OUTPUT, 1))


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that hold one copy of the weights between them. All must make the same calls in the same order."""

    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def over_neighbours(size: int) -> TensorParallel:
        """Groups of `size` ranks side by side. All ranks of the process group must call this."""
        return TensorParallel(size, dist.new_subgroups(size)[0]) if size > 1 else TensorParallel()

    def sum(self, partial: Tensor) -> Tensor:
        """The ranks' tensors added up, in place. The result is the same to the last bit on all of them."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def first(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def smallest(self, number: int, device: torch.device) -> int:
        """Of the ranks' numbers."""
        if self.size == 1:
            return number
        held = torch.tensor(number, device=device)
        dist.all_reduce(held, op=dist.ReduceOp.MIN, group=self.group)
        return int(held)
