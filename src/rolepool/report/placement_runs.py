"""Training one recipe with several placements, one after another, each in its own process.

Knows how a placement is written as a word, and nothing about what the runs have recorded.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from rolepool.config import read_config
from rolepool.errors import ConfigError, Terminated, collected
from rolepool.placement.checks import plan_problems

NUM_LINES_SHOWN = 10
"""Lines from the end of a failed run's output that are reported."""

WaitFor = Callable[[int], tuple[int, int]]
"""Waits for a process. Returns its exit code, and the last signal that was passed on to it, or
0."""


def overrides_of(word: str) -> list[str]:
    """`split` is a strategy; `placement.strategy=split,placement.split.share=0.5` is a list of
    overrides."""
    if "=" not in word:
        return [f"placement.strategy={word}"]
    # A value may contain commas, so only those before another key divide the list.
    return re.split(r",(?=[A-Za-z_][\w.-]*=)", word)


def run_placements(
    recipe: str,
    overrides: Sequence[str],
    words: Sequence[str],
    say: Callable[[str], None],
    wait_for: WaitFor,
) -> tuple[list[Path], list[str]]:
    """Train with each placement. Returns the folders of the runs that succeeded, and why the others
    failed.

    `wait_for` waits for a process, and passes Ctrl-C and SIGTERM on to it. They end the comparison
    after the run.
    """
    placements = {_folder_name(word): overrides_of(word) for word in words}
    if len(words) < 2 or len(placements) < len(words):
        raise ConfigError(
            "compare --run: give at least two placements after `--`, such as `-- standard split`"
        )
    _check_placements(recipe, overrides, placements)
    home = _new_folder(recipe)
    folders = []
    failures = []
    for name, placement in placements.items():
        folder = home / name
        log = home / f"{name}.log"
        keys = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
        say(f"training with {name}; its output is in {log}")
        words_of_run = [recipe, *overrides, *placement, *keys]
        code, last_signal = _train(words_of_run, log, wait_for)
        if last_signal == signal.SIGINT:
            raise KeyboardInterrupt("the training run has ended too")
        if last_signal:
            raise Terminated("the training run has ended too")
        if code == 0:
            folders.append(folder)
        else:
            output = log.read_text(encoding="utf-8", errors="replace").splitlines()
            end_of_output = output[-NUM_LINES_SHOWN:]
            problem = f"{name}: training ended with code {code}; the end of {log}:"
            failures.append("\n".join([problem, *end_of_output]))
    return folders, failures


def _folder_name(word: str) -> str:
    """A placement as the name of a folder."""
    return re.sub(r"[^\w.=-]+", "_", word.replace("placement.", ""))


def _new_folder(recipe: str) -> Path:
    """Make a new folder, so that runs are never mixed with those of an earlier comparison."""
    for name in _numbered_names(f"compare_{Path(recipe).stem}"):
        folder = Path("runs") / name
        if not folder.exists():
            break
    folder.mkdir(parents=True)
    return folder


def _numbered_names(name: str) -> Iterator[str]:
    yield name
    for number in count(2):
        yield f"{name}_{number}"


def _train(words: Sequence[str], log: Path, wait_for: WaitFor) -> tuple[int, int]:
    """Train in another process, whose output goes to a file. Returns what `wait_for` returns."""
    command = [sys.executable, "-m", "rolepool", "train", *words]
    with log.open("w", encoding="utf-8") as output:
        streams = [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)
        return wait_for(process)


def _check_placements(
    recipe: str,
    overrides: Sequence[str],
    placements: Mapping[str, list[str]],
) -> None:
    """Raise ConfigError before the first run starts if one of the placements cannot run."""
    problems: list[str] = []
    for name, placement in placements.items():
        with collected(problems, f"{recipe} with {name}: "):
            draft = read_config([recipe], [*overrides, *placement])
            draft.checked(*plan_problems(draft.loaded.config))
    if problems:
        raise ConfigError(
            [*problems, f"write keys that belong to one placement after `--`, not into {recipe}"]
        )
