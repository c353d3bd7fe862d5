"""Measures what it costs that a model is sharded: a small model computes with and without sharding.

Owns the small model and the order of the measurements. It uses the same calls as training, so the
times contain everything that sharding adds: collectives, copies before and after them, and the work
of the host. It takes about a second. The times of two sizes of the model tell the cost of a layer
from the cost of its parameters.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.metrics.sharding_times import ShardingTime
from rolepool.models.ranks import whole
from rolepool.models.sharding import decoder_layers, shard_over

NUM_LAYERS = 3
WIDTHS = {"cpu": (64, 192), "cuda": (64, 1024)}
"""The hidden size of the small and of the large model."""
NUM_REPEATS = {"cpu": (7, 4), "cuda": (20, 20)}
"""Repetitions for the two sizes."""
NUM_ACTIVATIONS = 2**15
"""Numbers that a layer passes on, so that it computes for a while between two collectives, as it
does in training."""
ROW_LENGTH = 16
CACHE_BYTES = 2**23
"""What is written before each measured time. In training much happens between two passes of the
same kind, so code and weights are not in the caches of the processor any more."""
GATHER_EVERY = 2
"""Gathering all weights one by one takes longest, so it is repeated less often."""
NUM_WARM_REPEATS = 1
"""The first repetitions allocate memory and open connections."""

Result = TypeVar("Result")
Seconds = dict[str, list[float]]
"""The measured times of each part."""


def small_model(width: int) -> nn.Module:
    """A Llama with few layers, because what FSDP does around a layer depends on its arguments and
    its number of weights."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=ROW_LENGTH,
    )
    return LlamaForCausalLM(config)


def sizes_to_measure(num_ranks: int, device: str) -> list[int]:
    """How many ranks the model is sharded over, one after another. On a GPU each size would need
    connections of its own, which take memory and seconds, so only those of the whole group are
    used."""
    sizes = {num_ranks}
    if device != "cuda":
        sizes.add(2)
    return sorted(size for size in sizes if 1 < size <= num_ranks)


def measure_sharding(device: str) -> list[ShardingTime]:
    """The times on this rank, for each number of ranks that is measured. All ranks of the process
    group must call it. Ranks that are not among those of a measurement wait for the next one."""
    rank = dist.get_rank()
    widths_and_repeats = list(zip(WIDTHS[device], NUM_REPEATS[device], strict=True))
    measured: list[ShardingTime] = []
    for num_ranks in sizes_to_measure(dist.get_world_size(), device):
        mesh = DeviceMesh(device, list(range(num_ranks)))
        if rank < num_ranks:
            for width, num_repeats in widths_and_repeats:
                measured += _measure_width(device, mesh, width, num_repeats)
    dist.barrier()
    if device == "cuda":
        torch.cuda.empty_cache()
    return measured


def _measure_width(
    device: str,
    mesh: DeviceMesh,
    width: int,
    num_repeats: int,
) -> Iterator[ShardingTime]:
    model = small_model(width)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    alone_s = _time_parts(model.to(device), width, device, num_repeats)
    sharded = small_model(width)
    shard_over(mesh, sharded, decoder_layers(sharded), device)
    sharded_s = _time_parts(sharded, width, device, num_repeats)
    for part, seconds in sharded_s.items():
        yield ShardingTime(
            mesh.size(),
            part,
            NUM_LAYERS + 1,
            num_params,
            sharded_s=median(seconds),
            alone_s=median(alone_s[part]),
        )


def _time_parts(
    model: nn.Module,
    width: int,
    device: str,
    num_repeats: int,
) -> Seconds:
    """The times of the parts of an update, of computing without gradients, and of gathering all
    weights."""
    cache_bytes = CACHE_BYTES if device == "cpu" else 0
    cache = torch.zeros(cache_bytes, dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    num_rows = max(1, NUM_ACTIVATIONS // width // ROW_LENGTH)
    ids = torch.ones(
        num_rows,
        ROW_LENGTH,
        dtype=torch.long,
        device=device,
    )
    seconds: Seconds = {}

    def compute_loss() -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits.float().sum()

    def gather() -> list[Tensor]:
        weights = model.state_dict().values()
        return [whole(weight) for weight in weights]

    for number in range(NUM_WARM_REPEATS + num_repeats):
        # The times of warm repeats are not kept.
        times: Seconds = seconds if number >= NUM_WARM_REPEATS else {}
        timed = partial(_timed, times, device, cache)
        loss = timed("forward", compute_loss)
        timed("backward", loss.backward)
        timed("optimizer", partial(_update, model, optimizer))
        with torch.no_grad():
            timed("score", partial(model, ids, use_cache=False))
        if isinstance(model, FSDPModule):
            model.reshard()
        if number % GATHER_EVERY == 0:
            timed("gather", gather)
    return seconds


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    whole(norm)  # gathered, as an update does
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _timed(
    times: Seconds,
    device: str,
    cache: Tensor,
    part: str,
    work: Callable[[], Result],
) -> Result:
    """Do the work and add its time. `cache` is written first, see `CACHE_BYTES`."""
    cache.add_(1)
    start_s = _now(device)
    result = work()
    seconds = _now(device) - start_s
    times.setdefault(part, []).append(seconds)
    return result


def _now(device: str) -> float:
    """The time when the device has done everything so far."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
