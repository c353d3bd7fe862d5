"""Making the engine that `actor_rollout_ref.rollout.name` names: the native one, or a class of the user's.

Owns how an engine gets its model. Does not know where new weights come from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rolepool.config import Config
from rolepool.config.functions import import_object
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout.decoder import refuse_unknown
from rolepool.rollout.engine import Engine
from rolepool.rollout.kv_cache import room_on_gpu
from rolepool.rollout.native import NativeEngine
from rolepool.rollout.tensor_parallel import Shard, TensorParallel


def make_engine(
    config: Config, context: WorkerContext, load_model: Callable[[], nn.Module], shared_model: nn.Module | None
) -> Engine:
    """The engine of one rank. `load_model` loads the policy in the dtype for rollouts, in host memory. `shared_model`
    is the actor's own model if an engine of this process may generate with it directly, and None otherwise."""
    name = config.actor_rollout_ref.rollout.name
    make = native_engine if name == "native" else import_object("actor_rollout_ref.rollout.name", name)
    engine: Engine = make(config=config, context=context, load_model=load_model, shared_model=shared_model)
    return engine


def native_engine(
    config: Config, context: WorkerContext, load_model: Callable[[], nn.Module], shared_model: nn.Module | None
) -> NativeEngine:
    """The native engine with the shared model, or with this rank's shard of a model of its own."""
    keys = config.actor_rollout_ref.rollout
    model, shard = shared_model, None
    if model is None:
        loaded: Any = load_model()
        refuse_unknown(loaded)
        shard = Shard(loaded.config, context.tp_size, context.tp_rank)
        shard.cut(loaded)  # before it moves, so that a GPU never holds more than its shard
        model = loaded.requires_grad_(False).to(context.device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return NativeEngine(
        model,
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        shared_weights=shared_model is not None,
        cache_bytes=None if context.device == "cpu" else partial(room_on_gpu, num_bytes, keys.gpu_memory_utilization),
        shard=shard,
        parallel=TensorParallel.over_neighbours(context.tp_size),
        enforce_eager=keys.enforce_eager,
    )
