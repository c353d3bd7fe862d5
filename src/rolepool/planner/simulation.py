"""Simulated steps: when each call of the traced step starts and ends under a placement.

A pool runs its calls in the order in which they are made. A call starts after the calls that it
waits for. Pools that share a GPU, or more processes than CPU cores, slow each other down. Durations
come from the caller: this module knows neither profiles nor costs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rolepool.metrics.spans import DRIVER, RULE_POOL
from rolepool.placement.plan import Plan, Schedule, ScheduledCall
from rolepool.placement.roles import Role

NUM_STEPS = 4
"""Steps that are simulated. Only the last one counts, because the first ones begin with idle
pools. If calls wait for earlier steps, as many steps more are simulated."""

Rate = Callable[[str, Collection[str]], float]
"""How fast a pool works, at most 1, while these pools work."""
Times = npt.NDArray[np.float64]
"""A time under each of many placements."""
Duration = TypeVar("Duration", float, Times)
"""The times of one placement are numbers. Those of many placements are arrays."""


class SimulatedCall(NamedTuple, Generic[Duration]):
    """A call of the simulated steps, and how long it takes alone."""

    operation: str
    pools: tuple[str, ...]
    after: tuple[int, ...]
    """The calls that end before it starts: those that it waits for, and the last one of each of its
    pools."""
    seconds: Duration
    hand_over_s: float
    """From the end of what it waits for until it starts."""


class Simulated(NamedTuple, Generic[Duration]):
    """Simulated steps, of which the last one counts: it lasts from its generation to the next
    one."""

    calls: Sequence[SimulatedCall[Duration]]
    calls_per_step: int
    starts: Mapping[int, Duration]
    ends: Mapping[int, Duration]
    """When each call starts and ends, by its position."""

    @property
    def _bounds(self) -> tuple[int, int]:
        """The positions of the calls that begin this step and the next one."""
        end = len(self.calls) - 1
        return end - self.calls_per_step, end

    @property
    def step_s(self) -> Duration:
        begin, end = self._bounds
        return self.starts[end] - self.starts[begin]

    @property
    def busy(self: "Simulated[float]") -> dict[str, float]:
        """The share of the step in which each pool works."""
        begin, end = self._bounds
        begin_s = self.starts[begin]
        end_s = self.starts[end]
        step_s = end_s - begin_s
        busy: dict[str, float] = defaultdict(float)
        for position, call in enumerate(self.calls):
            since_s = max(self.starts[position], begin_s)
            until_s = min(self.ends[position], end_s)
            inside_s = max(0.0, until_s - since_s)
            for pool in call.pools:
                busy[pool] += inside_s / step_s
        return dict(busy)

    @property
    def path(self: "Simulated[float]") -> list[tuple[str, float]]:
        """What the step waits for, in the order of time: operations and their seconds. Calls of one
        operation that follow each other are one entry."""
        path: list[tuple[str, float]] = []
        earliest_first = reversed(self._path_backwards())
        for operation, seconds in earliest_first:
            if path:
                last_operation, last_s = path[-1]
                if last_operation == operation:
                    path[-1] = (operation, seconds + last_s)
                    continue
            path.append((operation, seconds))
        return path

    def _path_backwards(self: "Simulated[float]") -> list[tuple[str, float]]:
        """The same for single calls, from the end of the step to its start: from each call to the
        one that it waited for longest."""
        begin, position = self._bounds
        begin_s = self.starts[begin]
        calls: list[tuple[str, float]] = []
        while self.starts[position] > begin_s:
            position = self._last_cause(position)
            operation = self.calls[position].operation
            since_s = max(self.starts[position], begin_s)
            calls.append((operation, self.ends[position] - since_s))
        return calls

    def _last_cause(self: "Simulated[float]", position: int) -> int:
        """The position of the call that ended last of those that a call waited for."""

        def end_s(earlier: int) -> float:
            return self.ends[earlier]

        return max(self.calls[position].after, key=end_s)


def simulate(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, float],
    hand_over_s: Mapping[str, float],
    rate: Rate | None = None,
) -> Simulated[float]:
    """Simulate steps with these roles in these pools. `seconds` has the time of one call of each
    operation. If no rate is given, pools do not slow each other down."""
    calls = _calls_of_steps(schedule, homes, seconds, hand_over_s)
    calls_per_step = len(schedule.calls) - 1
    if rate is None:
        return _at_full_speed(calls, calls_per_step)
    return _by_events(calls, calls_per_step, rate)


def simulate_many(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, Times],
    hand_over_s: Mapping[str, float],
) -> Simulated[Times]:
    """Simulate many placements with the same roles in each pool at once. Pools do not slow each
    other down."""
    calls = _calls_of_steps(schedule, homes, seconds, hand_over_s)
    return _at_full_speed(calls, calls_per_step=len(schedule.calls) - 1)


def _calls_of_steps(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, Duration],
    hand_over_s: Mapping[str, float],
) -> list[SimulatedCall[Duration]]:
    """The calls of the simulated steps, and the generation after them."""
    num_calls = len(schedule.calls) - 1
    calls: list[SimulatedCall[Duration]] = []
    last_of_pool: dict[str, int] = {}
    num_positions = num_calls * (_num_steps(schedule) - 1) + 1
    for position in range(num_positions):
        # The last call of the schedule is the generation of the next step. It says what the first
        # call of a step waits for in the step before.
        number = position % num_calls or num_calls
        first = position - number
        call = schedule.calls[number]
        pools = _pools_of(call, homes)

        after: set[int] = set()
        for number_before in call.after:
            # The first step has no step before, so some positions would be negative.
            earlier = first + number_before
            if earlier >= 0:
                after.add(earlier)
        for pool in pools:
            if pool in last_of_pool:
                after.add(last_of_pool[pool])
            last_of_pool[pool] = position

        operation = schedule.calls[position % num_calls].operation
        calls.append(
            SimulatedCall(
                operation=operation,
                pools=pools,
                after=tuple(sorted(after)),
                seconds=seconds[operation],
                hand_over_s=hand_over_s.get(operation, 0.0),
            )
        )
    return calls


def _num_steps(schedule: Schedule) -> int:
    """How many steps are simulated."""
    num_calls = len(schedule.calls) - 1
    earliest = min(min(call.after, default=0) for call in schedule.calls)
    num_steps_before = -(earliest // num_calls)
    return NUM_STEPS + max(0, num_steps_before)


def _pools_of(call: ScheduledCall, homes: Mapping[Role, str]) -> tuple[str, ...]:
    """The pools of a call. A role without a pool is a rule, and the driver has no role."""
    if not call.roles:
        return (DRIVER,)
    return tuple({homes.get(role, RULE_POOL) for role in call.roles})


def _at_full_speed(
    calls: Sequence[SimulatedCall[Duration]], calls_per_step: int
) -> Simulated[Duration]:
    """No call slows another one down."""
    starts: dict[int, Duration] = {}
    ends: dict[int, Duration] = {}
    for position, call in enumerate(calls):
        # The number fits arrays, too, because numpy compares it with each element.
        ready_s: Any = 0.0
        for earlier in call.after:
            ready_s = np.maximum(ready_s, ends[earlier])
        start_s = ready_s + call.hand_over_s
        starts[position] = start_s
        ends[position] = start_s + call.seconds
    return Simulated(calls, calls_per_step, starts, ends)


def _by_events(
    calls: Sequence[SimulatedCall[float]], calls_per_step: int, rate: Rate
) -> Simulated[float]:
    """From each start or end of a call to the next one: until then, all calls that run have the
    same rates."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    left_s = [call.seconds for call in calls]
    now_s = 0.0
    while len(ends) < len(calls):
        for position, call in enumerate(calls):
            if position in starts:
                continue
            if all(earlier in ends for earlier in call.after):
                starts[position] = now_s + call.hand_over_s

        running: list[int] = []
        active: set[str] = set()
        events_s: list[float] = []
        """How long it takes until each of the next starts and ends."""
        for position, start_s in starts.items():
            if start_s > now_s:
                events_s.append(start_s - now_s)
            elif position not in ends:
                running.append(position)
                active.update(calls[position].pools)
        rates: dict[int, float] = {}
        for position in running:
            rates[position] = min(rate(pool, active) for pool in calls[position].pools)
            events_s.append(left_s[position] / rates[position])

        passed_s = min(events_s)
        now_s += passed_s
        for position in running:
            left_s[position] -= passed_s * rates[position]
            # Rounding may leave a little of a call that has ended.
            if left_s[position] <= 1e-12:
                ends[position] = now_s
    return Simulated(calls, calls_per_step, starts, ends)


def shared_rate(plan: Plan, efficiency: float, pool: str, active: Collection[str]) -> float:
    """Pools that work on the same GPU divide it. `efficiency` is how much of it they get
    together."""
    if pool not in plan.pools:
        return 1.0
    slots = set(plan.pools[pool].slots)
    num_users = 0
    for other in active:
        if other not in plan.pools:
            continue
        other_slots = plan.pools[other].slots
        if not slots.isdisjoint(other_slots):
            num_users += 1
    if num_users <= 1:
        return 1.0
    return min(1.0, efficiency / num_users)


def core_rate(plan: Plan, num_cores: int, pool: str, active: Collection[str]) -> float:
    """Processes on the same node divide its CPU cores."""
    num_active: Counter[int] = Counter()
    for other in active:
        if other in plan.pools:
            num_active.update(slot.node for slot in plan.pools[other].slots)
    most_active = max(num_active.values(), default=1)
    return min(1.0, num_cores / most_active)
