"""One recipe trained under several placements, one after another, each as a process of its own.

Owns the words that name placements, and the processes. Knows runs by the folders they leave.
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

NUM_LINES_OF_FAILURE = 10


def overrides_of(word: str) -> list[str]:
    """`split` is a strategy; `placement.strategy=split,placement.split.share=0.5` a list of overrides."""
    return re.split(r",(?=[A-Za-z_][\w.-]*=)", word) if "=" in word else [f"placement.strategy={word}"]


def run_placements(
    recipe: str, overrides: Sequence[str], words: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Path], list[str]]:
    """Train under each placement. Returns the folders of the runs that succeeded, and why others did not."""
    placements = {re.sub(r"[^\w.=-]+", "_", word.replace("placement.", "")): overrides_of(word) for word in words}
    if len(words) < 2 or len(placements) < len(words):
        raise ConfigError("compare --run: give two placements or more after `--`, such as `-- standard split`")
    _refuse_what_cannot_run(recipe, overrides, placements)
    home = _free_folder(Path("runs") / f"compare_{Path(recipe).stem}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # a `kill` or a closed terminal, unless under nohup
            signal.signal(number, _terminate)
    folders, failures = [], []
    for name, placement in placements.items():
        folder, log = home / name, home / f"{name}.log"
        keys = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
        say(f"training under {name}; its output goes to {log}")
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "rolepool", "train", recipe, *overrides, *placement, *keys]
            code = _wait_for(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0))
        if code == 0:
            folders.append(folder)
        else:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LINES_OF_FAILURE:]
            failures.append("\n".join([f"{name}: training ended with code {code}; the end of {log}:", *last]))
    return folders, failures


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C is handed on, each of them once as the child is in a process group of its own, and raised
    when the child has ended."""
    interrupted: type[KeyboardInterrupt] | None = None
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt as interrupt:
            interrupted = type(interrupt)
            child.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted("the run that was training has ended too")
    return child.returncode


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _refuse_what_cannot_run(recipe: str, overrides: Sequence[str], placements: dict[str, list[str]]) -> None:
    """Before the first run starts, for a recipe may set keys that belong to one of the placements only."""
    problems: list[str] = []
    for name, placement in placements.items():
        try:
            config = load_config([recipe], [*overrides, *placement]).config
            found = find_problems(config, build_plan(config))
        except RolepoolError as error:
            found = list(error.problems)
        problems += [f"{recipe} under {name}: {problem}" for problem in found]
    if problems:
        raise ConfigError([*problems, f"keys of one placement go after `--` with it, and not into {recipe}"])


def _free_folder(wanted: Path) -> Path:
    """A new folder of that name, or of the next one that is free: no run is mixed with an earlier one."""
    names = chain([wanted.name], (f"{wanted.name}_{number}" for number in count(2)))
    folder = next(folder for folder in map(wanted.with_name, names) if not folder.exists())
    folder.mkdir(parents=True)
    return folder
