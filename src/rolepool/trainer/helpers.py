"""The helpers of a run: pools of processes beside those of its plan, for light work.

Owns how many processes a rule reward gets. Needs no torch, because processes start before torch is
imported.
"""

import os
from collections.abc import Mapping

from rolepool.config import Config
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.rewards import RewardFunction, WeightedRewards
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement import Plan
from rolepool.placement.roles import ROLE_SPECS

CPUS_PER_HELPER = 8
"""Rule rewards use one process for so many CPUs of the driver's node."""
MAX_HELPERS = 8
"""They use at most so many processes."""


def helpers_of(config: Config, plan: Plan, reward: UserFunction | None = None) -> Mapping[str, int]:
    """The pools beside those of the plan, and the number of their processes. Raises ConfigError if
    the reward function cannot be loaded."""
    if not uses_rule(plan):
        return {}
    return {RULE_POOL: num_helpers_for(load_reward_function(config, reward), config)}


def uses_rule(plan: Plan) -> bool:
    """Whether a role that the plan does not have is played by a class without a model: the reward,
    if it is a rule."""
    return any(spec.rule_worker and role not in plan.roles for role, spec in ROLE_SPECS.items())


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
