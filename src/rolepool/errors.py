"""The errors a user can cause, each of which prints as one line per problem and no traceback.

Owns the exception types. They are picklable, so that they survive the trip between processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class RolepoolError(Exception):
    """Something the user can change. Holds one line per problem; `str()` joins them."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigError(RolepoolError):
    """A key, its value or a combination of them is wrong."""


class PlacementError(RolepoolError):
    """The pools and roles asked for cannot be placed on the GPUs there are."""


class WorkerError(RolepoolError):
    """A worker process failed or died. Says which: pool, role, rank, node, pid and the method that was called."""

    def __init__(
        self,
        problems: str | Iterable[str],
        *,
        pool: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        node: str | None = None,
        pid: int | None = None,
        method: str | None = None,
    ) -> None:
        super().__init__(problems)
        self.pool, self.role, self.rank = pool, role, rank
        self.node, self.pid, self.method = node, pid, method


class DataError(RolepoolError, ValueError):
    """A batch does not have the keys, sizes or types that an operation needs."""
