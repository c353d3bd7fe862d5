"""How a model computes on the ranks of a pool: in 16 bits and compiled on a GPU, and sharded with
FSDP2.

Owns these three changes to a Hugging Face model and their order. In a pool of one process models
are not sharded. Nothing is compiled for a CPU.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.func import functional_call
from torch.utils._triton import has_triton

from rolepool.errors import logger
from rolepool.metrics.spans import COMPILE
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.part_times import note

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PACKED = "rolepool_packed"
"""`attn_implementation` of models that run packed rows; their layers are compiled on a GPU."""
TOKEN_SCORES = "token_scores"
"""A method that policies have (see `packing`). Weights are cast and gathered for it as they are for
`forward`."""
MOST_VERSIONS = 32
"""Maximum number of compiled versions of one function."""


def shard(model: nn.Module, device: str, dims: ParallelDims) -> nn.Module:
    """The model on its device, sharded over `dims.shard` ranks, and replicated over the rest."""
    layers = decoder_layers(model)
    own_methods = [TOKEN_SCORES] if hasattr(model, TOKEN_SCORES) else []
    if device == "cuda" and dims.world_size == 1:
        compute_in(torch.bfloat16, model, layers, ["forward", *own_methods])
    if device == "cuda" and _is_packed(model):
        # After `compute_in`, so that its casts are compiled, too. Gathering weights and
        # checkpointing are not compiled.
        for layer in layers:
            layer.forward = compiled(layer.forward, _mark_head_size)
    if dims.world_size == 1:
        return model.to(device)
    sizes = {"shard": dims.shard}
    if dims.num_replicas > 1:
        sizes = {"replicate": dims.num_replicas, **sizes}
    mesh = init_device_mesh(
        device,
        mesh_shape=tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
    )
    shard_over(mesh, model, layers, device)
    for name in own_methods:
        register_fsdp_forward_method(model, name)
    return model


def _is_packed(model: nn.Module) -> bool:
    """Whether a model of Hugging Face runs packed rows."""
    config: Any = model.config
    implementation: str | None = config._attn_implementation
    return implementation == PACKED


def shard_over(
    mesh: DeviceMesh,
    model: nn.Module,
    layers: Sequence[nn.Module],
    device: str,
) -> None:
    """Shard the layers, and then what is outside of them, over the ranks of a mesh."""
    # Weights, gradients and optimizer states stay in fp32; a GPU computes in bf16.
    policy = MixedPrecisionPolicy()
    if device != "cpu":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
    # Layers move to the device one by one when they are sharded, so the whole model never has to
    # fit there. FSDP2 warns about in-place changes to outputs that are views; rolepool makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # The loss of the mini-batch is the sum of the ranks' losses, so gradients are summed.
        # Averaging them and scaling back would round them. They are plain sums, because gloo has no
        # other reduction.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated layers of a transformer: its longest list of modules."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


# 16 bits


def compute_in(
    dtype: torch.dtype,
    model: nn.Module,
    layers: Iterable[nn.Module],
    methods: Iterable[str],
) -> None:
    """Let the layers, and these methods of the model around them, compute with copies of the
    weights in `dtype`.

    Each layer creates its copies when it runs, and in training may keep them for its backward pass.
    Weights and gradients stay in fp32. FSDP2 does the same for sharded models.
    """
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return
    of_layers: set[nn.Parameter] = set()
    for layer in layers:
        names: set[str] = set()
        for name, weight in layer.named_parameters():
            names.add(name)
            of_layers.add(weight)
        _use_copies(dtype, layer, "forward", names)
    around: set[str] = set()
    for name, weight in model.named_parameters():
        if weight not in of_layers:
            around.add(name)
    for method in methods:
        _use_copies(dtype, model, method, around)


class _Call(nn.Module):
    """Wraps a method of a module as a `forward`, so that `functional_call` can replace the weights
    for one call."""

    def __init__(self, module: nn.Module, method: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.method(*args, **kwargs)


def _use_copies(
    dtype: torch.dtype,
    module: nn.Module,
    method: str,
    weights: Container[str],
) -> None:
    """Replace a method of a module by one that runs with copies of these weights."""
    call = _Call(module, getattr(module, method))

    def with_copies(*args: object, **kwargs: object) -> object:
        copies: dict[str, Tensor] = {}
        for name, weight in call.module.named_parameters():
            if name in weights:
                copies[f"module.{name}"] = weight.to(dtype)
        return functional_call(call, copies, args, kwargs)

    setattr(module, method, with_copies)


# Compiling. Torch caches compiled code on disk for later processes.


def compiled(
    function: Callable[Arguments, Result],
    mark: Callable[..., None],
) -> Callable[Arguments, Result]:
    """The compiled function, for any number of tokens; the function itself if there is no compiler.

    `mark` gets the arguments before each call and marks sizes as constant, so that kernels are
    compiled for them.
    """
    if not has_compiler():
        return function
    fast = torch.compile(function, dynamic=True)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        mark(*args, **kwargs)
        return fast(*args, **kwargs)

    return call


def _mark_head_size(
    *_: object, position_embeddings: Iterable[Tensor] | None = None, **__: object
) -> None:
    """Mark the width of rotary tables. Otherwise kernels would divide by it for every number that
    they move."""
    for table in position_embeddings or ():
        torch._dynamo.mark_static(table, table.dim() - 1)


def compiled_for_weight(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """As `compiled`, for a function whose second argument is a weight: kernels are compiled for its
    exact size."""
    return compiled(function, lambda inputs, weight, *_: torch._dynamo.mark_static(weight))


@cache
def has_compiler() -> bool:
    """Whether functions can be compiled."""
    if not has_triton() or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        logger.warning(
            "found no Triton or no C compiler, so models run uncompiled and slower; install gcc and triton"
        )
        return False
    # Roles of a process share the code of layers; training, scoring and frozen weights need their
    # own versions.
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    measure_compiling()
    return True


@cache
def measure_compiling() -> None:
    """From now on, how long compiling takes is logged, and noted in the call that compiles."""
    started_s = [0.0]
    on_compile_start(lambda _: started_s.append(time.perf_counter()))

    @on_compile_end
    def end(args: CallbackArgs) -> None:
        trigger = args.callback_trigger.name.lower()
        seconds = time.perf_counter() - started_s[-1]
        note(COMPILE, seconds)
        logger.debug("compiled a part of the model (%s) in %.1f s", trigger, seconds)
