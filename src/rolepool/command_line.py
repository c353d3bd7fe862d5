"""What all programs share: arguments, exit codes, and how errors are printed.

Exit code 0: success. 2: the user must change something; each problem is one line, without a
traceback. Imports nothing that is slow to import.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rolepool.errors import (
    ConfigError,
    RayDiedError,
    RolepoolError,
    Terminated,
    one_line,
    printable,
)

if TYPE_CHECKING:
    from rolepool.config import Draft, LoadedConfig

EXIT_SUCCESS = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_RAY_DIED = 75
"""The exit code of a driver whose Ray has died. `rolepool train` starts such a driver again."""


class DriverEnd(SystemExit):
    """Ends a driver process, which is a copy of the process that started it, without running the
    code that follows."""


def run_program(
    program: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> int:
    """Run a program with `argv`, or with this process's arguments. Return its exit code; None
    counts as success."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
        sys.stdout.reconfigure(errors="surrogateescape")
    if argv is None:
        argv = sys.argv[1:]
    try:
        code = program(list(argv))
        if sys.stdout is not None:  # None if the shell closed it
            sys.stdout.flush()
        return code or EXIT_SUCCESS
    except DriverEnd:
        raise
    except SystemExit as ended:  # argparse printed the help, or Ray was stopped while it started
        return EXIT_TERMINATED if ended.code == signal.SIGTERM else EXIT_SUCCESS
    except KeyboardInterrupt as interrupt:
        words = ["interrupted", *map(str, interrupt.args)]
        print_errors([": ".join(words)], label="")
        return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return EXIT_SUCCESS
    except RayDiedError as error:
        print_errors(error.problems)
        return EXIT_RAY_DIED
    except RolepoolError as error:
        print_errors(error.problems)
        return EXIT_USER_ERROR
    except OSError as error:
        print_errors([one_line(error)])
        return EXIT_USER_ERROR


def silence_stdout() -> None:
    """Discard all further output. For a closed output pipe (`| head`): no later write or flush may
    fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(text: object) -> None:
    """Print a line with a file name or an answer in it: exactly for another program, and without
    control characters on a terminal."""
    if sys.stdout.isatty():
        text = printable(str(text))
    print(text, flush=True)


def print_errors(problems: Iterable[str], label: str = "error: ") -> None:
    """Print a line for each problem on standard error."""
    for problem in problems:
        print(f"{label}{printable(problem)}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, so that all errors are printed in one way.

    `words` describes the positional arguments: config files and overrides.
    """

    def __init__(self, program: str, summary: str | None, words: str | None = None) -> None:
        super().__init__(prog=program, description=summary, allow_abbrev=False)
        self._takes_overrides = words is not None
        if words is not None:
            metavar = words.replace(", ", "|").replace(" or ", "|")
            self.add_argument(
                "words", nargs="*", metavar=metavar, help=f"{words}; overrides win over files"
            )
            self.add_argument(
                "--config-path",
                metavar="FOLDER",
                help="folder of --config-name; default: this folder",
            )
            self.add_argument(
                "--config-name",
                metavar="NAME",
                help="a YAML file to load first, such as ppo_trainer",
            )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """What the arguments say; options may stand between the others. A program that takes
        overrides answers options of other trainers with the overrides to write."""
        options, unknown = self.parse_known_intermixed_args(arguments)
        # The words that follow unknown options are most likely their values.
        names = [word for word in unknown if word.startswith("-")] or unknown
        problems: list[str] = []
        unrecognized: list[str] = []
        for name in names:
            hint = None
            if self._takes_overrides:
                hint = what_to_write(name, arguments)
            if hint is None:
                unrecognized.append(shown(name))
            else:
                option = shown(name.partition("=")[0])  # without the value, which may be a secret
                problems.append(f"{self.prog}: {option}: {hint}")
        if unrecognized:
            what = f"unrecognized arguments: {' '.join(unrecognized)}"
            problems.append(f"{self.prog}: {what}; see `{self.prog} --help`")
        ConfigError.raise_if_any(problems)
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see `{self.prog} --help`")


def shown(word: str) -> str:
    """A word of the command line on one line."""
    return word if word.isprintable() else repr(word)


def what_to_write(word: str, arguments: Sequence[str]) -> str | None:
    """The override in place of an option that does not exist, such as `--pretrain`; None if no key
    is known for it."""
    from rolepool.config.other_names import Hint, hint_for_option
    from rolepool.config.schema import all_keys

    name, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("--"):
        return None
    hint: Hint | None
    if name in all_keys():
        hint = Hint(name, "")
    else:
        hint = hint_for_option(name)
    if hint is None:
        return None
    if hint.remark:  # the value may have another meaning
        return f"is not an option; write {hint.key}=...{hint.remark}"
    if not equals:
        value = _value_after(word, list(arguments))
    is_switch = all_keys()[hint.key].type_text == "true or false"
    if is_switch and value not in ("true", "false"):
        value = "true"
    return f"is not an option; write {hint.key}={value or '...'}"


def _value_after(word: str, arguments: list[str]) -> str:
    """The word that follows an option; "" if that is another option or an override."""
    place = arguments.index(word) + 1
    if place == len(arguments):
        return ""
    following = arguments[place]
    if following.startswith("-") or "=" in following:
        return ""
    return following


def is_input(word: str) -> bool:
    """Whether a word is a config file, a recipe or an override."""
    from rolepool.config.sources import recipe_names

    is_file = word.endswith((".yaml", ".yml")) or os.path.isfile(word)  # noqa: PTH113 (never raises)
    return is_file or "=" in word or word in recipe_names()


def load_words(options: argparse.Namespace, words: Sequence[str] | None = None) -> "LoadedConfig":
    """Load the config from files, recipes and overrides: the parsed words, or these."""
    return read_words(options, words).checked()


def read_words(options: argparse.Namespace, words: Sequence[str] | None = None) -> "Draft":
    """Load the config like `load_words`, but do not raise its problems, so that they can be
    reported together with others."""
    from rolepool.config import read_config
    from rolepool.config.sources import named_file

    if words is None:
        words = options.words
    files = named_file(options.config_path, options.config_name)
    overrides = []
    for word in words:
        if "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            files.append(word)
    return read_config(files, overrides)
