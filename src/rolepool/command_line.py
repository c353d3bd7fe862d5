"""What programs have in common: their arguments, their exit codes, and what an error looks like.

0 fine, 2 the user must change something (one line each, no traceback). Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rolepool.errors import ConfigError, RolepoolError

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig

EXIT_FINE, EXIT_USER, EXIT_INTERRUPTED = 0, 2, 130


def run_program(program: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a program on these arguments, or on those of this process, and return its exit code."""
    try:
        code = program(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except RolepoolError as error:
        print_errors(error.problems)
        return EXIT_USER
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left; point stdout elsewhere so that the interpreter's last flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINE


def print_errors(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Errors as exceptions, so that all of them are printed in one way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see `{self.prog} --help`")


def words_parser(program: str, summary: str | None, words: str = "FILE or key=value") -> Parser:
    """A parser of config files and overrides."""
    parser = Parser(prog=program, description=summary, allow_abbrev=False)
    parser.add_argument(
        "words",
        nargs="*",
        metavar=words.replace(", ", "|").replace(" or ", "|"),
        help=f"{words}; files first, then overrides",
    )
    return parser


def parse(parser: Parser, arguments: list[str]) -> Any:
    """The options, or None when all that was wanted was help."""
    try:
        return parser.parse_intermixed_args(arguments)
    except SystemExit:
        return None


def is_input(word: str) -> bool:
    """Whether a word is a config file or an override."""
    return "=" in word or word.endswith((".yaml", ".yml")) or os.path.isfile(word)  # noqa: PTH113 (never raises)


def load_words(words: Sequence[str]) -> LoadedConfig:
    """The config that files and overrides make."""
    from rolepool.config import load_config

    files = [word for word in words if "=" not in word and not word.startswith("~")]
    return load_config(files, [word for word in words if word not in files])
