"""The live cluster: its nodes in a fixed order, what they have, and who holds what is missing.

Owns reading Ray's node tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
import ray._private.state as ray_state
from ray.util import placement_group_table


@dataclass(frozen=True)
class Node:
    """A live node and its resources as Ray counts them."""

    node_id: str
    address: str
    num_gpus: int
    num_cpus: int

    def slots(self, device: str) -> int:
        """How many processes it can hold: one per GPU, or one per CPU where there are none."""
        return self.num_cpus if device == "cpu" else self.num_gpus


def live_nodes() -> list[Node]:
    """The driver's node, then by address, then by node id: the order in which a plan counts nodes."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_gpus=int(node["Resources"].get("GPU", 0)),
            num_cpus=int(node["Resources"].get("CPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.node_id != here, node.address, node.node_id))


def slot_device(device: str, nodes: Sequence[Node]) -> str:
    """What the slots of a plan are: with `auto`, GPUs where the cluster has any."""
    if device != "auto":
        return device
    return "cuda" if any(node.num_gpus for node in nodes) else "cpu"


def free_slots(node: Node, device: str) -> float:
    """What nobody holds of a node's GPUs, or CPUs."""
    per_node = ray_state.available_resources_per_node()
    return float(per_node.get(node.node_id, {}).get("CPU" if device == "cpu" else "GPU", 0.0))


def holders(node: Node) -> Iterator[str]:
    """Who has something on a node beside us: placement groups and actors of other jobs, with their driver.

    Ray does not say which GPU an actor holds; that it lives on the node is all that can be told.
    """
    ours = ray.get_runtime_context().get_job_id()
    drivers = {
        job[
            "JobID"
        ]: f"job {job['JobID']} (pid {job['DriverPid']} on {job['DriverIPAddress']}: {job.get('Entrypoint', '')})"
        for job in ray_state.jobs()
    }
    for actor in ray_state.actors().values():
        on_node = actor["Address"]["NodeID"] == node.node_id and actor["State"] == "ALIVE"
        if on_node:
            whose = "this job" if actor["JobID"] == ours else drivers.get(actor["JobID"], f"job {actor['JobID']}")
            yield f"actor {actor['ActorClassName']} (pid {actor['Pid']}) of {whose}"
    for group in placement_group_table().values():
        bundles = [bundle for bundle, home in group["bundles_to_node_id"].items() if home == node.node_id]
        if bundles and group["state"] == "CREATED":
            yield f"placement group {group['name'] or group['placement_group_id']} with {len(bundles)} bundles"
