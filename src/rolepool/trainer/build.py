"""From a plan to roles that can be called.

Owns which process gets which role. Which class plays which role is in the table of
`rolepool.placement.roles`, and how the actor's weights reach the rollout is chosen from the plan by
`rolepool.weights.channels`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from rolepool.algorithm.policy_losses import compute_policy_loss_reinforce
from rolepool.cluster import Cluster, RoleProxy, WorkerGroup
from rolepool.config import Config
from rolepool.config.functions import ENGINES_WITH_A_PROCESS, import_object, policy_losses
from rolepool.config.stop_tokens import read_stop_tokens, united
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement import ParallelDims, Plan, Role
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.roles import ROLE_SPECS
from rolepool.placement.weight_ways import sends_changes, weight_way
from rolepool.protocol import Worker
from rolepool.roles.setups import PolicyLoss, RunSetup
from rolepool.trainer.helpers import uses_rule
from rolepool.trainer.step import Roles
from rolepool.weights.channels import channel_of

ENGINE_POLL_S = 10.0
"""While engines start, the console says so once in this time."""
TOKENIZER_KEY = "actor_rollout_ref.model.tokenizer_path"


def build_roles(
    cluster: Cluster,
    config: Config,
    num_steps: int,
    dtype: torch.dtype = torch.float32,
    reward: UserFunction | None = None,
    tell: Callable[[str], None] = lambda line: None,
    *,
    reads_weights: bool = True,
    gets_weights: bool = False,
) -> Roles:
    """Build every role that its pool does not have yet, all pools at the same time, and wait until
    they are ready. A rule reward gets a process if none was started for it. `tell` gets lines about
    what the build waits for. With `reads_weights=False`, the weights of trained roles are undefined
    until a saved state is loaded into them. With `gets_weights`, those of the rollout are undefined
    until the actor's are sent to it.

    Raises ConfigError if a node does not have a model folder, because its processes would look for
    it on the hub.
    """
    _check_model_folders(cluster, config)
    plan = cluster.plan
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    memory = estimate_memory(config, plan, cluster.gpu_memory_bytes)
    setup = RunSetup(
        num_training_steps=num_steps,
        dtype=dtype,
        micro_batches=memory.micro_batches,
        stop_token_ids=stop_tokens_of(config, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        policy_loss=_policy_loss_of(config),
        reward=reward,
        reads_weights=reads_weights,
        gets_weights=gets_weights,
    )
    if uses_rule(plan) and RULE_POOL not in cluster.groups:
        cluster.add_helpers(RULE_POOL, 1)
    proxies: dict[Role, RoleProxy] = {}
    for role in _build_order(config):
        home = _home_of(cluster, config, role)
        if home is not None:
            proxies[role] = _proxy_of(role, home, config, setup)
    _await_start(proxies, tell)
    ready: dict[str, RoleProxy] = {}
    for role in ROLE_SPECS:
        if role in proxies:
            ready[role] = proxies[role].with_blocking(False)
    on_gpus = cluster.gpu_memory_bytes is not None
    way = weight_way(config, cluster.plan, on_gpus=on_gpus)
    return Roles(
        ready,
        channel_of(
            way,
            ready[Role.Actor],
            ready[Role.Rollout],
            sends_changes=sends_changes(config, way),
        ),
    )


# The folders of models


def _policy_loss_of(config: Config) -> PolicyLoss:
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        return compute_policy_loss_reinforce
    return policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)


def _check_model_folders(cluster: Cluster, config: Config) -> None:
    """Raise ConfigError if a node with new processes does not have a model folder that the config
    names. Processes that have roles have found it."""
    for key, pool in _folder_keys(cluster.plan, config):
        group = cluster.groups[pool]
        path = str(config.at(key))
        is_folder_here = Path(path).expanduser().is_dir()
        if is_folder_here and not group.roles:
            fix = "copy the model there, or to a folder that all nodes share"
            group.check_exists(f"{key}={path}", path, fix)


def _folder_keys(plan: Plan, config: Config) -> list[tuple[str, str]]:
    """The keys that name the folders of models, and the pools that read them."""
    keys_and_pools: list[tuple[str, str]] = []
    for role, pool in plan.roles.items():
        section = ROLE_SPECS[role].model
        key = f"{section}.path"
        keys_and_pools.append((key, pool))
    if config.at(TOKENIZER_KEY) is not None:
        rollout_pool = plan.roles[Role.Rollout]
        keys_and_pools.append((TOKENIZER_KEY, rollout_pool))
    # Several roles of a pool may have the same model.
    return list(dict.fromkeys(keys_and_pools))


# The roles


class _Home(NamedTuple):
    """Who plays a role, and where."""

    name: str
    """The name of the role in its processes."""
    worker: str
    """The class, as `module:Class`."""
    group: WorkerGroup
    dims: ParallelDims


def _home_of(cluster: Cluster, config: Config, role: Role) -> _Home | None:
    """None if the run does not use the role."""
    plan = cluster.plan
    spec = ROLE_SPECS[role]
    if role in plan.roles:
        pool = plan.roles[role]
        return _Home(
            name=str(role),
            worker=spec.worker,
            group=cluster.groups[pool],
            dims=plan.dims_of(config, role),
        )
    if spec.rule_worker is None:
        return None
    helpers = cluster.groups[RULE_POOL]
    return _Home(
        name=spec.operations[0].name,
        worker=spec.rule_worker,
        group=helpers,
        dims=ParallelDims.over(helpers.world_size),
    )


def _proxy_of(role: Role, home: _Home, config: Config, setup: RunSetup) -> RoleProxy:
    """The role in its processes. It is constructed there now if they do not have it yet."""
    name, worker, group, dims = home
    if name in group.roles:
        return group.roles[name]
    worker_class: type[Worker] = import_object(f"worker of role {role}", worker)
    if not hasattr(worker_class, "setup_type"):
        fix = "derive it from rolepool.roles.model_role.ModelRole, or name a class of roles.setups"
        raise ConfigError(f"worker of role {role}: {worker} has no setup_type; {fix}")
    own_setup = worker_class.setup_type.of(setup)
    return group.add_role(
        name,
        worker_class,
        config,
        own_setup,
        dims=dims,
        blocking=False,
    )


def _build_order(config: Config) -> list[Role]:
    """The roles in the order in which a process builds them. An engine with a process of its own
    comes first, because it starts while the other roles load."""
    order = list(ROLE_SPECS)
    if config.actor_rollout_ref.rollout.engine in ENGINES_WITH_A_PROCESS:
        order.remove(Role.Rollout)
        order.insert(0, Role.Rollout)
    return order


def _await_start(proxies: Mapping[Role, RoleProxy], tell: Callable[[str], None]) -> None:
    """Wait until all roles can be used. Those that nobody has to wait for any more are not
    asked."""
    new: dict[Role, RoleProxy] = {}
    for role, proxy in proxies.items():
        if not proxy.has_started:
            new[role] = proxy
    for proxy in new.values():
        proxy.ready.get()
    if Role.Rollout in new:
        await_engines(new[Role.Rollout], tell)
    for proxy in new.values():
        proxy.has_started = True


def await_engines(rollout: RoleProxy, tell: Callable[[str], None]) -> None:
    """Wait until the engines of all ranks have started. `tell` gets a line now and then."""
    wait_s = 0.0
    while True:
        answers = rollout.await_engine(wait_s).get()
        waiting = [answer for answer in answers if answer is not None]
        if not waiting:
            return
        tell(waiting[0])
        wait_s = ENGINE_POLL_S


def stop_tokens_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response: that of the tokenizer, and those that the files of the model
    and the config name.

    A file of a model on the hub is downloaded, as the model itself is.
    """
    path = str(config.actor_rollout_ref.model.path)
    if not Path(path).expanduser().is_dir():
        with suppress(OSError):  # most models that are not for chats have no such file
            cached_file(path, "generation_config.json")
    named = read_stop_tokens(config)
    return united([tokenizer.eos_token_id], named.ids)
