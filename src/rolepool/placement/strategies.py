"""The placement strategies, and the plan of a config.

A strategy is a function from the config and the GPUs of each node to pools, and to the pool of each
role. Owns the built-in strategies, one small function each. Nothing outside of this file asks which
one was chosen.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rolepool.config import Config, show
from rolepool.config.functions import import_object
from rolepool.config.run_keys import SplitConfig
from rolepool.errors import PlacementError, RolepoolError, one_line, place_of
from rolepool.placement.plan import Plan, ResourcePoolManager, place
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"


def build_plan(
    config: Config,
    gpus_per_node: Sequence[int] | None = None,
    *,
    take_all: bool = False,
) -> Plan:
    """The plan of a config. Raises PlacementError if its pools and roles cannot be placed.

    `gpus_per_node` is the inventory; None means exactly what trainer.nnodes and
    trainer.n_gpus_per_node ask for. `take_all` divides the whole inventory, not only what those two
    keys ask for. A strategy may place roles that the run does not need; they are skipped.
    """
    wanted = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    inventory = wanted if gpus_per_node is None else tuple(gpus_per_node)
    strategy = config.placement.strategy
    needed, unused = needed_roles(config)
    divided = inventory if take_all else wanted
    manager = _pools_of(strategy, config, divided)
    problems: list[str] = []
    missing = [role for role in needed if role not in manager.roles]
    if missing:
        without_pool = ", ".join(missing)
        pools = ", ".join(manager.resource_pool_dict)
        fix = f"give each role one of {pools} (placement.roles.{missing[0]}=POOL)"
        problems.append(f"placement.strategy={strategy}: no pool for {without_pool}; {fix}")
    problems.extend(_useless_pools(manager, unused))
    PlacementError.raise_if_any(problems)
    homes = {role: manager.roles[role] for role in needed}
    plan = place(
        replace(manager, mapping=homes),
        inventory,
        device=config.trainer.device,
        mps=config.placement.mps,
    )
    return plan.model_copy(update={"unused_roles": unused})


def _useless_pools(manager: ResourcePoolManager, unused: Mapping[Role, str]) -> Iterator[str]:
    """A line for each pool without a role that the run needs. `unused` are the roles that it does
    not need, and why."""
    for name, pool in manager.resource_pool_dict.items():
        roles = [role for role, home in manager.roles.items() if home == name]
        if any(role not in unused for role in roles):
            continue
        if roles:
            skipped = ", ".join(f"{role} ({unused[role]})" for role in roles)
            why = f"its roles are not used: {skipped}"
        else:
            why = "it has no role"
        fix = "give it a role, remove it, or use placement.strategy=standard"
        yield f"placement.pools.{name}={show(pool.per_node)}: {why}; {fix}"


def _pools_of(strategy: str, config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """What a strategy returns. A strategy of the user may raise anything, which is an error in the
    placement."""
    function = STRATEGIES.get(strategy) or import_object("placement.strategy", strategy)
    try:
        manager = function(config, gpus_per_node)
    except RolepoolError:
        raise
    except Exception as error:
        fix = "correct the function, or use placement.strategy=standard"
        what = f"{type(error).__name__} at {place_of(error)}: {one_line(error)}"
        raise PlacementError(
            f"placement.strategy={strategy}: the function failed ({what}); {fix}"
        ) from error
    if not isinstance(manager, ResourcePoolManager):
        fix = "return a ResourcePoolManager"
        kind = type(manager).__name__
        raise PlacementError(
            f"placement.strategy={strategy}: the function returned a {kind}; {fix}"
        )
    return manager


def standard(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """One pool on all GPUs, all roles in it."""
    pools = {GLOBAL_POOL: gpus_per_node}
    roles = dict.fromkeys(ROLE_SPECS, GLOBAL_POOL)
    return ResourcePoolManager(pools, roles)


def split(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Critic, reward model and added roles like them in one pool, all other roles in another."""
    share = config.placement.split.share
    actor: Sequence[int]
    critic: Sequence[int]
    if share is not None:
        # Both pools have a process on every GPU, with a part of it.
        actor = critic = gpus_per_node
    else:
        actor, critic = _divide(config, gpus_per_node)
    pools = {
        ACTOR_POOL: {"per_node": actor, "share": share or 1.0},
        CRITIC_POOL: {"per_node": critic, "share": share or 1.0},
    }
    roles: dict[Role, str] = {}
    for role, spec in ROLE_SPECS.items():
        roles[role] = CRITIC_POOL if spec.has_scalar_head else ACTOR_POOL
    return ResourcePoolManager(pools, roles)


def custom(config: Config, gpus_per_node: Sequence[int]) -> ResourcePoolManager:
    """Pools and roles as the user wrote them."""
    placement = config.placement
    if not placement.pools:
        reason = "placement.strategy=custom needs pools, such as placement.pools.big=[4]"
        raise PlacementError(f"placement.pools={{}}: {reason}")
    pools = {name: pool.model_dump() for name, pool in placement.pools.items()}
    homes: dict[str, str] = placement.roles.model_dump(exclude_none=True)
    mapping: dict[Role, str] = {}
    for name, home in homes.items():
        mapping[Role(name)] = home
    return ResourcePoolManager(pools, mapping)


STRATEGIES = {"standard": standard, "split": split, "custom": custom, "auto": standard}
"""`auto` begins like `standard`, if there is no profile from which a placement can be chosen before
the start."""


def _divide(config: Config, gpus_per_node: Sequence[int]) -> tuple[list[int], list[int]]:
    """The GPUs per node of the actor's pool, and those of the critic's: whole nodes, or some GPUs
    of every node."""
    wish = config.placement.split
    counts = [num_gpus for num_gpus in gpus_per_node if num_gpus]
    if sum(counts) < 2:
        reason = f"two pools need at least 2 GPUs, and there is {sum(counts)}"
        fix = "use placement.strategy=standard, or let both pools share the GPU with placement.split.share=0.5"
        raise PlacementError(f"placement.strategy=split: {reason}; {fix}")
    if wish.axis == "auto":
        # Nodes of one GPU cannot be divided.
        prefers_nodes = wish.actor_nodes is not None or min(counts) < 2
        whole_nodes = wish.actor_gpus_per_node is None and prefers_nodes
    else:
        whole_nodes = wish.axis == "node"
    if whole_nodes:
        actor = _divide_nodes(wish, gpus_per_node)
    else:
        actor = _divide_gpus(wish, gpus_per_node)
    critic: list[int] = []
    for num_gpus, num_taken in zip(gpus_per_node, actor, strict=True):
        critic.append(num_gpus - num_taken)
    return actor, critic


def _divide_nodes(wish: SplitConfig, gpus_per_node: Sequence[int]) -> list[int]:
    """The GPUs per node of the actor's pool, which gets all GPUs of the first nodes."""
    most = sum(num_gpus > 0 for num_gpus in gpus_per_node)
    num_nodes = wish.actor_nodes
    if num_nodes is None:
        num_nodes = math.ceil(most / 2)
        setting = f"axis={wish.axis}"
    else:
        setting = f"actor_nodes={num_nodes}"
    if num_nodes >= most:
        raise _nothing_left(setting, "node", most, other_axis="gpu")
    actor: list[int] = []
    num_left = num_nodes
    for num_gpus in gpus_per_node:
        if num_gpus > 0 and num_left > 0:
            actor.append(num_gpus)
            num_left -= 1
        else:
            actor.append(0)
    return actor


def _divide_gpus(wish: SplitConfig, gpus_per_node: Sequence[int]) -> list[int]:
    """The GPUs per node of the actor's pool, which gets the first GPUs of every node."""
    counts = [num_gpus for num_gpus in gpus_per_node if num_gpus]
    wanted = wish.actor_gpus_per_node
    if wanted is None:
        # Each node is halved, so one node with two GPUs is enough.
        most = max(counts)
        if most < 2:
            raise _nothing_left(f"axis={wish.axis}", "GPU", most, other_axis="node")
        return [math.ceil(num_gpus / 2) for num_gpus in gpus_per_node]
    fewest = min(counts)
    if wanted >= fewest:
        setting = f"actor_gpus_per_node={wanted}"
        raise _nothing_left(setting, "GPU", fewest, other_axis="node")
    # A node without GPUs has none for the actor, either.
    return [min(wanted, num_gpus) for num_gpus in gpus_per_node]


def _nothing_left(setting: str, unit: str, most: int, *, other_axis: str) -> PlacementError:
    """The error if the actor's pool would take all `most` nodes or GPUs."""
    if most > 1:
        fix = f"at most {most - 1}"
    else:
        fix = f"placement.split.axis={other_axis}"
    return PlacementError(
        f"placement.split.{setting}: the critic would have no {unit} (of {most}); use {fix}"
    )
