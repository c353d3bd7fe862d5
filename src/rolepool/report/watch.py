"""A run in the terminal while it trains in another one, or after it has ended.

Reads what was added to the run folder's files, and of long files the end only. A step's spans are written when it
ends, so the operations shown are the last ones of each rank that are written down, with the step they belong to.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rolepool.errors import ConfigError
from rolepool.metrics.analysis import Recorded, Timeline, step_bounds, step_metrics
from rolepool.metrics.spans import Span
from rolepool.metrics.sparkline import sparkline
from rolepool.report.colors import colors_for
from rolepool.report.findings import value_at

LAST_STEPS = 5
LAST_BYTES = 2**20
"""How much of the end of a long file is read at first."""
MAX_RANKS = 8
"""Ranks of one pool that are shown."""
SILENT_S = 30.0


def watch(folder: str | Path, *, once: bool) -> None:
    """Show a run until it ends or Ctrl-C; one frame where `once` is set or the output is no terminal."""
    watched = Watched(Path(folder))
    console = Console(highlight=False)
    watched.update()
    if once or not console.is_terminal:
        console.print(watched.frame())
        return
    try:
        with Live(watched.frame(), console=console, auto_refresh=False) as live:
            while not watched.is_finished:
                time.sleep(1.0)
                watched.update()
                live.update(watched.frame(), refresh=True)
    except KeyboardInterrupt:
        pass


class Tail:
    """The objects of a JSONL file as lines are added; from its start again when a resumed run wrote it anew."""

    def __init__(self, path: Path, last_bytes: float = math.inf) -> None:
        self.path = path
        self.last_bytes = last_bytes
        self.inode = self.offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """What was added since the last time. A line that cannot be read is left out."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.inode, self.offset = status.st_ino, int(max(0, status.st_size - self.last_bytes))
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the rest is still being written
        self.offset += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


class Watched:
    """A run folder and what was read of it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{folder}: is no run folder, it has no readable config.yaml; give one") from error
        self._rows, self._spans = Tail(folder / "metrics.jsonl"), Tail(folder / "spans.jsonl", LAST_BYTES)
        self._monitor = Tail(folder / "monitor.jsonl", LAST_BYTES)
        self.step = 0
        self.rewards: dict[int, float] = {}
        self.step_times: dict[int, float] = {}
        self.spans: list[Recorded] = []
        self.samples: dict[str, dict[str, Any]] = {}

    def update(self) -> None:
        """Read what was added."""
        for row in self._rows.read():
            self.step = int(row.get("step", 0))
            if "timing_s/step" in row:
                self.step_times[self.step] = row["timing_s/step"]
                self.rewards[self.step] = row.get("critic/score/mean", math.nan)
        for line in self._spans.read():
            try:
                self.spans.append(Recorded(line.pop("step"), line.pop("operation"), Span(**line)))
            except (KeyError, TypeError):
                continue
        newest = max((recorded.step for recorded in self.spans), default=0)
        self.spans = [recorded for recorded in self.spans if newest - LAST_STEPS <= recorded.step <= newest]
        for sample in self._monitor.read():
            self.samples[str(sample.get("node"))] = sample

    @property
    def num_steps(self) -> int | None:
        """How many steps the run will do, where the config says so."""
        found: int | None = value_at(self.config, "trainer.total_training_steps")
        return found

    @property
    def is_finished(self) -> bool:
        return self.num_steps is not None and self.step >= self.num_steps

    def frame(self) -> RenderableType:
        """What is shown now."""
        rewards = [reward for reward in self.rewards.values() if math.isfinite(reward)]
        curve = (
            f"reward  {sparkline(rewards)}  {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else "reward  none yet"
        )
        return Group(self._headline(), self._lanes(), Text(curve))

    def _headline(self) -> Text:
        last = list(self.step_times.values())[-10:]
        of_all = f"/{self.num_steps}" if self.num_steps is not None else ""
        words = [f"{self.folder.name}  step {self.step}{of_all}"]
        if last:
            words.append(f"{last[-1]:.3g} s a step")
        if self.is_finished:
            words.append("finished")
        elif last and self.num_steps is not None:
            left_s = (self.num_steps - self.step) * statistics.fmean(last)
            words.append(f"about {time.strftime('%H:%M:%S', time.gmtime(left_s))} left")
        files = [tail.path for tail in (self._rows, self._spans, self._monitor) if tail.path.exists()]
        silent_s = time.time() - max((path.stat().st_mtime for path in files), default=time.time())
        if not self.is_finished and silent_s > max(SILENT_S, *last):
            words.append(f"nothing written for {silent_s:.0f} s")
        return Text("  ·  ".join(words), style="bold")

    def _lanes(self) -> Table:
        newest = {}
        for recorded in sorted(self.spans, key=lambda recorded: recorded.span.end_s):
            newest[recorded.span.pool, recorded.span.rank] = recorded
        table = Table(
            "pool", "rank", f"busy, last {LAST_STEPS} steps", "last operation", "step", "took", "monitor", box=None
        )
        busy, seen, colors = self._busy(), self._utilization(), colors_for({one.operation for one in self.spans})
        for (pool, rank), (step, operation, span) in sorted(newest.items()):
            if rank >= MAX_RANKS:
                continue
            is_first = rank == 0
            fraction = busy.get(pool, 0.0)
            table.add_row(
                escape(pool) if is_first else "",
                str(rank),
                f"{'█' * round(10 * fraction):<10} {fraction:.0%}" if is_first else "",
                Text(operation, style=colors[operation]),
                str(step),
                f"{span.duration_s:.3g} s",
                seen.get(pool, "") if is_first else "",
            )
            if rank == MAX_RANKS - 1 and (pool, MAX_RANKS) in newest:
                table.add_row("", f"... {sum(other == pool for other, _ in newest) - MAX_RANKS} more ranks")
        return table

    def _busy(self) -> dict[str, float]:
        """Busy fraction of each pool in the last whole steps."""
        bounds = sorted(step_bounds(self.spans).items())[-LAST_STEPS:]
        if not bounds:
            return {}
        found = step_metrics(Timeline(self.spans), bounds[0][1][0], bounds[-1][1][1])
        return {
            name.removeprefix("pool/").removesuffix("/busy_fraction"): value
            for name, value in found.items()
            if name.endswith("/busy_fraction")
        }

    def _utilization(self) -> dict[str, str]:
        """Mean utilization and most memory of each pool's GPUs, as the monitor saw them last."""
        gpus = [gpu for sample in self.samples.values() for gpu in sample.get("gpus", ())]
        words = {}
        for pool in {pool for gpu in gpus for pool in gpu.get("pools", ())}:
            mine = [gpu for gpu in gpus if pool in gpu["pools"]]
            used = max(gpu["memory_bytes"] for gpu in mine) / 2**30
            words[pool] = f"{statistics.fmean(gpu['utilization'] for gpu in mine):.0f}% {used:.1f} GiB"
        return words
