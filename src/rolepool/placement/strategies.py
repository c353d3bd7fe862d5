"""The strategies: functions from the config and the GPUs of each node to pools, and to the pool of each role.

Owns the built-in strategies, one small function each, and the plan of the strategy that the config names. Nothing
outside this module asks which one was chosen.
"""

from collections.abc import Sequence

from rolepool.config import Config
from rolepool.config.functions import import_object
from rolepool.errors import PlacementError
from rolepool.placement.plan import Plan, ResourcePoolManager, place
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"


def build_plan(config: Config, gpus_per_node: Sequence[int] | None = None, *, take_all: bool = False) -> Plan:
    """The plan of a config. Raises PlacementError if its pools and roles cannot be placed.

    `gpus_per_node` is the inventory; None means exactly what trainer.nnodes and trainer.n_gpus_per_node ask for.
    `take_all` divides the whole inventory, not only what those two keys ask for.
    """
    wanted = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    inventory = wanted if gpus_per_node is None else tuple(gpus_per_node)
    name, (needed, unused) = config.placement.strategy, needed_roles(config)
    strategy = STRATEGIES.get(name) or import_object("placement.strategy", name)
    manager: ResourcePoolManager = strategy(config, inventory if take_all else wanted)
    if set(manager.roles) != set(needed):
        reason = f"gives a pool to {', '.join(manager.roles)}, but the run needs {', '.join(needed)}"
        fix = "return a pool for these roles, and for no others"
        raise PlacementError(f"placement.strategy={name}: {reason}; {fix}")
    plan = place(manager, inventory, device=config.trainer.device, mps=config.placement.mps)
    return plan.model_copy(update={"unused_roles": unused})


def standard(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """One pool on all GPUs, all roles in it."""
    needed, _ = needed_roles(config)
    return ResourcePoolManager({GLOBAL_POOL: gpus_per_node}, dict.fromkeys(needed, GLOBAL_POOL))


def split(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Critic, reward model and added roles like them in one pool, all other roles in another."""
    needed, unused = needed_roles(config)
    if not any(ROLE_SPECS[role].has_scalar_head for role in needed):
        reasons = " and ".join(reason for role, reason in unused.items() if ROLE_SPECS[role].has_scalar_head)
        problem = f"no role would be in {CRITIC_POOL} because {reasons}"
        raise PlacementError(f"placement.strategy=split: {problem}; use placement.strategy=standard")
    share = config.placement.split.share
    actor, critic = (gpus_per_node, gpus_per_node) if share is not None else _divide(config, gpus_per_node)
    per_node = {ACTOR_POOL: actor, CRITIC_POOL: critic}
    pools = {name: {"per_node": counts, "share": share or 1.0} for name, counts in per_node.items()}
    roles = {role: CRITIC_POOL if ROLE_SPECS[role].has_scalar_head else ACTOR_POOL for role in needed}
    return ResourcePoolManager(pools, roles)


def custom(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Pools and roles as the user wrote them. Roles that the run does not need are skipped."""
    placement, (needed, unused) = config.placement, needed_roles(config)
    written = {Role(name): pool for name, pool in placement.roles.model_dump().items() if pool is not None}
    if not placement.pools:
        reason = "placement.strategy=custom needs pools, such as placement.pools.big=[4]"
        raise PlacementError(f"placement.pools={{}}: {reason}")
    specs = {name: pool.model_dump() for name, pool in placement.pools.items()}
    everything = ResourcePoolManager(specs, written)
    fix, missing = f"set it to one of {', '.join(specs)}", [role for role in needed if role not in everything.roles]
    problems = [f"placement.roles.{role}=null: the role has no pool; {fix}" for role in missing]
    roles = {role: pool for role, pool in everything.roles.items() if role in needed}
    for name in [name for name in specs if name not in roles.values()]:
        skipped = [f"{role} ({unused[role]})" for role, pool in everything.roles.items() if pool == name]
        why = f"its roles are not used: {', '.join(skipped)}" if skipped else "it has no role"
        per_node = list(placement.pools[name].per_node)
        problems.append(f"placement.pools.{name}={per_node}: {why}; give it a role or remove it")
    PlacementError.raise_if_any(problems)
    return ResourcePoolManager(specs, roles)


STRATEGIES = {"standard": standard, "split": split, "custom": custom, "auto": standard}
"""`auto` begins like `standard`, if there is no profile from which a placement can be chosen before the start."""


def _divide(config: Config, gpus_per_node: Sequence[int]) -> tuple[list[int], list[int]]:
    """The GPUs per node of the actor's pool, and those of the critic's: whole nodes, or some GPUs of every node."""
    wish, counts = config.placement.split, [num_gpus for num_gpus in gpus_per_node if num_gpus]
    if sum(counts) < 2:
        reason = f"two pools need at least 2 GPUs, and there is {sum(counts)}"
        fix = "use placement.strategy=standard, or let both pools share the GPU with placement.split.share=0.5"
        raise PlacementError(f"placement.strategy=split: {reason}; {fix}")
    whole_nodes = wish.axis == "node"
    if wish.axis == "auto":
        whole_nodes = wish.actor_gpus_per_node is None and (wish.actor_nodes is not None or min(counts) < 2)
    name, unit, other = ("actor_nodes", "node", "gpu") if whole_nodes else ("actor_gpus_per_node", "GPU", "node")
    wanted = wish.at(name)
    most = len(counts) if whole_nodes else max(counts) if wanted is None else min(counts)
    if (wanted or 1) >= most:
        key = f"axis={unit.lower()}" if wanted is None else f"{name}={wanted}"
        taken = (f"all {most} {unit}s" if most > 1 else f"the only {unit}") + ("" if whole_nodes else " of a node")
        fix = f"1 to {most - 1}" if most > 2 else "1" if most == 2 else f"placement.split.axis={other}"
        reason = f"the actor takes {taken}, so none is left for the critic"
        raise PlacementError(f"placement.split.{key}: {reason}; use {fix}")
    if whole_nodes:
        nodes = [node for node, num_gpus in enumerate(gpus_per_node) if num_gpus]
        actor_nodes = set(nodes[: wanted or (most + 1) // 2])
        actor = [num_gpus if node in actor_nodes else 0 for node, num_gpus in enumerate(gpus_per_node)]
    else:
        actor = [min(wanted or (num_gpus + 1) // 2, num_gpus) for num_gpus in gpus_per_node]
    return actor, [num_gpus - taken for num_gpus, taken in zip(gpus_per_node, actor, strict=True)]
