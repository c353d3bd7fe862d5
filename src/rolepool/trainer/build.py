"""From a plan to roles that can be called.

Owns which process gets which role. Which class plays which role is in the table of
`rolepool.placement.roles`, and how the actor's weights reach the rollout is chosen from the plan by
`rolepool.weights.channels`.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from rolepool.cluster import Cluster, RoleProxy
from rolepool.config import Config
from rolepool.config.functions import ENGINES_WITH_A_PROCESS, import_object, policy_losses
from rolepool.config.model_keys import RewardModelModelConfig
from rolepool.config.stop_tokens import read_stop_tokens, united
from rolepool.data.prompts import PromptSet
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.reward_texts import reward_texts
from rolepool.data.rewards import RewardFunction, WeightedRewards
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError
from rolepool.metrics.spans import RULE_POOL
from rolepool.models.loading import read_model_config
from rolepool.placement import ParallelDims, Plan, Role
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.roles import ROLE_SPECS
from rolepool.roles.setups import RunSetup
from rolepool.trainer.step import Roles
from rolepool.weights.channels import channel_of

CPUS_PER_HELPER, MAX_HELPERS = 8, 8
"""Rule rewards use one process for so many CPUs of the driver's node, up to a limit."""
Models = dict[str, PretrainedConfig]
"""The config.json of each model of a run, by the key that names the model."""


class Inputs(NamedTuple):
    """What was checked before a process starts."""

    models: Models
    num_helpers: int
    """The number of processes for rule rewards."""


ENGINE_POLL_S = 10.0
"""While engines start, the console says so once in this time."""


def build_roles(
    cluster: Cluster,
    config: Config,
    num_steps: int,
    dtype: torch.dtype = torch.float32,
    reward: UserFunction | None = None,
    num_helpers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
    *,
    reads_weights: bool = True,
) -> Roles:
    """Build every role that its pool does not have yet, all pools at the same time, and wait until
    they are ready. A rule reward gets this number of helper processes. `tell` gets lines about what
    the build waits for. With `reads_weights=False`, the weights of trained roles are undefined
    until a saved state is loaded into them.

    Raises ConfigError if a node does not have a model folder, because its processes would look for
    it on the hub.
    """
    plan = cluster.plan
    tokenizer_key = "actor_rollout_ref.model.tokenizer_path"
    folders = [(f"{ROLE_SPECS[role].model}.path", pool) for role, pool in plan.roles.items()]
    if config.at(tokenizer_key) is not None:
        folders.append((tokenizer_key, plan.roles[Role.Rollout]))
    for key, pool in dict.fromkeys(folders):
        path = str(config.at(key))
        if Path(path).expanduser().is_dir():
            fix = "copy the model there, or to a folder that all nodes share"
            cluster.groups[pool].check_exists(f"{key}={path}", path, fix)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    stop_token_ids = stop_tokens_of(config, tokenizer)
    micro_batches = estimate_memory(config, plan, cluster.gpu_memory_bytes).micro_batches
    policy_loss = policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    setup = RunSetup(
        num_training_steps=num_steps,
        dtype=dtype,
        micro_batches=micro_batches,
        stop_token_ids=stop_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        policy_loss=policy_loss,
        reward=reward,
        reads_weights=reads_weights,
    )
    proxies: dict[Role, RoleProxy] = {}
    for role in _build_order(config):
        spec = ROLE_SPECS[role]
        if role in plan.roles:
            dims = plan.dims_of(config, role)
            name, worker, group = str(role), spec.worker, cluster.groups[plan.roles[role]]
        elif spec.rule_worker is not None:
            name, worker = spec.operations[0].name, spec.rule_worker
            group = cluster.groups.get(RULE_POOL) or cluster.add_helpers(RULE_POOL, num_helpers)
            dims = ParallelDims.over(group.world_size)
        else:
            continue
        worker_class = import_object(f"worker of role {role}", worker)
        if not hasattr(worker_class, "setup_type"):
            fix = "derive it from rolepool.roles.model_role.ModelRole, or name a class of roles.setups"
            raise ConfigError(f"worker of role {role}: {worker} has no setup_type; {fix}")
        proxies[role] = group.roles.get(name) or group.add_role(
            name, worker_class, config, worker_class.setup_type.of(setup), dims=dims, blocking=False
        )
    for proxy in proxies.values():
        proxy.ready.get()
    ready: dict[str, RoleProxy] = {
        role: proxies[role].with_blocking(False) for role in ROLE_SPECS if role in proxies
    }
    await_engines(ready[Role.Rollout], tell)
    return Roles(ready, channel_of(plan, ready[Role.Actor], ready[Role.Rollout]))


def _build_order(config: Config) -> list[Role]:
    """The roles in the order in which a process builds them. An engine with a process of its own
    comes first, because it starts while the other roles load."""
    order = list(ROLE_SPECS)
    if config.actor_rollout_ref.rollout.engine in ENGINES_WITH_A_PROCESS:
        order.remove(Role.Rollout)
        order.insert(0, Role.Rollout)
    return order


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
    return united([tokenizer.eos_token_id], read_stop_tokens(config).ids)


def check_inputs(config: Config, plan: Plan, reward: UserFunction | None = None) -> Inputs:
    """The models of a run, and how many processes a rule reward needs.

    Raises ConfigError, before a process starts, if a model, function or class cannot be loaded.
    """
    policy_losses.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    sections: dict[str, None] = dict.fromkeys(ROLE_SPECS[role].model for role in plan.roles)
    models = {section: read_model_config(config, section) for section in sections}
    for role in plan.roles:
        import_object(f"worker of role {role}", ROLE_SPECS[role].worker)
    num_helpers = 1
    if Role.RewardModel not in plan.roles:
        num_helpers = num_helpers_for(load_reward_function(config, reward), config)
    elif reward is not None:
        raise ConfigError(
            "reward: it is not used, because reward_model.enable=true; remove one of the two"
        )
    return Inputs(models, num_helpers)


def num_helpers_for(function: RewardFunction | WeightedRewards, config: Config) -> int:
    """How many helper processes a reward gets. A function for whole batches must get all rows of a
    batch in one."""
    if function.takes_batches:
        return 1
    num_helpers = min(max(1, (os.cpu_count() or 1) // CPUS_PER_HELPER), MAX_HELPERS)
    num_calls = config.custom_reward_function.max_concurrency
    if function.is_users and num_calls is not None:
        return min(num_helpers, num_calls)
    return num_helpers


def check_prompts(config: Config, models: Models, prompts: Sequence[PromptSet]) -> None:
    """Raise an error, before a process starts, if a model cannot read the prompts: if policy or
    critic do not have one of their tokens, or if a reward model cannot read what the policy writes.
    The chat template of a reward model is tried with the first prompt of each set."""
    for section, model in models.items():
        keys, vocab_size = config.at(section), model.get_text_config().vocab_size
        if not isinstance(keys, RewardModelModelConfig):
            for one in prompts:
                one.check_vocabulary(f"{section}.path={keys.path}", vocab_size)
        elif (texts := reward_texts(config, section, vocab_size)) is not None:
            for one in prompts:
                texts.check(one)
