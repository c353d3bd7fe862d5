"""The errors that a user can cause. Each prints as one line per problem, without a traceback.

Owns the exception types, the wording of operating system errors, and the logger of all warnings.
These errors are picklable, so a worker can send them to the driver.
"""

import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unicodedata import category

logger = logging.getLogger("rolepool")
CONTROL_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control characters, characters without a shape (such as those that reverse the direction of
text), halves of surrogate pairs, and line breaks of Unicode."""


class RolepoolError(Exception):
    """Something the user can change. Holds one line per problem; `str()` joins them."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        if isinstance(problems, str):
            self.problems: tuple[str, ...] = (problems,)
        else:
            self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @classmethod
    def raise_if_any(cls, problems: Iterable[str]) -> None:
        """Raise this error with all problems, if there are any."""
        lines = list(problems)
        if lines:
            raise cls(lines)


class ConfigError(RolepoolError):
    """A key, its value or a combination of them is wrong."""


class PlacementError(RolepoolError):
    """The requested pools and roles cannot be placed on the available GPUs."""


class WorkerError(RolepoolError):
    """A worker process failed or died. The attributes say which one, and which method was called,
    if that is known."""

    pool: str | None = None
    role: str | None = None
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    method: str | None = None
    is_death: bool = False
    """Whether a process died or data was lost with it, so that the work can be repeated. Other
    errors would occur again."""

    def __init__(self, problems: str | Iterable[str], **where: str | int | None) -> None:
        super().__init__(problems)
        vars(self).update(where)


class RayDiedError(RolepoolError):
    """A part of the run's own Ray died. A new Ray in a new driver process can resume the run."""


class DivergedError(RolepoolError):
    """Training no longer makes finite updates."""


class DataError(RolepoolError, ValueError):
    """A batch does not have the keys, sizes or types that an operation needs."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run in the same way as Ctrl-C."""


@contextmanager
def explained(what: str, fix: str, *also: type[Exception]) -> Iterator[None]:
    """Turn an operating system error in the block (or one of the types in `also`) into a
    ConfigError with a fix."""
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{what} ({one_line(error)}); {fix}") from error


@contextmanager
def collected(problems: list[str], prefix: str = "") -> Iterator[None]:
    """Add the problems of a RolepoolError in the block to a list, and do not raise it."""
    try:
        yield
    except RolepoolError as error:
        problems.extend(f"{prefix}{problem}" for problem in error.problems)


def place_of(error: BaseException) -> str:
    """The file and line that raised an error of the user's code, such as "mine.py:12"."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{Path(last.filename).name}:{last.lineno}"


def first_few(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` names in one line, and how many more there are."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"and {len(names) - most} more")
    return separator.join(shown)


def printable(text: str) -> str:
    """The text with control characters escaped, because a terminal obeys them. Line breaks and tabs
    stay."""
    if text.isprintable():
        return text
    for char in set(text) - {"\n", "\t"}:
        if category(char) in CONTROL_CATEGORIES:
            escaped = char.encode("unicode_escape").decode()
            text = text.replace(char, escaped)
    return text


def encodable(name: str) -> str:
    """A file name with question marks for bytes that are not UTF-8, which cannot be written to a
    page or a table."""
    return name.encode(errors="replace").decode()


def one_line(error: BaseException) -> str:
    """An error in one line: file and reason of an operating system error, or the first line of any
    other message (and the next line, if the first one ends with a colon)."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.filename}: {error.strerror}"
        return error.strerror
    lines = str(error).strip().replace(":\n   ", ":").splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0].strip()
    if text.isprintable():
        return text
    return repr(text)
