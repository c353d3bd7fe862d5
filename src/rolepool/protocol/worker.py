"""The base class of roles: what a role knows of the process it lives in.

Owns `Worker` and the context it is made in. Does not know how calls arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self


@dataclass(frozen=True)
class WorkerContext:
    """Where a role lives: pool, rank, place in the (dp, tp) view of the pool, device and seeds."""

    pool: str = "local"
    role: str = "role"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    tp_size: int = 1
    device: str = "cpu"
    run_seed: int = 1

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def init_seed(self) -> int:
        """Seed while the role is made: the same on every rank and in every pool, so that weights are too."""
        return derive_seed(self.run_seed, self.role)

    @property
    def seed(self) -> int:
        """Seed of the role at work, of its own on every rank."""
        return derive_seed(self.run_seed, self.role, self.rank)


def derive_seed(*parts: object) -> int:
    """A seed that depends on all parts and on nothing else; the same on every machine."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


_context: ContextVar[tuple[WorkerContext, Mapping[str, Worker]]] = ContextVar(
    "worker_context", default=(WorkerContext(), MappingProxyType({}))
)


@contextmanager
def made_in(context: WorkerContext, siblings: Mapping[str, Worker] | None = None) -> Iterator[None]:
    """Workers constructed inside the block get this context, and see the roles that share their process."""
    token = _context.set((context, {} if siblings is None else siblings))
    try:
        yield
    finally:
        _context.reset(token)


class Worker:
    """A role. `self.context`, `self.siblings` and the short cuts below are there before `__init__` runs."""

    context: WorkerContext
    siblings: Mapping[str, Worker]
    """The roles of this process by name, as they are at the time of asking: roles of one pool may share memory."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.context, worker.siblings = _context.get()
        return worker

    def less_memory(self, method: str) -> Sequence[str]:
        """Overrides (`key=value`) for a user in whose run this method ran out of memory, the best first.

        May be asked of a role whose `__init__` failed, with `method` being `__init__`.
        """
        return ()

    def less_memory_at_rest(self) -> Sequence[str]:
        """Overrides with which this role leaves more memory to the other roles of its process."""
        return ()

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def device(self) -> str:
        return self.context.device
