"""The strategies: functions from the config and the GPUs of each node to pools, and to the pool of each role.

Owns the built-in strategies, one small function each, and finding the one that the config names. Nothing outside this
module asks which one was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rolepool.config import Config
from rolepool.config.functions import import_object
from rolepool.errors import PlacementError
from rolepool.placement.pools import ResourcePoolManager
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles

GpusPerNode = Sequence[int]

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"


def standard(config: Config, gpus_per_node: GpusPerNode) -> ResourcePoolManager:
    """One pool on all GPUs, all roles in it."""
    needed, _ = needed_roles(config)
    if not any(gpus_per_node):
        raise PlacementError("Not enough GPUs: no node has one; set trainer.n_gpus_per_node")
    return ResourcePoolManager({GLOBAL_POOL: gpus_per_node}, dict.fromkeys(needed, GLOBAL_POOL))


def split(config: Config, gpus_per_node: GpusPerNode) -> ResourcePoolManager:
    """Critic, reward model and added roles like them in one pool, all other roles in another."""
    needed, unused = needed_roles(config)
    if not any(ROLE_SPECS[role].has_scalar_head for role in needed):
        reasons = " and ".join(reason for role, reason in unused.items() if ROLE_SPECS[role].has_scalar_head)
        raise PlacementError(
            f"placement.strategy=split: no role would be in {CRITIC_POOL} because {reasons}; "
            "use placement.strategy=standard"
        )
    share = config.placement.split.share
    actor, critic = (gpus_per_node, gpus_per_node) if share is not None else _divide(config, gpus_per_node)
    pools = {
        ACTOR_POOL: {"per_node": actor, "share": share or 1.0},
        CRITIC_POOL: {"per_node": critic, "share": share or 1.0},
    }
    roles = {role: CRITIC_POOL if ROLE_SPECS[role].has_scalar_head else ACTOR_POOL for role in needed}
    return ResourcePoolManager(pools, roles)


def custom(config: Config, gpus_per_node: GpusPerNode) -> ResourcePoolManager:
    """Pools and roles as the user wrote them. Roles that the run does not need are skipped."""
    placement = config.placement
    needed, unused = needed_roles(config)
    written = {Role(name): pool for name, pool in placement.roles.model_dump().items() if pool is not None}
    if not placement.pools:
        raise PlacementError(
            "placement.pools={}: placement.strategy=custom needs pools, such as placement.pools.big=[4]"
        )
    specs = {name: {"per_node": pool.per_node, "share": pool.share} for name, pool in placement.pools.items()}
    everything = ResourcePoolManager(specs, written)
    problems = [
        f"placement.roles.{role}=null: the role has no pool; set it to one of {', '.join(specs)}"
        for role in needed
        if role not in everything.roles
    ]
    roles = {role: pool for role, pool in everything.roles.items() if role in needed}
    for name in [name for name in specs if name not in roles.values()]:
        skipped = [f"{role} ({unused[role]})" for role, pool in everything.roles.items() if pool == name]
        why = f"its roles are not used: {', '.join(skipped)}" if skipped else "it has no role"
        problems.append(
            f"placement.pools.{name}={list(placement.pools[name].per_node)}: {why}; give it a role or remove it"
        )
    if problems:
        raise PlacementError(problems)
    return ResourcePoolManager(specs, roles)


STRATEGIES: dict[str, Callable[[Config, GpusPerNode], ResourcePoolManager]] = {
    "standard": standard,
    "split": split,
    "custom": custom,
}


def divide(config: Config, gpus_per_node: GpusPerNode) -> ResourcePoolManager:
    """The pools of the strategy that the config names, with every role that the run needs."""
    name = config.placement.strategy
    strategy = STRATEGIES.get(name) or import_object("placement.strategy", name)
    pools: ResourcePoolManager = strategy(config, gpus_per_node)
    needed, _ = needed_roles(config)
    if set(pools.roles) != set(needed):
        raise PlacementError(
            f"placement.strategy={name}: gives a pool to {', '.join(pools.roles)}, but the run needs "
            f"{', '.join(needed)}; return a pool for these roles, and for no others"
        )
    return pools


def _divide(config: Config, gpus_per_node: GpusPerNode) -> tuple[list[int], list[int]]:
    """The GPUs per node of the actor's pool, and those of the critic's."""
    wish = config.placement.split
    if sum(gpus_per_node) < 2:
        raise PlacementError(
            f"placement.strategy=split: two pools need at least 2 GPUs, and there is {sum(gpus_per_node)}; "
            "use placement.strategy=standard, or let both pools share the GPU with placement.split.share=0.5"
        )
    has_single_gpus = min(num_gpus for num_gpus in gpus_per_node if num_gpus) < 2
    whole_nodes = wish.axis == "node"
    if wish.axis == "auto":
        whole_nodes = wish.actor_gpus_per_node is None and (wish.actor_nodes is not None or has_single_gpus)
    if whole_nodes:
        return _divide_whole_nodes(wish.actor_nodes, gpus_per_node)
    return _divide_inside_nodes(wish.actor_gpus_per_node, gpus_per_node)


def _up_to(highest: int) -> str:
    return "1" if highest == 1 else f"1 to {highest}"


def _divide_inside_nodes(wanted: int | None, gpus_per_node: GpusPerNode) -> tuple[list[int], list[int]]:
    smallest = min(num_gpus for num_gpus in gpus_per_node if num_gpus)
    if wanted is not None and wanted >= smallest:
        raise PlacementError(
            f"placement.split.actor_gpus_per_node={wanted}: leaves the critic none of a node's {smallest}; "
            + (f"use {_up_to(smallest - 1)}" if smallest > 1 else "use placement.split.axis=node")
        )
    actor = [(num_gpus + 1) // 2 if wanted is None else min(wanted, num_gpus) for num_gpus in gpus_per_node]
    critic = [num_gpus - taken for num_gpus, taken in zip(gpus_per_node, actor, strict=True)]
    if not any(critic):
        raise PlacementError(
            "placement.split.axis=gpu: every node has a single GPU, so there is none left for the critic; "
            "use placement.split.axis=node"
        )
    return actor, critic


def _divide_whole_nodes(wanted: int | None, gpus_per_node: GpusPerNode) -> tuple[list[int], list[int]]:
    nodes = [node for node, num_gpus in enumerate(gpus_per_node) if num_gpus]
    if len(nodes) < 2:
        raise PlacementError(
            f"placement.split.axis=node: there is {len(nodes)} node with GPUs, and two pools need two; "
            "use placement.split.axis=gpu"
        )
    if wanted is not None and wanted >= len(nodes):
        raise PlacementError(
            f"placement.split.actor_nodes={wanted}: leaves the critic none of {len(nodes)} nodes; "
            f"use {_up_to(len(nodes) - 1)}"
        )
    actor_nodes = set(nodes[: wanted if wanted is not None else (len(nodes) + 1) // 2])
    actor = [num_gpus if node in actor_nodes else 0 for node, num_gpus in enumerate(gpus_per_node)]
    critic = [0 if node in actor_nodes else num_gpus for node, num_gpus in enumerate(gpus_per_node)]
    return actor, critic
