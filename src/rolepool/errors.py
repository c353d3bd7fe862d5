"""The errors a user can cause, each of which prints as one line per problem and no traceback.

Owns the exception types, and what is said of errors of the operating system. Ours are picklable, so that they survive
the trip between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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


class DivergedError(RolepoolError):
    """Training makes no finite updates any more."""


class DataError(RolepoolError, ValueError):
    """A batch does not have the keys, sizes or types that an operation needs."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def explained(what: str, fix: str, *also: type[Exception]) -> Iterator[None]:
    """Have an error of the operating system in the block, or one that stands for such, say what the user can change."""
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{what} ({os_reason(error)}); {fix}") from error


def os_reason(error: Exception) -> str:
    """The file and what is wrong with it, as far as the error knows them."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
