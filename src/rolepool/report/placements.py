"""Training one recipe with several placements, one after another, each in its own process.

Owns how placements are named on the command line, and the processes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from types import FrameType

from rolepool.config import load_config
from rolepool.errors import ConfigError, RolepoolError, Terminated
from rolepool.placement.checks import find_problems
from rolepool.placement.plan import build_plan

NUM_LINES_SHOWN = 10
"""Lines from the end of a failed run's output that are reported."""


def overrides_of(word: str) -> list[str]:
    """`split` is a strategy; `placement.strategy=split,placement.split.share=0.5` is a list of overrides."""
    return re.split(r",(?=[A-Za-z_][\w.-]*=)", word) if "=" in word else [f"placement.strategy={word}"]


def run_placements(
    recipe: str, overrides: Sequence[str], words: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Path], list[str]]:
    """Train with each placement. Returns the folders of the runs that succeeded, and why the others failed."""
    placements = {re.sub(r"[^\w.=-]+", "_", word.replace("placement.", "")): overrides_of(word) for word in words}
    if len(words) < 2 or len(placements) < len(words):
        raise ConfigError("compare --run: give at least two placements after `--`, such as `-- standard split`")
    _check_placements(recipe, overrides, placements)
    home = _new_folder(Path("runs") / f"compare_{Path(recipe).stem}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, _terminate)
    folders, failures = [], []
    for name, placement in placements.items():
        folder, log = home / name, home / f"{name}.log"
        keys = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
        say(f"training with {name}; its output is in {log}")
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "rolepool", "train", recipe, *overrides, *placement, *keys]
            code = _wait_for(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0))
        if code == 0:
            folders.append(folder)
        else:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LINES_SHOWN:]
            failures.append("\n".join([f"{name}: training ended with code {code}; the end of {log}:", *last]))
    return folders, failures


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code. Passes every Ctrl-C on to the child, and raises it here after the child has ended.

    The child is in its own process group, so it does not receive Ctrl-C from the terminal as well.
    """
    interrupted: type[KeyboardInterrupt] | None = None
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt as interrupt:
            interrupted = type(interrupt)
            child.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted("the training run has ended too")
    return child.returncode


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _check_placements(recipe: str, overrides: Sequence[str], placements: dict[str, list[str]]) -> None:
    """Raise ConfigError before the first run starts if one of the placements cannot run."""
    problems: list[str] = []
    for name, placement in placements.items():
        try:
            config = load_config([recipe], [*overrides, *placement]).config
            found = find_problems(config, build_plan(config))
        except RolepoolError as error:
            found = list(error.problems)
        problems += [f"{recipe} with {name}: {problem}" for problem in found]
    if problems:
        raise ConfigError([*problems, f"write keys that belong to one placement after `--`, not into {recipe}"])


def _new_folder(path: Path) -> Path:
    """Create the folder, or, if it exists, one with the next free number, so that runs are never mixed."""
    names = chain([path.name], (f"{path.name}_{number}" for number in count(2)))
    folder = next(folder for folder in map(path.with_name, names) if not folder.exists())
    folder.mkdir(parents=True)
    return folder
