"""Predictions: the step time of a config and a plan, from a profile.

Owns what a prediction says: its interval, the busy share of each pool, the critical path, memory, and what the profile
does not cover.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt

from rolepool.config import Config
from rolepool.config.model_files import read_shape
from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import GIB, MemoryEstimate, estimate_memory
from rolepool.placement.plan import NEXT_STEP, Plan, Schedule, ScheduledCall
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.planner.costs import Seconds, Work
from rolepool.planner.profile import REST, SYNC, SYNC_BETWEEN, Profile, ranks_of
from rolepool.planner.simulate import Rate, simulate

INTERVAL = 1.64
"""Standard deviations on each side of a prediction: nine of ten results of the model are inside."""
UNKNOWN_SHARING = 0.15
"""How much of a GPU two pools may gain or lose by sharing it, if that was never measured."""
ONE_PIECE = Work(1)
UNKNOWN_SYNC = 0.5
"""The relative deviation of a weight sync between pools that was never measured."""

ScheduleOf = Callable[[Config], Schedule]


@dataclass(frozen=True)
class Prediction:
    """What a step would cost under a placement."""

    name: str
    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    tokens_per_gpu_s: float
    busy: dict[str, float]
    path: list[tuple[str, float]]
    memory_gib: dict[str, float]
    """The estimated peak of each pool; empty on CPU slots."""
    notes: list[str] = field(default_factory=list)
    """What the profile does not cover."""

    @property
    def num_gpus(self) -> int:
        return len({slot for pool in self.plan.pools.values() for slot in pool.slots})


class Predictor:
    """Predicts from one profile. Times of operations are computed once for each size of a pool."""

    def __init__(
        self,
        profile: Profile,
        schedule_of: ScheduleOf,
        *,
        gpu_memory_bytes: int | None = None,
        num_cores: int | None = None,
        speeds: Mapping[str, float] | None = None,
    ) -> None:
        """`num_cores` is that of a node with CPU slots. `speeds` are factors for operations or all those of a role."""
        self.profile, self.schedule_of = profile, schedule_of
        self.gpu_memory_bytes, self.num_cores, self.speeds = gpu_memory_bytes, num_cores, dict(speeds or {})
        known = {*ROLE_SPECS, *OPERATIONS}
        if unknown := [name for name in self.speeds if name not in known]:
            raise ConfigError(
                f"--speed {unknown[0]}: is no role and no operation; use one of {', '.join(sorted(known))}"
            )
        self._efficiency: dict[bool, float] = {}
        for shared in profile.sharing:
            self._efficiency[shared.plan.mps] = self._fit_sharing(profile.recordings.index(shared))

    def predict(self, name: str, config: Config, plan: Plan) -> Prediction:
        """Raises PlacementError if the plan cannot run, and ConfigError if the profile does not cover its work."""
        PlacementError.raise_if_any(find_problems(config, plan))
        memory = estimate_memory(config, plan, None if plan.device == "cpu" else self.gpu_memory_bytes)
        if memory.excess:
            raise PlacementError(f"{name}: does not fit in memory, by {memory.excess / GIB:.1f} GiB")
        schedule, notes = self.schedule_of(config), self._notes(config, plan)
        seconds = {call.operation: self.seconds(config, plan, call, memory, schedule) for call in schedule.calls}
        homes, gaps = plan.roles, self.profile.hand_over_s
        rates = [self._rate(plan, change) for change in (0.0, UNKNOWN_SHARING, -UNKNOWN_SHARING)]
        found = []
        for sign, rate in zip((0, -1, 1), rates, strict=True):
            times = {key: max(0.0, one.mean + sign * INTERVAL * sqrt(one.variance)) for key, one in seconds.items()}
            found.append(simulate(schedule, homes, times, gaps, rate))
        middle, low, high = found
        peaks = {} if plan.device == "cpu" else {pool: one.peak / GIB for pool, one in memory.pools.items()}
        slots = {slot for pool in plan.pools.values() for slot in pool.slots}
        speed = self.num_tokens(config) / middle.step_s / len(slots)
        times_s = middle.step_s, low.step_s, high.step_s
        return Prediction(name, plan, *times_s, speed, middle.busy, middle.path, peaks, notes)

    def num_tokens(self, config: Config) -> float:
        """Tokens of prompts and responses in a step."""
        rows, of_prompt, of_response = self.profile.rows_like(config)
        prompt, response = (sum(one) / max(1, len(one)) for one in (rows.num_prompt, rows.num_response))
        num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        return num_rows * (prompt * of_prompt + response * of_response)

    def seconds(
        self, config: Config, plan: Plan, call: ScheduledCall, memory: MemoryEstimate, schedule: Schedule
    ) -> Seconds:
        """The time of a call, alone on its pools."""
        name, role = call.operation.removeprefix(NEXT_STEP), min(call.roles, default=None)
        if name == SYNC:
            found = self._sync(config, plan)
        else:
            pool = plan.roles.get(role, RULE_POOL) if role is not None else RULE_POOL
            num_parts = plan.num_parts(config, role) if role in plan.roles else self.profile.num_helpers if role else 1
            if not any(key == name for key, _ in self.profile.costs):
                fix = "record a run with it, and give its run folder as well"
                raise ConfigError(f"predict: {name} was not measured in the profile; {fix}")
            work = self.profile.work(config, role, OPERATIONS[name], num_parts, memory.micro_batches.get(name))
            ranks = 1 if role is None else ranks_of(config, plan, role, pool, name)
            found = self.profile.seconds(name, work, ranks)
        factor = 1 / self.speeds.get(name, self.speeds.get(role or "", 1.0))
        if role is not None and name != SYNC and OPERATIONS[name].trains:  # a schedule has at most a few epochs
            num_epochs = config.at(f"{ROLE_SPECS[role].section}.ppo_epochs")
            factor *= num_epochs / sum(one.operation == name for one in schedule.calls)
        return Seconds(found.mean * factor, found.variance * factor**2)

    def _sync(self, config: Config, plan: Plan) -> Seconds:
        """The time of a weight sync, in one pool or between two."""
        is_here, ranks = plan.roles[Role.Actor] == plan.roles[Role.Rollout], plan.pool_of(Role.Actor).world_size
        costs = self.profile.costs
        if not is_here and (SYNC_BETWEEN, REST) in costs:
            return self.profile.seconds(SYNC_BETWEEN, {REST: ONE_PIECE}, ranks)
        here = {part: ONE_PIECE for operation, part in costs if operation == SYNC}
        found = self.profile.seconds(SYNC, here, ranks)
        if is_here and here:
            return found
        if here:  # not measured: as long as all weights take through the object store, there and back
            model = config.actor_rollout_ref.model
            width = 4 if plan.device == "cpu" else 2
            num_bytes = read_shape(model.path, model.override_config).num_params * width
            mean = found.mean + 2 * num_bytes / self.profile.bytes_per_s
        else:
            mean = self.profile.seconds(SYNC_BETWEEN, {REST: ONE_PIECE}, ranks).mean
        return Seconds(mean, (UNKNOWN_SYNC * mean) ** 2)

    def _notes(self, config: Config, plan: Plan) -> list[str]:
        """What the profile does not cover."""
        notes = []
        recordings = self.profile.recordings
        parallel = {spec.tensor_parallel for spec in ROLE_SPECS.values() if spec.tensor_parallel is not None}
        for key in parallel:
            if config.at(key) not in (measured := {one.config.at(key) for one in recordings}):
                known = ", ".join(map(str, sorted(measured)))
                raise ConfigError(
                    f"{key}={config.at(key)}: the profile has measured only {known}; record a run with it"
                )
        if not any(rows.live for rows in self.profile.rows.values()):
            what = "the work inside of operations (micro-batches, decode steps, tokens) was not recorded"
            notes.append(f"{what}, so how their time depends on it is assumed")
        sizes_seen = {pool.world_size for one in recordings for pool in one.plan.pools.values()}
        smallest, largest = min(sizes_seen), max(sizes_seen)
        sizes = sorted({pool.world_size for pool in plan.pools.values()} - sizes_seen)
        outside = [str(size) for size in sizes if not smallest <= size <= largest]
        if outside and smallest == largest:
            what = f"all pools of the profile have {smallest} rank{'s' * (smallest > 1)}"
            notes.append(f"{what}, so the cost of collectives was not measured")
        elif outside:
            what = f"the profile has pools of {smallest} to {largest} ranks"
            notes.append(f"{what}; times of other sizes ({', '.join(outside)}) are extrapolated")
        num_nodes = max(len(pool.counts_by_node) for pool in plan.pools.values())
        if num_nodes > max(len(pool.counts_by_node) for one in recordings for pool in one.plan.pools.values()):
            notes.append("the network between nodes was not measured")
        if plan.roles[Role.Actor] != plan.roles[Role.Rollout] and (SYNC_BETWEEN, REST) not in self.profile.costs:
            notes.append("a weight sync between pools was not measured")
        if plan.sharing_pools and plan.mps not in self._efficiency:
            notes.append(f"pools that share a GPU{' with MPS' if plan.mps else ''} were not measured")
        return notes

    def _rate(self, plan: Plan, change: float = 0.0, efficiency: float | None = None) -> Rate | None:
        """How fast pools work at the same time. None if no pool slows another one down."""
        if plan.sharing_pools:
            if efficiency is None and plan.mps in self._efficiency:
                efficiency = self._efficiency[plan.mps]
            elif efficiency is None:  # not measured: as with or without MPS, if that was measured, or without a loss
                efficiency = self._efficiency.get(not plan.mps, 1.0) + change
            return partial(_shared_rate, plan, efficiency)
        if plan.device == "cpu" and self.num_cores is not None and _most_processes(plan, plan.pools) > self.num_cores:
            return partial(_core_rate, plan, self.num_cores)
        return None

    def _fit_sharing(self, position: int) -> float:
        """How much of a GPU pools that share it get together: the value with which the prediction is what was
        measured."""
        one, measured_s = self.profile.recordings[position], self.profile.step_s[position]
        memory = estimate_memory(one.config, one.plan, self.gpu_memory_bytes)
        schedule = self.schedule_of(one.config)
        seconds = partial(self.seconds, one.config, one.plan, memory=memory, schedule=schedule)
        times = {call.operation: seconds(call).mean for call in schedule.calls}
        low, high = 0.3, 2.0
        for _ in range(20):
            middle = (low + high) / 2
            rate = self._rate(one.plan, efficiency=middle)
            is_fast = simulate(schedule, one.plan.roles, times, self.profile.hand_over_s, rate).step_s < measured_s
            low, high = (low, middle) if is_fast else (middle, high)
        return (low + high) / 2


def _shared_rate(plan: Plan, efficiency: float, pool: str, active: Collection[str]) -> float:
    """Pools that work on the same GPU divide it."""
    if pool not in plan.pools:
        return 1.0
    slots = {*plan.pools[pool].slots}
    num_users = sum(bool(slots.intersection(plan.pools[other].slots)) for other in active if other in plan.pools)
    return min(1.0, efficiency / num_users) if num_users > 1 else 1.0


def _core_rate(plan: Plan, num_cores: int, pool: str, active: Collection[str]) -> float:
    """Processes on the same node divide its CPU cores."""
    return min(1.0, num_cores / max(1, _most_processes(plan, active)))


def _most_processes(plan: Plan, pools: Collection[str]) -> int:
    """The most processes of these pools on one node."""
    by_node = Counter(slot.node for pool in pools if pool in plan.pools for slot in plan.pools[pool].slots)
    return max(by_node.values(), default=0)
