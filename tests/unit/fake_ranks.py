"""One rank of a pool on a GPU, without a GPU: real FSDP2, real models and `TrainedModel.step` with
fake tensors, and the bytes that are alive at every operation.

Fake tensors have a shape and no numbers, so a model of billions of parameters fits here. The other
ranks are those of torch's fake process group, which exchanges nothing. What is different from a GPU
is replaced by what a GPU does:

- attention and the kernels of log-probs allocate their results only;
- the optimizer has Adam's states and changes nothing, as the fused kernel allocates nothing else;
- two gradients of one weight are added in place, which autograd does not do with fake tensors.

Layers are not compiled, so their activations are those of padded rows.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)

from rolepool.config.model_files import read_shape
from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.models import packing, training
from rolepool.models.sharding import TOKEN_SCORES, compute_in, decoder_layers, shard_over
from rolepool.models.training import FrozenModel, TrainedModel
from rolepool.placement.estimate import LOGITS_AT_ONCE, HeldModel
from rolepool.placement.parallel import ParallelDims

SHAPES = Path(__file__).parent.parent.parent / "recipes" / "shapes"
ATTENTION = "allocates_its_result"
EMBEDDING_ROWS = 30_000
"""A matrix with at least so many rows is the embedding or the head."""


@dataclass(frozen=True)
class FakeRun:
    """A role of one rank, and the tokens of each of its micro-batches."""

    shape: str
    num_layers: int
    role: str
    """`actor`, `critic` or `ref`."""
    num_ranks: int = 1
    num_shards: int = 1
    num_tokens: int = 4
    num_micro_batches: int = 1
    recomputes: bool = False

    @property
    def is_trained(self) -> bool:
        return self.role != "ref"

    @property
    def num_response_tokens(self) -> int:
        return self.num_tokens // 2

    @property
    def held(self) -> HeldModel:
        """The same as the plan knows it."""
        shape = read_shape(str(SHAPES / self.shape), {"num_hidden_layers": self.num_layers})
        has_logits = self.role != "critic"
        return HeldModel(
            shape,
            shape.num_params if has_logits else shape.num_scalar_head_params,
            self.num_shards,
            length=self.num_tokens,
            logit_share=Fraction(1, 2) if has_logits else Fraction(0),
            trained=self.is_trained,
        )

    @property
    def planned_update(self) -> int:
        accumulates = self.num_micro_batches > 1
        return self.held.training(
            self.num_tokens, recomputes=self.recomputes, accumulates=accumulates
        ).working


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.phase = "start"
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}

    def resized(self, storage: Any) -> None:
        """FSDP2 empties and fills the storages of weights without an operation of torch."""
        key = id(storage)
        if key in self._storages and self._storages[key]() is storage:
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._record()

    def _record(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

    def _count(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.now -= self._sizes.pop(key)

        self._storages[key] = weakref.ref(storage, forget)
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first to the operations on local tensors, which come here then
        is_sum = func is torch.ops.aten.add.Tensor and isinstance(args[1], Tensor)
        if is_sum and args[0].dim() == 2 and len(args[0]) >= EMBEDDING_ROWS:
            result = args[0].add_(args[1])
        else:
            result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args, kwargs)):
            self._count(value)
        self._record()
        return result


class AdamStates(torch.optim.Optimizer):
    """Two states per parameter, like those of AdamW; the parameters do not change."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
) -> tuple[Tensor, None]:
    scale = more.get("scaling")
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2), None


def _score(hidden: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden @ weight.T
    size, dtype = len(logits), torch.float32
    return torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype), torch.empty(size)


def _differentiate(hidden: Tensor, weight: Tensor, *_: object) -> Tensor:
    return hidden @ weight.T


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    total.add_(0)


@contextmanager
def as_on_a_gpu(live: LiveBytes, run: FakeRun, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake ranks, fake tensors, and functions that allocate what their twins on a GPU do."""
    kernels = {packing._score: _score, packing._differentiate: _differentiate}
    linear = packing.LinearLogProbs(LOGITS_AT_ONCE, lambda function: kernels[function])
    patch.setattr(packing, "_linear_log_probs", lambda on_gpu: linear)
    patch.setattr(packing, "_add_product", _add_product)
    AttentionInterface.register(ATTENTION, _attention)
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    patch.setattr(torch.UntypedStorage, "resize_", counted_resize)
    dist.init_process_group("fake", rank=0, world_size=run.num_ranks, store=FakeStore())
    sizes = {"replicate": run.num_ranks // run.num_shards, "shard": run.num_shards}
    if run.num_shards == run.num_ranks:
        del sizes["replicate"]
    # Before the mode of fake tensors, because a mesh has real numbers.
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    patch.setattr(training, "shard", lambda model, device, dims: _sharded(model, mesh))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            yield
    finally:
        dist.destroy_process_group()


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What `sharding.shard` does on GPUs, on fake tensors."""
    layers = decoder_layers(model)
    own_methods = [TOKEN_SCORES] if hasattr(model, TOKEN_SCORES) else []
    if mesh.size() == 1:
        compute_in(torch.bfloat16, model, layers, ["forward", *own_methods])
        return model
    shard_over(mesh, model, layers, "cuda")
    for name in own_methods:
        register_fsdp_forward_method(model, name)
    return model


def _load(run: FakeRun) -> nn.Module:
    entries: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0}
    config = AutoConfig.from_pretrained(
        SHAPES / run.shape, num_hidden_layers=run.num_layers, **entries
    )
    auto: Any = AutoModelForTokenClassification if run.role == "critic" else AutoModelForCausalLM
    dtype = torch.float32 if run.is_trained else torch.bfloat16
    model: Any = auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    if run.recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model if run.role == "critic" else packing.add_token_scores(model)


def peaks(run: FakeRun, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes that were alive in each phase of the second step: `score`, `update`, and
    `idle` at its end."""
    dims = ParallelDims(dp=run.num_ranks, shard=run.num_shards)
    live = LiveBytes()
    with as_on_a_gpu(live, run, patch):
        model = _load(run)
        placed: FrozenModel | TrainedModel
        if run.is_trained:
            placed = trained = TrainedModel(
                model,
                device="cpu",
                dims=dims,
                optim=OptimConfig(),
                fsdp=FsdpConfig(),
                grad_clip=1.0,
                num_steps=2,
            )
            trained.device = "cuda"  # an update does not look at numbers then
            trained.optimizer = AdamStates(model.parameters())  # type: ignore[assignment]
        else:
            placed = FrozenModel(model, device="cpu", dims=dims, offload=False)
        del model
        ids = torch.zeros(1, run.num_tokens, dtype=torch.long)
        positions = torch.arange(run.num_tokens).unsqueeze(0)
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        places = torch.arange(run.num_response_tokens)

        def scores() -> Tensor:
            called: Any = placed.model
            if run.role == "critic":
                return called(**inputs).logits.flatten()[places].float()  # type: ignore[no-any-return]
            return called.token_scores(inputs, places, places, 1.0)[0]  # type: ignore[no-any-return]

        def loss_of(rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
            return scores().sum(), {}

        for number in range(2):
            live.phase = "score" if number else "start"
            with placed.on_device():
                scores()
            if run.is_trained:
                live.phase = "update" if number else "start"
                with placed.on_device(training=True):
                    trained.step([[0]] * run.num_micro_batches, loss_of)
        live.phase = "idle"
        torch.zeros(1)
    return dict(live.peaks)
