"""The schedule of a step as a graph of calls, and which operations can run at the same time under a plan.

The graph comes from running the step on paper (`rolepool.trainer.paper`), so there is no second description of the
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from rolepool.placement.pools import RULE_POOL
from rolepool.placement.roles import Role

NEXT_STEP = "next_"
"""Begins the names of operations that belong to the next step."""


@dataclass(frozen=True)
class ScheduledCall:
    """A call that the driver makes in a step."""

    operation: str
    roles: frozenset[Role]
    """The roles that compute it; none for work of the driver itself."""
    after: frozenset[int]
    """Positions of the calls that end before this one starts, under every placement: those whose results it is given,
    those that the driver waited for before it made this call, and earlier calls of the same role."""


@dataclass(frozen=True)
class Schedule:
    """The calls of a step in the order in which they are made, and the generation that begins the next step."""

    calls: tuple[ScheduledCall, ...]

    @cached_property
    def ancestors(self) -> list[frozenset[int]]:
        """For each call, the positions of all calls that end before it starts."""
        found: list[frozenset[int]] = []
        for call in self.calls:
            found.append(call.after.union(*(found[before] for before in call.after)))
        return found

    def overlaps(self, roles: Mapping[Role, str]) -> list[tuple[str, str]]:
        """The pairs of operations that run at the same time with these roles in these pools."""
        names = list(dict.fromkeys(call.operation for call in self.calls if call.roles))
        return [pair for pair in combinations(names, 2) if self.can_overlap(*pair, roles)]

    def can_overlap(self, one: str, other: str, roles: Mapping[Role, str] | None = None) -> bool:
        """Whether some call of one operation can run at the same time as some call of the other: neither waits for the
        other, and they use different pools. None stands for a pool for each role."""
        return any(
            not self._is_ordered(first, second)
            and (roles is None or self._pools(first, roles).isdisjoint(self._pools(second, roles)))
            for first in self._positions(one)
            for second in self._positions(other)
        )

    def _positions(self, operation: str) -> list[int]:
        return [position for position, call in enumerate(self.calls) if call.operation == operation]

    def _is_ordered(self, one: int, other: int) -> bool:
        return one in self.ancestors[other] or other in self.ancestors[one]

    def _pools(self, position: int, roles: Mapping[Role, str]) -> set[str]:
        """The pools of a call. A role without a pool is a rule that runs on CPUs, outside of the plan's pools."""
        return {roles.get(role, RULE_POOL) for role in self.calls[position].roles}
