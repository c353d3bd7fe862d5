"""The weights of a model as others need them: by name, each of them whole or as this rank's shard.

Owns which names a model's weights have, and gathering a sharded model tensor by tensor, so that the
whole model never has to fit on one device. Does not know who needs the weights, nor how they get
there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rolepool.models.ranks import whole
from rolepool.models.training import DeviceModel


class WeightSpec(NamedTuple):
    """A weight without its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool = False
    """Whether FSDP2 divides its rows over ranks."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name; tied weights are listed once."""
    # Reading the state dict also makes FSDP2 reshard parameters that a forward pass gathered.
    weights: dict[str, Tensor] = dict(model.state_dict())
    listed_once = dict(model.named_parameters())
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in listed_once:
            weights.pop(name, None)
    return weights


class WeightSource:
    """The weights of a model as rollouts get them: whole tensors in the dtype that rollouts
    compute in, under the names of Hugging Face."""

    def __init__(self, placed: DeviceModel, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the rollouts; None leaves weights as they are."""
        self._placed = placed
        self._dtype = dtype

    def specs(self) -> list[WeightSpec]:
        """All weights in their order; tied weights are listed once."""
        specs: list[WeightSpec] = []
        for name, weight in weights_of(self._placed.model).items():
            spec = WeightSpec(
                name,
                shape=tuple(weight.shape),
                dtype=self._dtype_of(weight),
                is_sharded=isinstance(weight, DTensor),
            )
            specs.append(spec)
        return specs

    @contextmanager
    def open(self, names: Iterable[str] | None = None) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The weights with these names, or all weights. They can be read until the block ends.

        A weight is gathered from the ranks when it is read, so every rank must read every weight.
        The tensors may be the model's own.
        """
        with self._placed.on_device() as model:
            wanted = None if names is None else list(names)
            weights = {} if wanted == [] else weights_of(model)
            yield ((name, self._gathered(weights[name])) for name in wanted or weights)

    @contextmanager
    def open_shards(self) -> Iterator[Callable[[str], Tensor]]:
        """What this rank has of each weight, in the dtype of the model: the rows of its shard, or
        all of it if the weight is not sharded. It can be read until the block ends, and is the
        model's own. No other rank takes part."""
        with self._placed.on_device() as model:
            weights = weights_of(model)

            def shard_of(name: str) -> Tensor:
                weight = weights[name]
                local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
                return local.detach()

            yield shard_of

    def _gathered(self, weight: Tensor) -> Tensor:
        return whole(weight).detach().to(self._dtype_of(weight))

    def _dtype_of(self, weight: Tensor) -> torch.dtype:
        if self._dtype is None or not weight.is_floating_point():
            return weight.dtype
        return self._dtype
