"""Weights spread over the ranks of a pool, with FSDP2.

Owns which modules are sharded together, what of them is compiled, and reading whole weights back. In a pool of one
process there is nothing to spread, and models stay whole.
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
    """The model on its device, sharded over `fsdp_size` ranks (-1: all of the pool) and replicated over the rest."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layers = list(decoder_layers(model))
    own_methods = [TOKEN_SCORES] if hasattr(model, TOKEN_SCORES) else []
    if device == "cuda" and world_size == 1:
        compute_in(torch.bfloat16, model, layers, ["forward", *own_methods])
    if device == "cuda" and is_packed(model):
        compile_layers(layers)
    if world_size == 1:
        return model.to(device)
    size = num_shards(fsdp_size, world_size)
    if size == world_size:
        mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
    # Weights, gradients and optimizer states stay in fp32; a GPU computes in bf16.
    policy = MixedPrecisionPolicy() if device == "cpu" else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # Layers go to the device one by one as they are sharded: the whole model never has to fit there.
    # It warns of in-place changes to what a model returns when that is a view; nothing here makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # The ranks' losses are shares to be added, and so are gradients: averaging and scaling back would round them.
        # As plain sums, for gloo has no others.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for name in own_methods:
        register_fsdp_forward_method(model, name)
    return model


def num_shards(fsdp_size: int, world_size: int) -> int:
    """Ranks that one copy of the weights is spread over."""
    return world_size if fsdp_size == -1 else fsdp_size


def decoder_layers(model: nn.Module) -> Iterable[nn.Module]:
    """The repeated blocks of a transformer: the longest list of modules in it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def free_gathered(model: nn.Module) -> None:
    """Let go of the embedding, head and last norm that were put together for a pass. Without a backward pass they would
    stay, for the next."""
    if isinstance(model, FSDPModule):
        model.reshard()


def add_up_replicas(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass also adds gradients up over replicas; over shards it always does.

    Gradients that wait for the last pass whole would take as much memory as the model that is sharded for its size.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def whole_parameters(model: nn.Module, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters (these, or all) by Hugging Face name, put together one at a time. All ranks must do it together."""
    for name, parameter in model.state_dict().items():
        if names is None or name in names:
            yield name, whole(parameter)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; another as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a norm over all shards of at most `max_norm`; returns the norm they had."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def sum_over_ranks(values: dict[str, float], device: str) -> dict[str, float]:
    """Every value added up over the pool. All ranks must have the same keys."""
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
