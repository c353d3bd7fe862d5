"""What programs have in common: their arguments, their exit codes, and what an error looks like.

0 fine, 2 the user must change something (one line each, no traceback). Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rolepool.errors import ConfigError, RolepoolError, Terminated, os_reason

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig

EXIT_FINE, EXIT_USER, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 2, 130, 143


def run_program(program: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a program on these arguments, or on those of this process, and return its exit code; None of it is fine."""
    try:
        code = program(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # as it is where the shell closed it
            sys.stdout.flush()
        return code or EXIT_FINE
    except SystemExit as ended:  # all that was wanted was help; or it was Ray, which was starting
        return EXIT_TERMINATED if ended.code == signal.SIGTERM else EXIT_FINE
    except RolepoolError as error:
        print_errors(error.problems)
        return EXIT_USER
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return EXIT_FINE
    except OSError as error:
        print_errors([os_reason(error)])
        return EXIT_USER


def silence_stdout() -> None:
    """For when its reader (`| head`) has left: nothing that is written from now on fails, the last flush included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_errors(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Errors as exceptions, so that all of them are printed in one way. `words` are config files and overrides."""

    def __init__(self, program: str, summary: str | None, words: str | None = None) -> None:
        super().__init__(prog=program, description=summary, allow_abbrev=False)
        if words is not None:
            metavar = words.replace(", ", "|").replace(" or ", "|")
            self.add_argument("words", nargs="*", metavar=metavar, help=f"{words}; files first, then overrides")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see `{self.prog} --help`")


def is_input(word: str) -> bool:
    """Whether a word is a config file or an override."""
    return "=" in word or word.endswith((".yaml", ".yml")) or os.path.isfile(word)  # noqa: PTH113 (never raises)


def load_words(words: Sequence[str]) -> LoadedConfig:
    """The config that files and overrides make."""
    from rolepool.config import load_config

    files = [word for word in words if "=" not in word and not word.startswith("~")]
    return load_config(files, [word for word in words if word not in files])
