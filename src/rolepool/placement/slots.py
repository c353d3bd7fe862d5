"""Which GPUs a pool's processes stand on.

Owns the rule: pools in order, entries in order, each entry on the next node with that many GPUs free, lowest GPU
numbers first. Knows counts only, no roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rolepool.errors import PlacementError
from rolepool.placement.pools import ResourcePool

SHARE_TOLERANCE = 1e-9


class Slot(NamedTuple):
    """One GPU of one node; without GPUs, one CPU slot."""

    node: int
    gpu: int


def place_pools(pools: Iterable[ResourcePool], gpus_per_node: Sequence[int]) -> dict[str, tuple[Slot, ...]]:
    """The slots of every pool, in rank order. Raises PlacementError with every pool that does not fit."""
    left = [[1.0] * num_gpus for num_gpus in gpus_per_node]
    placed: dict[str, tuple[Slot, ...]] = {}
    problems: list[str] = []
    for pool in pools:
        try:
            placed[pool.name] = _place(pool, left)
        except PlacementError as error:
            problems.extend(error.problems)
    if problems:
        raise PlacementError(problems)
    return placed


def _place(pool: ResourcePool, left: list[list[float]]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    node = 0
    for entry, count in enumerate(pool.per_node):
        if count == 0:
            node += 1
            continue
        for found in range(node, len(left)):
            free = _free(left[found], pool.share)
            if len(free) >= count:
                break
        else:
            raise PlacementError(_not_enough(pool, entry, node, left))
        slots.extend(Slot(found, gpu) for gpu in free[:count])
        node = found + 1
    for slot in slots:
        left[slot.node][slot.gpu] -= pool.share
    return tuple(slots)


def _free(gpus: list[float], share: float) -> list[int]:
    return [gpu for gpu, room in enumerate(gpus) if room >= share - SHARE_TOLERANCE]


def _not_enough(pool: ResourcePool, entry: int, first_node: int, left: list[list[float]]) -> str:
    count = pool.per_node[entry]
    of_share = "" if pool.share == 1 else f" with {pool.share:g} of each free"
    needs = f"{pool.name} needs {count} GPU{'s' if count > 1 else ''}{of_share}"
    if first_node >= len(left):
        there = f"on node {first_node}, and the last node is {len(left) - 1}"
    else:
        free = [len(_free(gpus, pool.share)) for gpus in left]
        there = f"on node {first_node}, which has {free[first_node]} left"
        if first_node + 1 < len(left):
            later = max(range(first_node + 1, len(left)), key=lambda node: free[node])
            there += f" (of the nodes after it, node {later} has most: {free[later]})"
    return (
        f"Not enough GPUs: {needs} {there}; make the pool smaller, or have more GPUs "
        "(trainer.nnodes, trainer.n_gpus_per_node, --inventory)"
    )
