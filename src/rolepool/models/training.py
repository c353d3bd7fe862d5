"""Models on their devices: frozen, or in training with an optimizer and one exact optimizer step
per mini-batch.

Owns gradient accumulation, clipping, learning rate, offload, and how much of a GPU's arithmetic an
update uses. The caller passes the loss.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rolepool.config.model_files import ModelShape
from rolepool.config.model_keys import FsdpConfig, OptimConfig
from rolepool.errors import RolepoolError
from rolepool.models.ranks import whole
from rolepool.models.sharding import shard
from rolepool.placement.parallel import ParallelDims
from rolepool.protocol.part_times import part, work_of

LossOf = Callable[[Sequence[int]], tuple[Tensor, dict[str, Tensor]]]
"""The loss of some rows, and metrics. Summed over micro-batches and ranks they are those of the
whole mini-batch."""

COPIES_AT_ONCE = 200
"""Copies that wait in the queue of a GPU. It has about a thousand places, and if it is full, other
work waits, too."""
PEAK_TFLOPS = {
    "A100": 312,
    "L40S": 362,
    "H20": 148,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "B200": 2250,
}
"""10^12 matrix operations per second in 16 bits, without sparsity, by a word of the GPU's name."""


class DeviceModel:
    """A model that is on its device while it computes. What is offloaded is in host memory while
    the model is idle."""

    model: nn.Module
    device: str
    _moves: list[Callable[[str], object]]
    """What moves offloaded tensors to a device."""
    failure: BaseException | None = None
    """The error of an update that failed halfway. The weights are not usable until all of them are
    replaced."""

    @contextmanager
    def on_device(self, *, training: bool = False) -> Iterator[nn.Module]:
        """The model on its device inside the block, for training, or without gradients.

        After an update that failed halfway every use raises an error, too.
        """
        if self.failure is not None:
            raise RolepoolError(
                f"an earlier update failed, so these weights cannot be used: {self.failure!r}"
            )
        for move in self._moves:
            if training or move == self.model.to:  # only training needs the optimizer
                move(self.device)
        try:
            with torch.set_grad_enabled(training):
                yield self.model.train(training)
        except BaseException as error:
            self.failure = error if training else None
            raise
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        """Free memory after a use of the model: gathered weights, and what is offloaded."""
        if isinstance(self.model, FSDPModule):
            # Without a backward pass FSDP2 would keep the embedding, head and last norm gathered
            # for the next forward pass.
            self.model.reshard()
        for move in self._moves:
            move("cpu")
        if self._moves:
            torch.cuda.empty_cache()


class FrozenModel(DeviceModel):
    """A model without training: no gradients and no optimizer."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        dims: ParallelDims,
        offload: bool,
    ) -> None:
        self.device = device
        frozen = model.requires_grad_(False)
        self.model = shard(frozen, device, dims).eval()
        self._moves = []
        if offload and device != "cpu":
            self._moves.append(self.model.to)
        self._leave_device()


class TrainedModel(DeviceModel):
    """A model, its AdamW and its learning rate."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        dims: ParallelDims,
        optim: OptimConfig,
        fsdp: FsdpConfig,
        grad_clip: float,
        num_steps: int,
    ) -> None:
        """`num_steps` is the number of steps in which the model is updated."""
        self.device = device
        self.dims = dims
        self.model = shard(model, device, dims)
        self.optim = optim
        self.grad_clip = grad_clip
        self.num_steps = num_steps
        self.num_updates = 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=device == "cuda",
        )
        self._moves = []
        if fsdp.param_offload and device != "cpu":
            self._moves.append(self.model.to)
        if fsdp.optimizer_offload and device != "cpu":
            self._moves.append(self._move_optimizer)
        self._copier = ThreadPoolExecutor(1)
        self._copying: Future[None] | None = None
        self._leave_device()

    @cached_property
    def copy_stream(self) -> torch.cuda.Stream:
        """The stream that copies weights to host memory while the GPU computes."""
        return torch.cuda.Stream()

    def copy_later(
        self,
        sources: list[Tensor],
        copies: list[Tensor],
        then: Callable[[], object],
        prepare: Callable[[], bool] | None = None,
    ) -> None:
        """Copy parts of the state to host memory, then call a function. On a GPU a thread does it
        in its own stream, after the work so far and beside later work. Only the next update waits
        for it. `prepare` is called before the first copy, and if it returns False, nothing is
        copied. A thread does this on a CPU, too."""
        if self.device == "cpu":

            def copy_here() -> None:
                if prepare is not None and not prepare():
                    return
                if sources:
                    torch._foreach_copy_(copies, sources)
                then()

            if prepare is None:
                copy_here()
            else:
                self._copying = self._copier.submit(copy_here)
            return
        done = torch.cuda.current_stream().record_event()

        def copy() -> None:
            with torch.cuda.stream(self.copy_stream):
                if prepare is not None and not prepare():
                    return
                self.copy_stream.wait_event(done)
                for first in range(0, len(sources), COPIES_AT_ONCE):
                    some = slice(first, first + COPIES_AT_ONCE)
                    torch._foreach_copy_(
                        copies[some],
                        sources[some],
                        non_blocking=True,
                    )
                    self.copy_stream.synchronize()
            then()

        self._copying = self._copier.submit(copy)

    def wait_for_copies(self) -> None:
        """Wait until the last `copy_later` has ended. Raises its error."""
        if self._copying is not None:
            self._copying.result()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update: linear warm-up, then constant or a cosine down to
        min_lr_ratio."""
        optim = self.optim
        step = self.num_updates
        warmup = optim.lr_warmup_steps
        if warmup < 0:
            warmup = int(optim.lr_warmup_steps_ratio * self.num_steps)
        if step < warmup:
            return optim.lr * (step + 1) / warmup
        if optim.lr_scheduler_type == "constant":
            return optim.lr
        num_cosine_steps = max(1, self.num_steps - warmup)
        done = min(1.0, (step - warmup) / num_cosine_steps)
        lowest = optim.min_lr_ratio
        cosine = math.cos(math.pi * done)
        ratio = lowest + (1 - lowest) * 0.5 * (1 + cosine)
        return optim.lr * ratio

    def step(
        self,
        micro_batches: Sequence[Sequence[int]],
        loss_of: LossOf,
        lengths: Sequence[int] = (),
    ) -> dict[str, Tensor]:
        """One optimizer step on a mini-batch, given as the rows of each micro-batch on this rank,
        and the lengths of rows, which are only recorded.

        Metrics are sums over this rank's rows, except `grad_norm`, which is that of the whole pool;
        if it is not finite, the update is skipped. They stay on the device, because reading them
        would wait for the device, which would then be idle until it gets more work.
        """
        self.model.train()
        self.wait_for_copies()  # they read what the update changes
        totals: dict[str, Tensor] = {}
        for number, rows in enumerate(micro_batches, 1):
            if isinstance(self.model, FSDPModule):
                # Each backward pass sums gradients over shards, because unsharded gradients would
                # take as much memory as the whole model. Only the last one also sums them over
                # replicas.
                self.model.set_requires_all_reduce(number == len(micro_batches))
            work = (0, 0)
            if lengths:
                work = work_of(lengths[row] for row in rows)
            with part("forward", *work):
                loss, metrics = loss_of(rows)
            with part("backward", *work):
                loss.backward()
            for name, share in metrics.items():
                earlier = totals.get(name, 0.0)
                totals[name] = share.double() + earlier
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        with part("optimizer"):
            parameters = self.model.parameters()
            norm = whole(nn.utils.clip_grad_norm_(parameters, self.grad_clip))
            is_bad = ~norm.isfinite()
            if self.device == "cuda":
                # The fused kernel reads this flag, and changes nothing if it is 1.
                self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            if self.device == "cuda" or not is_bad:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return {**totals, "grad_norm": norm.double()}

    def _move_optimizer(self, device: str) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(device)


def model_utilization(
    shape: ModelShape | None,
    lengths: Tensor,
    seconds: float,
    gpu_name: str,
) -> float | None:
    """The share of its GPU's peak FLOPS that one rank's update on rows of these lengths used,
    between 0 and 1; None if the model's shape or the GPU's peak is not known.

    Forward and backward take six operations per parameter and token, and causal attention within
    each sequence.
    """
    peak_tflops = _peak_tflops(gpu_name)
    if shape is None or peak_tflops is None:
        return None
    num_tokens = int(lengths.sum())
    num_pairs = int(lengths.long().square().sum())
    of_token = 6.0 * shape.num_params
    of_pair = 6 * shape.num_layers * shape.num_heads * shape.head_dim
    num_operations = of_token * num_tokens + of_pair * num_pairs
    possible = seconds * peak_tflops * 1e12
    return num_operations / possible


def _peak_tflops(gpu_name: str) -> int | None:
    """The peak of a GPU with a name such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    for word in re.split(r"\W+", gpu_name):
        if word in PEAK_TFLOPS:
            return PEAK_TFLOPS[word]
    return None
