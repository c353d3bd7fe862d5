"""The resources of a plan in Ray: a bundle for each of its slots, fixed to the slot's node.

Owns the placement group, and what to say if the cluster does not have the resources. There is one
bundle for each GPU, and all processes that share the GPU are in it, because Ray assigns a fraction
of an exact GPU only inside bundles of whole GPUs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import ray._private.state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rolepool.cluster.connection import raise_if_ray_died
from rolepool.cluster.nodes import Node, live_nodes, nodes_with_slots, pinned_to, slots_on, users_of
from rolepool.errors import PlacementError, RayDiedError
from rolepool.placement import Plan
from rolepool.placement.plan import ResourcePool, Slot

Place = tuple[str, int]
"""A GPU (or CPU slot) of the cluster: the id of its node, and its number there."""
Bundle = PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy
"""Where Ray starts the processes of one place."""
Bundles = dict[Place, Bundle]


class Reservation(NamedTuple):
    """The resources of a plan: its nodes, its device, and a bundle for each slot."""

    plan: Plan
    nodes: Sequence[Node]
    device: str
    bundles: Bundles


def reserve(
    plan: Plan,
    nodes: Sequence[Node],
    cleanup: ExitStack,
    timeout_s: float,
    held: Bundles,
) -> Reservation:
    """Reserve the plan's resources, except those that are `held` already; `cleanup` releases them.

    Raises PlacementError, at the latest after `timeout_s`. The error says who uses the nodes then.
    """
    device, nodes = nodes_with_slots(plan.device, nodes)
    problems = [*_lacking_slots(plan, nodes, device), *_lacking_cpus(plan, nodes, held)]
    PlacementError.raise_if_any(problems)
    if plan.mps and device == "cpu":
        raise PlacementError(
            "placement.mps=true: needs GPUs, and the cluster has none; set placement.mps=false"
        )
    num_processes: Counter[Place] = Counter()
    for pool in plan.pools.values():
        for slot in pool.slots:
            node = nodes[slot.node]
            num_processes[node.node_id, slot.gpu] += 1
    needed = sorted(num_processes.keys() - held.keys())
    if not needed:
        return Reservation(plan, nodes, device, held)
    resources = []
    node_labels = []
    for place in needed:
        node_id, _ = place
        bundle = {"CPU": float(num_processes[place])}
        if device != "cpu":
            bundle["GPU"] = 1.0
        resources.append(bundle)
        node_labels.append({"ray.io/node-id": node_id})
    group = placement_group(
        resources,
        strategy="PACK",
        bundle_label_selector=node_labels,
    )
    cleanup.callback(_release, group)
    if not group.wait(timeout_s):
        raise PlacementError(_not_free(plan, nodes, device, timeout_s))
    bundles = dict(held)
    for index, place in enumerate(needed):
        bundles[place] = PlacementGroupSchedulingStrategy(group, index)
    return Reservation(plan, nodes, device, bundles)


def place_for_helpers(name: str, count: int) -> Reservation:
    """A pool of processes on the driver's node, beside those of the plan. It reserves neither GPU
    nor CPU, because the processes are for light work such as rule rewards."""
    driver_node = live_nodes()[0]
    node_id = driver_node.node_id
    slots: list[Slot] = []
    bundles: Bundles = {}
    for number in range(count):
        slots.append(Slot(0, number))
        bundles[node_id, number] = pinned_to(node_id)
    pool = ResourcePool((count,), slots=tuple(slots))
    plan = Plan(
        gpus_per_node=(count,),
        device="cpu",
        pools={name: pool},
        roles={},
    )
    return Reservation(plan, [driver_node], "cpu", bundles)


def _release(group: PlacementGroup) -> None:
    with suppress(RayDiedError):
        raise_if_ray_died()  # without a GCS server, the next line would wait for a minute
        remove_placement_group(group)


# What is missing


def _lacking_slots(plan: Plan, nodes: Sequence[Node], device: str) -> Iterator[str]:
    """The nodes and slots that the cluster can never provide and the plan needs, with a line for
    each pool and node."""
    word = "CPUs" if device == "cpu" else "GPUs"
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            if index >= len(nodes):
                plural = "s" if len(nodes) > 1 else ""
                there = f"the cluster has {len(nodes)} node{plural}"
                fix = "add nodes (ray start), or lower trainer.nnodes"
                needed = f"{name} needs {count} {word} on node {index}"
                yield f"Not enough nodes: {needed}, and {there}; {fix}"
                continue
            node = nodes[index]
            highest = max(slot.gpu for slot in pool.slots if slot.node == index)
            num_slots = node.slots(device)
            if highest >= num_slots:
                where = f"node {index} ({node.address})"
                needed = f"{name} needs {count} on {where}, up to number {highest}"
                fix = f"lower trainer.n_gpus_per_node or add {word}"
                has = f"the node has {num_slots}"
                yield f"Not enough {word}: {needed}; {has}; {fix}"


def _lacking_cpus(plan: Plan, nodes: Sequence[Node], held: Bundles) -> Iterator[str]:
    """The CPUs that Ray does not count and the plan's processes need, with a line for each node."""
    for index, node in enumerate(nodes):
        num_new = 0
        for slot in slots_on(plan, index):
            if (node.node_id, slot.gpu) not in held:
                num_new += 1
        if num_new > node.num_cpus:
            needed = f"{num_new} processes on node {index} ({node.address}) need one each"
            fix = "raise ray_kwargs.ray_init.num_cpus, or start that node with more"
            yield f"Not enough CPUs: {needed}, and Ray has {node.num_cpus} there; {fix}"


def _not_free(plan: Plan, nodes: Sequence[Node], device: str, timeout_s: float) -> Iterator[str]:
    """What is not free on the nodes, and who uses it, with a line for each pool and node."""
    word = "CPU" if device == "cpu" else "GPU"
    limit = f"placement.timeout_s={timeout_s:g}"
    available = ray_state.available_resources_per_node()
    for name, pool in plan.pools.items():
        for index, count in pool.counts_by_node.items():
            node = nodes[index]
            where = f"node {index} ({node.address})"
            needed = f"{name} needs {count * pool.share:g} on {where}"
            free_on_node = available.get(node.node_id, {})
            num_free = free_on_node.get(word, 0.0)
            free = f"{num_free:g} of {node.slots(device)} are free"
            users = f"on the node: {users_of(node)}"
            fix = f"wait until they are free, or use fewer {word}s"
            yield f"Not enough {word}s within {limit}: {needed}, {free}; {users}; {fix}"
