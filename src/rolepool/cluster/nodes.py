"""The nodes of a Ray cluster, in the order in which a plan counts them.

Owns which node replaces a lost one, and who else uses a node. What is reserved on a node is the
business of `rolepool.cluster.reservation`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import ray
import ray._private.state as ray_state
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolepool.placement import Plan
from rolepool.placement.plan import Slot


class Node(NamedTuple):
    """A live node and its resources as Ray counts them."""

    node_id: str
    address: str
    num_gpus: int
    num_cpus: int

    def slots(self, device: str) -> int:
        """How many processes it can hold: one for each GPU, or one for each CPU on CPU slots."""
        return self.num_cpus if device == "cpu" else self.num_gpus


def live_nodes() -> list[Node]:
    """The nodes in the order in which a plan counts them: the driver's node, then by address, then
    by node id."""
    driver_node_id = ray.get_runtime_context().get_node_id()

    def position(node: Node) -> tuple[bool, str, str]:
        return node.node_id != driver_node_id, node.address, node.node_id

    nodes = []
    for entry in ray.nodes():
        if not entry["Alive"]:
            continue
        resources = entry["Resources"]
        node = Node(
            node_id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            num_gpus=int(resources.get("GPU", 0)),
            num_cpus=int(resources.get("CPU", 0)),
        )
        nodes.append(node)
    return sorted(nodes, key=position)


def live_node_ids() -> set[str]:
    return {node.node_id for node in live_nodes()}


def pinned_to(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Where Ray starts an actor or a task that must run on this node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def nodes_with_slots(device: str, nodes: Sequence[Node]) -> tuple[str, Sequence[Node]]:
    """The device of a plan's slots (`auto` means GPUs if the cluster has any), and the nodes that a
    plan counts. A head that only manages the cluster has no GPU, and no process is placed there."""
    if device == "auto":
        has_gpus = any(node.num_gpus for node in nodes)
        device = "cuda" if has_gpus else "cpu"
    counted = [node for node in nodes if node.slots(device)]
    return device, counted or nodes


def substitutes(
    plan: Plan, before: Sequence[Node], live: Sequence[Node], device: str
) -> list[Node] | None:
    """The nodes of a plan with another live node in the place of each lost one; None if there are
    not enough."""
    nodes = list(before)
    for index, node in enumerate(before):
        slots = slots_on(plan, index)
        if not slots or node in live:
            continue
        highest_gpu = max(slot.gpu for slot in slots)
        substitute = _first_free(live, nodes, device, num_slots=highest_gpu + 1)
        if substitute is None:
            return None
        nodes[index] = substitute
    return nodes


def slots_on(plan: Plan, node: int) -> list[Slot]:
    """The slots of all pools on a node of the plan. One that two pools share is there twice."""
    slots = []
    for pool in plan.pools.values():
        slots += [slot for slot in pool.slots if slot.node == node]
    return slots


def _first_free(
    live: Sequence[Node], used: Sequence[Node], device: str, num_slots: int
) -> Node | None:
    """The first live node that is not used and has so many slots."""
    for node in live:
        if node not in used and node.slots(device) >= num_slots:
            return node
    return None


def users_of(node: Node) -> str:
    """Who else uses a node: actors with the drivers of their jobs, and placement groups.

    Ray does not tell which GPU an actor holds, only on which node it is.
    """
    users = _actors_on(node) | _placement_groups_on(node)
    return ", ".join(sorted(users)) or "no actor that Ray knows"


def _actors_on(node: Node) -> set[str]:
    our_job = ray.get_runtime_context().get_job_id()
    drivers = {}
    for job in ray_state.jobs():
        place = f"pid {job['DriverPid']} on {job['DriverIPAddress']}"
        drivers[job["JobID"]] = f"({place}: {job.get('Entrypoint', '')})"
    users = set()
    for actor in ray_state.actors().values():
        if actor["Address"]["NodeID"] != node.node_id or actor["State"] != "ALIVE":
            continue
        job_id = actor["JobID"]
        if job_id == our_job:
            whose = "this job"
        else:
            whose = f"job {job_id} {drivers.get(job_id, '')}".strip()
        users.add(f"actor {actor['ActorClassName']} (pid {actor['Pid']}) of {whose}")
    return users


def _placement_groups_on(node: Node) -> set[str]:
    users = set()
    for group in placement_group_table().values():
        num_bundles = list(group["bundles_to_node_id"].values()).count(node.node_id)
        if num_bundles and group["state"] == "CREATED":
            name = group["name"] or group["placement_group_id"]
            users.add(f"placement group {name} with {num_bundles} bundles")
    return users
