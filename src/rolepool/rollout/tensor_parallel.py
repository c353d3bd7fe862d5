"""The weights of a rollout's model: the part that a tensor-parallel rank holds, and copying new
weights into them.

Attention heads and inner features of the MLP are divided over the ranks, so each layer needs two
all-reduces. The embedding and the head are not divided: they are often one tensor, and complete
logits on every rank need no gathering. This costs vocabulary x hidden weights per rank. Does not
know how a layer is computed, nor where weights come from.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from rolepool.config.model_files import why_not_parallel
from rolepool.errors import ConfigError, DataError, first_few
from rolepool.weights.digests import Digest, Digests
from rolepool.weights.regions import Region, whole_region

HfModule = Any
"""A model of Hugging Face, or a part of one. mypy does not know its attributes."""
HfConfig = Any
"""The config of such a model."""

_BY_OUTPUT = 0
_BY_INPUT = 1


class Shard:
    """The part of a model that rank `rank` of `size` holds. Several ranks hold the same key-value
    head if there are fewer of these heads than ranks."""

    def __init__(self, model_config: HfConfig, size: int, rank: int) -> None:
        num_heads = model_config.num_attention_heads
        num_kv_heads = model_config.num_key_value_heads
        problem = why_not_parallel(
            num_heads,
            num_kv_heads,
            model_config.intermediate_size,
            size,
        )
        if problem is not None:
            raise ConfigError(problem)
        self._size = size
        self._rank = rank
        num_kv_parts = min(size, num_kv_heads)
        self._splits = {
            "q_proj": (_BY_OUTPUT, size),
            "gate_proj": (_BY_OUTPUT, size),
            "up_proj": (_BY_OUTPUT, size),
            "k_proj": (_BY_OUTPUT, num_kv_parts),
            "v_proj": (_BY_OUTPUT, num_kv_parts),
            "o_proj": (_BY_INPUT, size),
            "down_proj": (_BY_INPUT, size),
        }

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a weight, as a view. A bias is zero on all ranks except the first if
        outputs are summed over the ranks."""
        dim, num_parts = self._split_of(name)
        if num_parts == 1:
            return whole
        if dim >= whole.dim():
            if self._rank == 0:
                return whole
            return torch.zeros_like(whole)
        length = whole.shape[dim] // num_parts
        # Neighbouring ranks have the same part if there are fewer parts than ranks.
        part = self._rank * num_parts // self._size
        start = part * length
        return whole.narrow(dim, start, length)

    def region(self, name: str, shape: Sequence[int]) -> Region:
        """This rank's part of a weight with this shape, which `part` returns. It is empty if this
        rank's bias is zero."""
        whole = whole_region(shape)
        dim, num_parts = self._split_of(name)
        if num_parts == 1:
            return whole
        if dim >= len(shape):
            return whole if self._rank == 0 else Region((0, 0), whole.columns)
        length = shape[dim] // num_parts
        start = self._rank * num_parts // self._size * length
        interval = (start, start + length)
        return whole._replace(rows=interval) if dim == 0 else whole._replace(columns=interval)

    def whole_shape(self, name: str, part_shape: Size) -> Size:
        """The shape of the whole weight, from the shape of a part."""
        dim, num_parts = self._split_of(name)
        lengths = list(part_shape)
        # A bias may have no such axis; then all ranks have its shape.
        if dim < len(lengths):
            lengths[dim] *= num_parts
        return Size(lengths)

    def keep_own_part(self, model: nn.Module) -> None:
        """Replace the weights of a whole model with this rank's parts."""
        for name, parameter in model.named_parameters():
            whole = parameter.data
            part = self.part(name, whole)
            if part is not whole:
                parameter.data = part.clone()  # a view would keep the whole tensor

    def _split_of(self, name: str) -> tuple[int, int]:
        """The axis along which a weight is divided, and the number of parts. A bias has only the
        axis of outputs."""
        module = name.split(".")[-2]
        return self._splits.get(module, (_BY_OUTPUT, 1))


class TensorParallel(NamedTuple):
    """The ranks that share one copy of the weights. All must make the same calls in the same
    order."""

    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def over_neighbours(size: int) -> "TensorParallel":
        """Groups of `size` adjacent ranks. All ranks of the process group must call this."""
        if size > 1:
            own_group, _ = dist.new_subgroups(size)
            return TensorParallel(size, own_group)
        return TensorParallel()

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


class WeightStream:
    """Copies whole tensors into `model`; with `shard`, the part of each that `model` holds. Tied
    weights may come with one of their names or with all of them.

    A wrong name or shape is an error when the tensor arrives, and a missing name is an error at the
    end. After an error the model contains a mixture of old and new weights.
    """

    def __init__(self, model: nn.Module, shard: Shard | None) -> None:
        self._targets = model.state_dict(keep_vars=True)
        self._shard = shard
        self._arrived: set[str] = set()
        self._digests = Digests()

    @torch.no_grad()
    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor in place as it arrives."""
        for name, tensor in named_tensors:
            if name not in self._targets:
                raise DataError(f"weights: {name} is not a weight of this model")
            if name in self._arrived:
                raise DataError(f"weights: {name} was sent twice")
            target = self._targets[name]
            if self._shard is None:
                shape = target.shape
            else:
                shape = self._shard.whole_shape(name, target.shape)
            if tensor.shape != shape:
                raise DataError(
                    f"weights: {name} has shape {list(tensor.shape)}, the model's {list(shape)}"
                )
            part = tensor if self._shard is None else self._shard.part(name, tensor)
            target.copy_(part)
            self._arrived.add(name)
            if part is tensor and target.dtype == tensor.dtype:
                self._digests.add(name, target.detach())
            else:
                # The model has a part of it, or has it in another dtype. The sender knows neither,
                # so the digest is that of what has arrived. It may be overwritten by the next one.
                self._digests.add(name, tensor, target.device, at_once=True)

    def end(self) -> dict[str, Digest]:
        """Check that all weights have arrived. Returns their digests: of what is in the model, or,
        if the model has a part of a weight or another dtype, of what has arrived."""
        # By the tensor, because tied weights have several names.
        arrived = {id(self._targets[name]) for name in self._arrived}
        missing: list[str] = []
        for name, target in self._targets.items():
            if id(target) not in arrived:
                missing.append(name)
        if missing:
            number = f"{len(missing)} of {len(self._targets)}"
            raise DataError(f"weights: {number} are missing: {first_few(missing, 5)}")
        return self._digests.read()
