"""Train with two commits and compare every number that they log, bit for bit, except times and
memory.

    python benchmarks/compare_commits.py HEAD~1 HEAD
    python benchmarks/compare_commits.py main . --cases demo,killed

A commit may be anything that git knows; `.` is the working tree as it is. Both sides run one after
another on this machine, in the same Python environment, each with its own `src`. The cases:

    demo, demo_split, demo_tools, demo_reward_model   the recipes, for a few steps
    resumed    demo_split stops after half of the steps, and the same command resumes it
    moved      demo_split moves to one pool while it trains
    killed     a worker process of demo_split is killed while it trains

In `moved` and `killed` the step at which it happens differs from run to run. The numbers do not,
because each pool has one rank under both placements, so sums are added in the same order.

Prints one line for each case. The exit code is 1 if a number differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("timing_", "perf/", "pool/", "overlap/", "memory/")
"""Names of metrics that begin like this are times or memory."""
NUM_STEPS = 8
SCHEDULE = [
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.test_freq=4",
    "trainer.save_freq=4",
]
ONE_POOL = [
    "placement.strategy=custom",
    "placement.pools={together:[1]}",
    "placement.roles={actor:together,rollout:together,critic:together}",
]
TIMEOUT_S = 600.0
STRUCK_AFTER_STEP = 2
"""A move is asked for, or a process killed, once this step has been logged."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """One of the two commits, as a folder with its source."""

    name: str
    source: Path

    def start(self, folder: Path, *words: str) -> subprocess.Popen[str]:
        """Start `rolepool` with these words in this folder."""
        environment = {**os.environ, "PYTHONPATH": str(self.source / "src")}
        with (folder / "output.txt").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "rolepool", *words],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, folder: Path, *words: str) -> None:
        """Run `rolepool` to its end."""
        finish(self.start(folder, *words), folder)


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a command that must succeed."""
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(
            f"error: no end within {TIMEOUT_S:.0f} s; see {folder / 'output.txt'}"
        ) from None
    if code != 0:
        tail = (folder / "output.txt").read_text()[-2000:]
        raise SystemExit(f"error: exit code {code}:\n{tail}")


def train_recipe(recipe: str) -> Callable[[Side, Path], Path]:
    """A case that trains a recipe, undisturbed."""

    def run(side: Side, folder: Path) -> Path:
        side.run(folder, "train", recipe, *SCHEDULE)
        return folder / "runs" / recipe

    return run


def train_resumed(side: Side, folder: Path) -> Path:
    words = ["train", "demo_split", *SCHEDULE, "trainer.resume_mode=auto"]
    side.run(folder, *words, f"trainer.total_training_steps={NUM_STEPS // 2}")
    side.run(folder, *words)
    return folder / "runs" / "demo_split"


def train_moved(side: Side, folder: Path) -> Path:
    run = folder / "runs" / "demo_split"
    # A move takes longer than eight steps, and a run that has ended cannot move.
    words = ["trainer.total_training_steps=60", "trainer.test_freq=30", "trainer.save_freq=-1"]
    process = side.start(folder, "train", "demo_split", *words)
    wait_for_step(process, run, folder)
    side.run(folder, "move", str(run), *ONE_POOL)
    finish(process, folder)
    return run


def train_killed(side: Side, folder: Path) -> Path:
    run = folder / "runs" / "demo_split"
    process = side.start(folder, "train", "demo_split", *SCHEDULE)
    wait_for_step(process, run, folder)
    largest_worker(process.pid).kill()
    finish(process, folder)
    if not any("restart" in row for row in read_rows(run)):
        raise SystemExit("error: the run ended before its process was killed")
    return run


def wait_for_step(process: subprocess.Popen[str], run: Path, folder: Path) -> None:
    """Wait until the run has logged `STRUCK_AFTER_STEP`."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if any(row.get("step", 0) >= STRUCK_AFTER_STEP for row in read_rows(run)):
            return
        time.sleep(0.05)
    process.kill()
    raise SystemExit(
        f"error: step {STRUCK_AFTER_STEP} was not reached; see {folder / 'output.txt'}"
    )


def largest_worker(driver: int) -> psutil.Process:
    """The process with the most memory below the driver: a worker with models."""
    sizes: dict[psutil.Process, int] = {}
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes[process] = process.memory_info().rss
    return max(sizes, key=lambda process: sizes[process])


def read_rows(run: Path) -> Rows:
    """The whole rows of a run so far."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def compared_rows(run: Path) -> Rows:
    """The rows without what is measured, and without those that tell of a restart or a move."""
    found: Rows = []
    for row in read_rows(run):
        kept = {name: value for name, value in row.items() if not name.startswith(MEASURED)}
        if "restart" not in kept and "move" not in kept and len(kept) > 1:
            found.append(kept)
    return found


CASES: dict[str, Callable[[Side, Path], Path]] = {
    "demo": train_recipe("demo"),
    "demo_split": train_recipe("demo_split"),
    "demo_tools": train_recipe("demo_tools"),
    "demo_reward_model": train_recipe("demo_reward_model"),
    "resumed": train_resumed,
    "moved": train_moved,
    "killed": train_killed,
}


def describe_difference(before: Rows, after: Rows) -> str | None:
    """What differs first, or None. A number that only the later commit logs is no difference."""
    for old, new in zip(before, after, strict=False):
        for name in old:
            if old.get(name) != new.get(name):
                return f"step {old['step']}: {name}: {old.get(name)} became {new.get(name)}"
    if len(before) != len(after):
        return f"{len(before)} rows became {len(after)}"
    return None


def added_names(before: Rows, after: Rows) -> list[str]:
    """The numbers that only the later commit logs."""
    known = {name for row in before for name in row}
    return sorted({name for row in after for name in row} - known)


@contextlib.contextmanager
def checked_out(commit: str, parent: Path) -> Iterator[Side]:
    """The source of a commit, in a folder of its own that is removed at the end."""
    if commit == ".":
        yield Side("working tree", ROOT)
        return
    folder = parent / f"commit_{len(list(parent.iterdir()))}"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield Side(commit, folder)
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare(case: str, sides: list[Side], parent: Path) -> bool:
    """Run a case on both sides and print a line. Returns whether all numbers are equal."""
    rows: list[Rows] = []
    began_s = time.monotonic()
    for index, side in enumerate(sides):
        folder = parent / f"{case}_{index}"
        folder.mkdir()
        rows.append(compared_rows(CASES[case](side, folder)))
    difference = describe_difference(*rows)
    num_values = sum(len(row) for row in rows[0])
    result = difference or f"equal: {len(rows[0])} rows, {num_values} values"
    if names := added_names(*rows):
        result += f"; new: {', '.join(names)}"
    print(f"{case:<18} {time.monotonic() - began_s:>6.0f} s  {result}", flush=True)
    return difference is None and num_values > 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument(
        "after", nargs="?", default=".", help="another one; default: the working tree"
    )
    parser.add_argument("--cases", default=",".join(CASES), help=f"default: {','.join(CASES)}")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        print(f"error: --cases {unknown[0]}: is none of {', '.join(CASES)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        parent = Path(name)
        (parent / "sources").mkdir()
        commits = (arguments.before, arguments.after)
        sides = [stack.enter_context(checked_out(commit, parent / "sources")) for commit in commits]
        are_equal = [compare(case, sides, parent) for case in cases]
    return 0 if all(are_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
