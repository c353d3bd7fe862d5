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

from rolepool.placement.plan import DRIVER, RULE_POOL, Schedule
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
    """The calls that end before it starts: those that it waits for, and the last one of each of its pools."""
    seconds: Any
    """A number, or an array for many placements."""
    hand_over_s: float
    """From the end of what it waits for until it starts."""


@dataclass(frozen=True)
class Simulated:
    """Simulated steps, of which the last one counts: it lasts from its generation to the next one."""

    calls: Sequence[Call]
    starts: Mapping[int, Any]
    ends: Mapping[int, Any]
    """When each call starts and ends, by its position. Numbers, or arrays for many placements."""

    @property
    def _bounds(self) -> tuple[int, int]:
        """The positions of the generations that begin and end the step."""
        *_, begin, end = (position for position, call in enumerate(self.calls) if call.operation == "gen")
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
        return [(operation, sum(seconds for _, seconds in of_operation)) for operation, of_operation in merged]


def simulate(
    schedule: Schedule,
    homes: Mapping[Role, str],
    seconds: Mapping[str, Any],
    hand_over_s: Mapping[str, float],
    rate: Rate | None = None,
) -> Simulated:
    """Simulate steps with these roles in these pools. `seconds` has the time of one call of each operation. If no rate
    is given, pools do not slow each other down, and the times may be arrays: then many placements with the same roles
    in each pool are simulated at once."""
    num_calls = len(schedule.calls) - 1
    calls: list[Call] = []
    last_of_pool: dict[str, int] = {}
    for position in range(num_calls * (NUM_STEPS - 1) + 1):  # the last one is the generation after these steps
        # What the first call of a step waits for is said by the last call in the schedule of the step before.
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
        ready_s: Any = 0.0
        for earlier in call.after:
            ready_s = np.maximum(ready_s, ends[earlier])
        starts[position] = ready_s + call.hand_over_s
        ends[position] = starts[position] + call.seconds
    return Simulated(calls, starts, ends)


def _by_events(calls: Sequence[Call], rate: Rate) -> Simulated:
    """From each start or end of a call to the next one: until then, all calls that run have the same rates."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    left_s = [call.seconds for call in calls]
    now_s = 0.0
    while len(ends) < len(calls):
        for position, call in enumerate(calls):
            if position not in starts and all(earlier in ends for earlier in call.after):
                starts[position] = now_s + call.hand_over_s
        running = [position for position, start_s in starts.items() if start_s <= now_s and position not in ends]
        active = {pool for position in running for pool in calls[position].pools}
        rates = {position: min(rate(pool, active) for pool in calls[position].pools) for position in running}
        events = [start_s - now_s for start_s in starts.values() if start_s > now_s]
        passed_s = min([*events, *(left_s[position] / rates[position] for position in running)])
        now_s += passed_s
        for position in running:
            left_s[position] -= passed_s * rates[position]
            if left_s[position] <= 1e-12:
                ends[position] = now_s
    return Simulated(calls, starts, ends)
