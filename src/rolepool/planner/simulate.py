"""A step on paper with durations: when each call of the traced step starts and ends under a placement.

Owns the simulation. A pool runs its calls in the order in which they are made; a call starts after the calls that it
waits for; pools that share a GPU, or more processes than CPU cores, slow each other down.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from rolepool.placement.plan import DRIVER, NEXT_STEP, RULE_POOL, Schedule
from rolepool.placement.roles import Role

NUM_STEPS = 4
"""Steps that are simulated. Only the last one counts, because the first ones begin with idle pools."""

Rate = Callable[[str, Collection[str]], float]
"""How fast a pool works, at most 1, while these pools work."""


@dataclass(frozen=True)
class Call:
    """A call of the simulated steps, and how long it takes alone."""

    operation: str
    pools: tuple[str, ...]
    after: tuple[int, ...]
    seconds: Any
    """A number, or an array for many placements."""
    hand_over_s: float
    """From the end of what it waits for until it starts."""


@dataclass
class Simulated:
    """A simulated step."""

    step_s: float
    busy: dict[str, float]
    """The share of the step in which each pool works."""
    path: list[tuple[str, float]]
    """What the step waits for, in the order of time: operations and their seconds."""


def simulate(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, float],
    hand_over_s: Mapping[str, float],
    rate: Rate | None = None,
) -> Simulated:
    """Simulate steps with these roles in these pools. `seconds` has the time of one call of each operation. If no rate
    is given, pools do not slow each other down."""
    calls = _unrolled(schedule, homes, seconds, hand_over_s)
    starts, ends = _forward(calls) if rate is None else _run(calls, rate)
    firsts = [position for position, call in enumerate(calls) if call.operation == "gen"]
    begin, end = firsts[-2], firsts[-1]
    step_s = starts[end] - starts[begin]
    busy: dict[str, float] = defaultdict(float)
    for position, call in enumerate(calls):
        inside_s = min(ends[position], starts[end]) - max(starts[position], starts[begin])
        for pool in call.pools:
            busy[pool] += max(0.0, inside_s) / step_s
    return Simulated(step_s, dict(busy), _path(calls, starts, ends, end, starts[begin]))


def step_times(
    schedule: Schedule, homes: Mapping[Role, str], seconds: Mapping[str, Any], hand_over_s: Mapping[str, float]
) -> Any:
    """The step times of many placements with the same roles in each pool, whose operations take these arrays of
    seconds. Pools do not slow each other down."""
    calls = _unrolled(schedule, homes, seconds, hand_over_s)
    starts, _ = _forward(calls)
    begin, end = [position for position, call in enumerate(calls) if call.operation == "gen"][-2:]
    return starts[end] - starts[begin]


def _forward(calls: Sequence[Call]) -> tuple[list[Any], list[Any]]:
    """When each call starts and ends if no call slows another one down. Times may be arrays."""
    free: dict[str, Any] = defaultdict(float)
    starts: list[Any] = []
    ends: list[Any] = []
    for call in calls:
        start_s: Any = 0.0
        for before_s in (*(ends[earlier] for earlier in call.after), *(free[pool] for pool in call.pools)):
            start_s = np.maximum(start_s, before_s)
        starts.append(start_s + call.hand_over_s)
        ends.append(starts[-1] + call.seconds)
        free.update(dict.fromkeys(call.pools, ends[-1]))
    return starts, ends


def _unrolled(
    schedule: Schedule, homes: Mapping[Role, str], seconds: Mapping[str, Any], hand_over_s: Mapping[str, float]
) -> list[Call]:
    """The calls of several steps, and the generation after them."""
    calls: list[Call] = []
    *own, following = schedule.calls
    first_after: Collection[int] = ()
    for step in range(NUM_STEPS):
        first = len(calls)
        for position, call in enumerate(own if step < NUM_STEPS - 1 else own[:1]):
            operation = call.operation.removeprefix(NEXT_STEP)
            pools = tuple({homes.get(role, RULE_POOL) for role in call.roles}) or (DRIVER,)
            after = tuple(first_after) if position == 0 else tuple(first + earlier for earlier in call.after)
            calls.append(Call(operation, pools, after, seconds[operation], hand_over_s.get(operation, 0.0)))
        first_after = [first + earlier for earlier in following.after]
    return calls


def _run(calls: Sequence[Call], rate: Rate) -> tuple[list[float], list[float]]:
    """When each call starts and ends."""
    starts, ends = [0.0] * len(calls), [-1.0] * len(calls)
    queues: dict[str, list[int]] = defaultdict(list)
    for position, call in enumerate(calls):
        for pool in call.pools:
            queues[pool].append(position)
    due: dict[int, float] = {}
    left: dict[int, float] = {}
    now = 0.0
    while queues:
        for queue in queues.values():
            position = queue[0]
            call = calls[position]
            is_ready = position not in due and all(queues[pool][0] == position for pool in call.pools)
            if is_ready and all(ends[earlier] >= 0 for earlier in call.after):
                due[position] = now + call.hand_over_s
                left[position] = call.seconds
        running = [position for position, start_s in due.items() if start_s <= now]
        active = {pool for position in running for pool in calls[position].pools}
        rates = {position: min(rate(pool, active) for pool in calls[position].pools) for position in running}
        events = [start_s - now for start_s in due.values() if start_s > now]
        events += [left[position] / rates[position] for position in running]
        passed_s = min(events)
        for position in running:
            left[position] -= passed_s * rates[position]
        now += passed_s
        for position in [position for position in running if left[position] <= 1e-12]:
            starts[position], ends[position] = due.pop(position), now
            for pool in calls[position].pools:
                queues[pool].pop(0)
                if not queues[pool]:
                    del queues[pool]
    return starts, ends


def _path(
    calls: Sequence[Call], starts: Sequence[float], ends: Sequence[float], last: int, begin_s: float
) -> list[tuple[str, float]]:
    """The chain of operations that a step waits for, from its beginning to the start of the next generation."""
    path: list[tuple[str, float]] = []
    position = last
    while starts[position] > begin_s:
        before = [earlier for earlier in range(len(calls)) if ends[earlier] <= starts[position] and earlier != position]
        shared = [
            one for one in before if one in calls[position].after or {*calls[one].pools} & {*calls[position].pools}
        ]
        if not shared:
            break
        position = max(shared, key=lambda one: ends[one])
        path.append((calls[position].operation, ends[position] - max(starts[position], begin_s)))
    merged = groupby(reversed(path), key=lambda link: link[0])
    return [(operation, sum(seconds for _, seconds in links)) for operation, links in merged]
