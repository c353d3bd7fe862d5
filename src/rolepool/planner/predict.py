"""Predictions: the step time of a config and a plan, from a profile.

Owns what a prediction says: its interval, the busy share of each pool, the critical path, memory,
and what the profile does not cover. Owns also the simulation of a step, which says when each call
of the traced step starts and ends under a placement. A pool runs its calls in the order in which
they are made; a call starts after the calls that it waits for; pools that share a GPU, or more
processes than CPU cores, slow each other down.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rolepool.config import Config
from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.spans import DRIVER, RULE_POOL
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import GIB, MemoryEstimate, estimate_memory, shape_of
from rolepool.placement.plan import Plan, Schedule, ScheduledCall
from rolepool.placement.roles import FIRST_OPERATION, OPERATIONS, ROLE_SPECS, Role
from rolepool.planner.profile import (
    NO_ROLE,
    REST,
    SYNC,
    SYNC_BETWEEN,
    Profile,
    Recording,
    Seconds,
    Work,
    ranks_of,
)
from rolepool.units import show_bytes

INTERVAL = 1.64
"""Standard deviations on each side of a prediction: nine of ten results of the model are inside."""
UNKNOWN_SHARING = 0.15
"""How much of a GPU two pools may gain or lose by sharing it, if that was never measured."""
TENSOR_PARALLEL = next(
    spec.tensor_parallel for spec in ROLE_SPECS.values() if spec.tensor_parallel is not None
)
UNKNOWN_SYNC = 0.5
"""The relative deviation of a weight sync between pools that was never measured."""

NUM_STEPS = 4
"""Steps that are simulated. Only the last one counts, because the first ones begin with idle
pools."""

Rate = Callable[[str, Collection[str]], float]
"""How fast a pool works, at most 1, while these pools work."""
ScheduleOf = Callable[[Config], Schedule]


# A step on paper, with durations


class Call(NamedTuple):
    """A call of the simulated steps, and how long it takes alone."""

    operation: str
    pools: tuple[str, ...]
    after: tuple[int, ...]
    """The calls that end before it starts: those that it waits for, and the last one of each of its
    pools."""
    seconds: Any
    """A number, or an array for many placements."""
    hand_over_s: float
    """From the end of what it waits for until it starts."""


class Simulated(NamedTuple):
    """Simulated steps, of which the last one counts: it lasts from its generation to the next
    one."""

    calls: Sequence[Call]
    starts: Mapping[int, Any]
    ends: Mapping[int, Any]
    """When each call starts and ends, by its position. Numbers, or arrays for many placements."""

    @property
    def _bounds(self) -> tuple[int, int]:
        """The positions of the generations that begin and end the step."""
        *_, begin, end = (
            position
            for position, call in enumerate(self.calls)
            if call.operation == FIRST_OPERATION
        )
        return begin, end

    @property
    def step_s(self) -> Any:
        begin, end = self._bounds
        return self.starts[end] - self.starts[begin]

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step in which each pool works."""
        begin_s, end_s = (self.starts[position] for position in self._bounds)
        busy: dict[str, float] = defaultdict(float)
        for position, call in enumerate(self.calls):
            inside_s = min(self.ends[position], end_s) - max(self.starts[position], begin_s)
            for pool in call.pools:
                busy[pool] += max(0.0, inside_s) / self.step_s
        return dict(busy)

    @property
    def path(self) -> list[tuple[str, float]]:
        """What the step waits for, in the order of time: operations and their seconds."""
        begin, position = self._bounds
        links: list[tuple[str, float]] = []
        while self.starts[position] > self.starts[begin]:
            position = max(self.calls[position].after, key=lambda earlier: self.ends[earlier])
            since_s = max(self.starts[position], self.starts[begin])
            links.append((self.calls[position].operation, self.ends[position] - since_s))
        merged = groupby(reversed(links), key=lambda link: link[0])
        return [
            (operation, sum(seconds for _, seconds in of_operation))
            for operation, of_operation in merged
        ]


def simulate(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, Any],
    hand_over_s: Mapping[str, float],
    rate: Rate | None = None,
) -> Simulated:
    """Simulate steps with these roles in these pools. `seconds` has the time of one call of each
    operation. If no rate is given, pools do not slow each other down, and the times may be arrays:
    then many placements with the same roles in each pool are simulated at once."""
    num_calls = len(schedule.calls) - 1
    calls: list[Call] = []
    last_of_pool: dict[str, int] = {}
    for position in range(
        num_calls * (NUM_STEPS - 1) + 1
    ):  # the last one is the generation after these steps
        # What the first call of a step waits for is said by the last call in the schedule of the
        # step before.
        number = position % num_calls or num_calls
        first, call = position - number, schedule.calls[position % num_calls]
        pools = tuple({homes.get(role, RULE_POOL) for role in call.roles}) or (DRIVER,)
        after = {first + earlier for earlier in schedule.calls[number].after}
        after |= {last_of_pool.get(pool, -1) for pool in pools}
        known = tuple(sorted(earlier for earlier in after if earlier >= 0))
        hand_over = hand_over_s.get(call.operation, 0.0)
        calls.append(Call(call.operation, pools, known, seconds[call.operation], hand_over))
        last_of_pool.update(dict.fromkeys(pools, position))
    return _at_full_speed(calls) if rate is None else _by_events(calls, rate)


def _at_full_speed(calls: Sequence[Call]) -> Simulated:
    """No call slows another one down. Times may be arrays."""
    starts: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    for position, call in enumerate(calls):
        ready_s = reduce(np.maximum, [ends[earlier] for earlier in call.after], 0.0)
        starts[position] = ready_s + call.hand_over_s
        ends[position] = starts[position] + call.seconds
    return Simulated(calls, starts, ends)


def _by_events(calls: Sequence[Call], rate: Rate) -> Simulated:
    """From each start or end of a call to the next one: until then, all calls that run have the
    same rates."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    left_s = [call.seconds for call in calls]
    now_s = 0.0
    while len(ends) < len(calls):
        for position, call in enumerate(calls):
            if position not in starts and all(earlier in ends for earlier in call.after):
                starts[position] = now_s + call.hand_over_s
        running = [
            position
            for position, start_s in starts.items()
            if start_s <= now_s and position not in ends
        ]
        active = {pool for position in running for pool in calls[position].pools}
        rates = {
            position: min(rate(pool, active) for pool in calls[position].pools)
            for position in running
        }
        events = [start_s - now_s for start_s in starts.values() if start_s > now_s]
        passed_s = min([*events, *(left_s[position] / rates[position] for position in running)])
        now_s += passed_s
        for position in running:
            left_s[position] -= passed_s * rates[position]
            if left_s[position] <= 1e-12:
                ends[position] = now_s
    return Simulated(calls, starts, ends)


# Predictions


@dataclass(frozen=True)
class Prediction:
    """What a step would cost under a placement."""

    name: str
    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    num_tokens: float
    busy: dict[str, float]
    path: list[tuple[str, float]]
    memory_gib: dict[str, float]
    """The estimated peak of each pool; empty on CPU slots."""
    notes: list[str] = field(default_factory=list)
    """What the profile does not cover."""


@dataclass
class Predictor:
    """Predicts from one profile. Times of operations are computed once for each size of a pool."""

    profile: Profile
    schedule_of: ScheduleOf
    gpu_memory_bytes: int | None = None
    num_cores: int | None = None
    """Those of a node with CPU slots."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Factors for operations, or for all those of a role."""

    def __post_init__(self) -> None:
        known = {*ROLE_SPECS, *OPERATIONS}
        if unknown := [name for name in self.speeds if name not in known]:
            names = ", ".join(sorted(known))
            raise ConfigError(
                f"--speed {unknown[0]}: is no role and no operation; use one of {names}"
            )
        self._efficiency = {
            shared.plan.mps: self._fit_sharing(shared) for shared in self.profile.sharing
        }

    def predict(self, name: str, config: Config, plan: Plan) -> Prediction:
        """Raises PlacementError if the plan cannot run, and ConfigError if the profile does not
        cover its work."""
        PlacementError.raise_if_any(find_problems(config, plan))
        memory, schedule, notes = (
            self.memory(config, plan),
            self.schedule_of(config),
            self._notes(config, plan),
        )
        if memory.excess:
            raise PlacementError(f"{name}: does not fit in memory, by {show_bytes(memory.excess)}")
        seconds = {
            call.operation: self.seconds(config, plan, call, memory, schedule)
            for call in schedule.calls[:-1]
        }
        found = []
        for sign, change in ((0, 0.0), (-1, UNKNOWN_SHARING), (1, -UNKNOWN_SHARING)):
            times = {
                key: max(0.0, one.mean + sign * INTERVAL * sqrt(one.variance))
                for key, one in seconds.items()
            }
            found.append(
                simulate(
                    schedule, plan.roles, times, self.profile.hand_over_s, self._rate(plan, change)
                )
            )
        middle, low, high = found
        peaks = (
            {}
            if plan.device == "cpu"
            else {pool: one.peak / GIB for pool, one in memory.pools.items()}
        )
        times_s, num_tokens = (middle.step_s, low.step_s, high.step_s), self.num_tokens(config)
        return Prediction(name, plan, *times_s, num_tokens, middle.busy, middle.path, peaks, notes)

    def memory(self, config: Config, plan: Plan) -> MemoryEstimate:
        return estimate_memory(
            config, plan, None if plan.device == "cpu" else self.gpu_memory_bytes
        )

    def num_tokens(self, config: Config) -> float:
        """Tokens of prompts and responses in a step."""
        rows, of_prompt, of_response = self.profile.rows_like(config)
        num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        return num_rows * (
            fmean(rows.num_prompt) * of_prompt + fmean(rows.num_response) * of_response
        )

    def seconds(
        self,
        config: Config,
        plan: Plan,
        call: ScheduledCall,
        memory: MemoryEstimate,
        schedule: Schedule,
    ) -> Seconds:
        """The time of a call, alone on its pools."""
        name, role = call.operation, min(call.roles, default=NO_ROLE)
        if name == SYNC:
            found = self._sync(config, plan)
        else:
            num_parts = (
                plan.dims_of(config, role).dp
                if role in plan.roles
                else self.profile.num_helpers
                if role
                else 1
            )
            if not any(key == name for key, _ in self.profile.costs):
                fix = "record a run with it, and give its run folder as well"
                raise ConfigError(f"predict: {name} was not measured in the profile; {fix}")
            work = self.profile.work(
                config, role, OPERATIONS[name], num_parts, memory.micro_batches.get(name)
            )
            ranks = ranks_of(config, plan, role, plan.roles.get(role, RULE_POOL), name)
            found = self.profile.seconds(name, work, ranks)
        factor = 1 / self.speeds.get(name, self.speeds.get(role, 1.0))
        if OPERATIONS[name].trains:  # a schedule has at most a few epochs
            num_epochs = config.at(f"{ROLE_SPECS[role].section}.ppo_epochs")
            factor *= num_epochs / sum(one.operation == name for one in schedule.calls)
        return Seconds(found.mean * factor, found.variance * factor**2)

    def _sync(self, config: Config, plan: Plan) -> Seconds:
        """The time of a weight sync, in one pool or between two."""
        is_here = plan.roles[Role.Actor] == plan.roles[Role.Rollout]
        kind, other = (SYNC, SYNC_BETWEEN) if is_here else (SYNC_BETWEEN, SYNC)
        is_measured = any(operation == kind for operation, _ in self.profile.costs)
        measured = kind if is_measured else other
        work = {part: Work(1) for operation, part in self.profile.costs if operation == measured}
        found = self.profile.seconds(measured, work, plan.pool_of(Role.Actor).world_size)
        if is_measured:
            return found
        mean = found.mean
        if not is_here:  # and as long as all weights take through the object store, there and back
            num_bytes = shape_of(config, Role.Actor).num_params * (4 if plan.device == "cpu" else 2)
            mean += 2 * num_bytes / self.profile.bytes_per_s
        return Seconds(mean, (UNKNOWN_SYNC * mean) ** 2)

    def _notes(self, config: Config, plan: Plan) -> list[str]:
        """What the profile does not cover."""
        notes, recordings, parallel = [], self.profile.recordings, config.at(TENSOR_PARALLEL)
        if parallel not in (measured := {one.config.at(TENSOR_PARALLEL) for one in recordings}):
            problem = f"the profile has measured only {', '.join(map(str, sorted(measured)))}"
            raise ConfigError(f"{TENSOR_PARALLEL}={parallel}: {problem}; record a run with it")
        if not any(rows.live for rows in self.profile.rows.values()):
            what = "the work inside of operations (micro-batches, decode steps, tokens) was not recorded"
            notes.append(f"{what}, so how their time depends on it is assumed")
        sizes_seen = {pool.world_size for one in recordings for pool in one.plan.pools.values()}
        smallest, largest = min(sizes_seen), max(sizes_seen)
        sizes = sorted({pool.world_size for pool in plan.pools.values()} - sizes_seen)
        outside = [str(size) for size in sizes if not smallest <= size <= largest]
        if self.profile.sharding.is_measured:
            unknown = [str(size) for size in sizes if not self.profile.sharding.covers(size)]
            if unknown:
                what = f"what sharding costs over {', '.join(unknown)} ranks was not measured"
                notes.append(f"{what}, so that of the nearest number of ranks is assumed")
        elif outside and smallest == largest:
            what = f"all pools of the profile have {smallest} rank{'s' * (smallest > 1)}"
            notes.append(f"{what}, so the cost of collectives was not measured")
        elif outside:
            what = f"the profile has pools of {smallest} to {largest} ranks"
            notes.append(f"{what}; times of other sizes ({', '.join(outside)}) are extrapolated")
        num_nodes = max(len(pool.counts_by_node) for pool in plan.pools.values())
        if num_nodes > max(
            len(pool.counts_by_node) for one in recordings for pool in one.plan.pools.values()
        ):
            notes.append("the network between nodes was not measured")
        if (
            plan.roles[Role.Actor] != plan.roles[Role.Rollout]
            and (SYNC_BETWEEN, REST) not in self.profile.costs
        ):
            notes.append("a weight sync between pools was not measured")
        if plan.sharing_pools and plan.mps not in self._efficiency:
            notes.append(
                f"pools that share a GPU{' with MPS' if plan.mps else ''} were not measured"
            )
        return notes

    def _rate(self, plan: Plan, change: float) -> Rate | None:
        """How fast pools work at the same time. None if no pool slows another one down. What pools
        that share a GPU get of it together may not be measured. Then it is assumed to be the same
        with and without MPS, or else the whole GPU, and `change` more."""
        if plan.sharing_pools:
            assumed = self._efficiency.get(not plan.mps, 1.0) + change
            return partial(_shared_rate, plan, self._efficiency.get(plan.mps, assumed))
        if plan.device == "cpu" and self.num_cores is not None:
            return partial(_core_rate, plan, self.num_cores)
        return None

    def _fit_sharing(self, shared: Recording) -> float:
        """How much of a GPU pools that share it get together: the value with which the prediction
        is what was measured."""
        config, plan, measured_s = shared.config, shared.plan, shared.step_s
        memory, schedule = self.memory(config, plan), self.schedule_of(config)
        times = {
            one.operation: self.seconds(config, plan, one, memory, schedule).mean
            for one in schedule.calls[:-1]
        }
        simulated = partial(simulate, schedule, plan.roles, times, self.profile.hand_over_s)
        values = np.linspace(0.3, 2.0, 2_000).tolist()  # a larger value makes the step shorter
        at = bisect_left(
            values, -measured_s, key=lambda one: -simulated(partial(_shared_rate, plan, one)).step_s
        )
        return float(values[min(at, len(values) - 1)])


def _shared_rate(plan: Plan, efficiency: float, pool: str, active: Collection[str]) -> float:
    """Pools that work on the same GPU divide it."""
    if pool not in plan.pools:
        return 1.0
    slots = {*plan.pools[pool].slots}
    num_users = sum(
        bool(slots.intersection(plan.pools[other].slots)) for other in active if other in plan.pools
    )
    return min(1.0, efficiency / num_users) if num_users > 1 else 1.0


def _core_rate(plan: Plan, num_cores: int, pool: str, active: Collection[str]) -> float:
    """Processes on the same node divide its CPU cores."""
    by_node = Counter(
        slot.node for other in active if other in plan.pools for slot in plan.pools[other].slots
    )
    return min(1.0, num_cores / max(by_node.values(), default=1))
