"""Sharding weights over the ranks of a pool, with FSDP2.

Owns which modules are sharded together, which are compiled, and gathering whole weights. In a pool of one process
models are not sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rolepool.models.attention import is_packed
from rolepool.models.compiling import compile_layers
from rolepool.models.forward import TOKEN_SCORES
from rolepool.models.precision import compute_in


def shard(model: nn.Module, device: str, fsdp_size: int) -> nn.Module:
    """The model on its device, sharded over `fsdp_size` ranks (-1 is the whole pool) and replicated over the rest."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layers = list(decoder_layers(model))
    own_methods = [TOKEN_SCORES] if hasattr(model, TOKEN_SCORES) else []
    if device == "cuda" and world_size == 1:
        compute_in(torch.bfloat16, model, layers, ["forward", *own_methods])
    if device == "cuda" and is_packed(model):  # after `compute_in`, so that its casts are compiled, too
        compile_layers(layers)
    if world_size == 1:
        return model.to(device)
    size = world_size if fsdp_size == -1 else fsdp_size
    if size == world_size:
        mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
    # Weights, gradients and optimizer states stay in fp32; a GPU computes in bf16.
    policy = MixedPrecisionPolicy() if device == "cpu" else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # Layers move to the device one by one when they are sharded, so the whole model never has to fit there.
    # FSDP2 warns about in-place changes to outputs that are views; rolepool makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Losses of ranks are shares that add up, so gradients are summed; averaging and scaling back would round them.
        # As plain sums, because gloo has no other reduction.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for name in own_methods:
        register_fsdp_forward_method(model, name)
    return model


def decoder_layers(model: nn.Module) -> Iterable[nn.Module]:
    """The repeated layers of a transformer: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def free_gathered(model: nn.Module) -> None:
    """Free the embedding, head and last norm that FSDP2 gathered. Without a backward pass it would keep them for the
    next forward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def add_up_replicas(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass also sums gradients over replicas; it always sums them over shards.

    Keeping unsharded gradients until the last micro-batch would take as much memory as the whole model.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def whole_parameters(model: nn.Module, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters (these names, or all) by Hugging Face name, gathered one at a time. All ranks must call it."""
    for name, parameter in model.state_dict().items():
        if names is None or name in names:
            yield name, whole(parameter)


def whole(tensor: Tensor) -> Tensor:
    """The gathered tensor if it is sharded, else the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a norm (over all shards) of at most `max_norm`; returns the norm before."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def sum_over_ranks(values: dict[str, float], device: str) -> dict[str, float]:
    """Every value summed over the pool. All ranks must have the same keys."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or not values:
        return values
    total = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def max_over_ranks(value: int, device: str) -> int:
    """The largest of the ranks' values."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
