"""What a transfer of weights between two pools is expected to be: its way, its bytes and its time,
as `rolepool plan` prints them.

The speeds are assumptions, all of them here. `rolepool predict` uses recorded times instead.
"""

from __future__ import annotations

from rolepool.config import Config
from rolepool.config.model_files import ShapeUnknown
from rolepool.placement.estimate import BF16, FP32, generation_memory, shape_of
from rolepool.placement.plan import Plan
from rolepool.placement.roles import Role
from rolepool.placement.weight_ways import WeightWay, sends_changes, weight_way
from rolepool.units import duration, show_bytes

GLOO_BYTES_PER_S = 0.8e9
"""All ranks of a machine together. Between 0.7e9 and 1.1e9 were measured on two cores
(benchmarks/weight_transfer.py)."""
NCCL_BYTES_PER_S = 40e9
"""One rank of the rollout. Assumed: what two GPUs of one node exchange through PCIe 5. NVLink is
faster, and a network may be slower."""
HOST_BYTES_PER_S = 1e9
"""One process through Ray's shared memory. Assumed."""


def transfer_in_words(config: Config, plan: Plan) -> str | None:
    """How weights get from the actor to the rollout; None if both are in one pool."""
    on_gpus = plan.device != "cpu"
    way = weight_way(config, plan, on_gpus=on_gpus)
    if way is WeightWay.SAME_PROCESS:
        return None
    channel: str = way.value
    if way is WeightWay.PROCESS_GROUP:
        channel += f" ({'NCCL' if on_gpus else 'gloo'})"
    try:
        num_bytes = _bytes_of_rank(config, plan, on_gpus=on_gpus)
    except ShapeUnknown:
        return channel
    num_ranks = plan.pool_of(Role.Rollout).world_size
    total_bytes = num_bytes * num_ranks
    if way is WeightWay.SHARED_MEMORY:
        seconds = total_bytes / HOST_BYTES_PER_S
    elif on_gpus:
        seconds = num_bytes / NCCL_BYTES_PER_S
    else:
        seconds = total_bytes / GLOO_BYTES_PER_S
    amount = f"{show_bytes(total_bytes)} per step to {num_ranks} ranks"
    time = f"{duration(seconds)} (assumed speed)"
    if sends_changes(config, way):
        return f"{channel}, only values that changed: at most {amount}, at most {time}"
    return f"{channel}, {amount}, about {time}"


def _bytes_of_rank(config: Config, plan: Plan, *, on_gpus: bool) -> int:
    """What one rank of the rollout holds. Raises ShapeUnknown."""
    dims = plan.dims_of(config, Role.Rollout)
    shape = shape_of(config, Role.Rollout)
    memory = generation_memory(config, shape, dims, num_sequences=1, limit=None, room=None)
    # The estimate is for weights of 16 bits, which only GPUs have.
    return memory.weights if on_gpus else memory.weights * FP32 // BF16
