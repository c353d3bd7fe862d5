"""A run in the terminal while it trains in another one, or after it has ended.

Reads what was added to the run folder's files, and of long files the end only. A step's spans are written when it
ends, so the operations shown are the last ones of each rank that are written down, with the step they belong to.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from pathlib import Path

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rolepool.errors import ConfigError
from rolepool.metrics.analysis import Recorded, Timeline, step_bounds, step_metrics
from rolepool.metrics.run_folder import sparkline
from rolepool.metrics.sampling import pool_use
from rolepool.report.colors import colors_for
from rolepool.report.run import Lines, read_moment, read_row, read_span, value_at

LAST_STEPS = 5
LAST_BYTES = 2**21
"""How much of the end of a long file is read at first."""
MAX_RANKS = 8
"""Ranks of one pool that are shown."""
SILENT_S = 30.0


def watch(folder: str | Path, *, once: bool) -> None:
    """Show a run until it ends or Ctrl-C; one frame where `once` is set or the output is no terminal."""
    watched = Watched(Path(folder))
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(watched.frame())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(watched.frame(), console=console, auto_refresh=False) as live:
        while not watched.is_finished:
            time.sleep(1.0)
            watched.update()
            live.update(watched.frame(), refresh=True)


class Watched:
    """A run folder and what was read of it so far."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{folder}: has no config.yaml that can be read; give the folder of a run") from error
        wanted = value_at(config, "trainer.total_training_steps")
        self.num_steps: int | None = wanted if isinstance(wanted, int) else None
        """How many steps the run will do, where the config says so, or else once there is a row."""
        self.validates_only = value_at(config, "trainer.val_only") is True
        self.has_validated = False
        self.rows = Lines(folder / "metrics.jsonl", read_row)
        self.lines = Lines(folder / "spans.jsonl", read_span, LAST_BYTES)
        self.monitor = Lines(folder / "monitor.jsonl", read_moment, LAST_BYTES)
        self.rewards: dict[int, float] = {}
        self.step_times: dict[int, float] = {}
        self.spans: list[Recorded] = []
        self.utilization: dict[str, str] = {}
        self.update()

    def update(self) -> None:
        """Read what was added."""
        for step, row in self.rows.new():
            if "timing_s/step" in row:
                self.step_times[step] = row["timing_s/step"]
            if "critic/score/mean" in row:
                self.rewards[step] = row["critic/score/mean"]
            if math.isfinite(num_steps := row.get("training/num_steps", math.nan)):
                self.num_steps = int(num_steps)
            self.has_validated |= "timing_s/testing" in row
        self.spans += self.lines.new()
        newest = max((recorded.step for recorded in self.spans), default=0)
        self.spans = [recorded for recorded in self.spans if recorded.step > newest - LAST_STEPS]
        for sample in self.monitor.new():
            for pool, (percent, gib) in pool_use(sample).items():
                self.utilization[pool] = f"{percent:.0f}%, {gib:.1f} GiB"

    @property
    def step(self) -> int:
        return max(self.step_times, default=0)

    @property
    def is_finished(self) -> bool:
        if self.validates_only:
            return self.has_validated
        return self.num_steps is not None and self.step >= self.num_steps

    def frame(self) -> Group:
        """What is shown now."""
        rewards = [reward for reward in self.rewards.values() if math.isfinite(reward)]
        curve = (
            f"reward {sparkline(rewards, width=50)} {rewards[0]:.3f} -> {rewards[-1]:.3f}"
            if rewards
            else "no reward yet"
        )
        return Group(Text(self._headline(), style="bold"), self._lanes(), Text(curve))

    def _headline(self) -> str:
        last = list(self.step_times.values())[-10:]
        words = [f"{self.name}: step {self.step}" + (f" of {self.num_steps}" if self.num_steps is not None else "")]
        if last:
            words.append(f"{last[-1]:.3g} s a step")
        if last and self.num_steps is not None and not self.is_finished:
            left_s = round((self.num_steps - self.step) * statistics.fmean(last))
            words.append(f"about {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left")
        written = [tail.path.stat().st_mtime for tail in (self.rows, self.lines, self.monitor) if tail.path.exists()]
        silent_s = time.time() - max(written, default=time.time())
        if self.is_finished:
            words.append("finished")
        elif silent_s > max(SILENT_S, *last, 0):
            words.append(f"nothing written for {silent_s:.0f} s")
        return ", ".join(words)

    def _lanes(self) -> Table:
        """The last operation of each rank; what is said of a pool stands in its first line."""
        newest: dict[str, dict[int, Recorded]] = {}
        for recorded in sorted(self.spans, key=lambda recorded: recorded.span.end_s):
            newest.setdefault(recorded.span.pool, {})[recorded.span.rank] = recorded
        table = Table(
            "pool", "rank", "busy", "utilization", "last operation", "step", "took", box=None, padding=(0, 1, 0, 0)
        )
        colors, busy = colors_for({recorded.operation for recorded in self.spans}), self._busy()
        for pool, ranks in sorted(newest.items()):
            of_pool = [pool, f"{busy[pool]:.0%}" if pool in busy else "", self.utilization.get(pool, "")]
            for rank, (step, operation, span) in sorted(ranks.items())[:MAX_RANKS]:
                name, fraction, used = map(Text, of_pool)
                last = Text(operation, style=colors[operation])
                table.add_row(name, str(rank), fraction, used, last, str(step), f"{span.duration_s:.3g} s")
                of_pool = ["", "", ""]
            if len(ranks) > MAX_RANKS:
                table.add_row("", f"and {len(ranks) - MAX_RANKS} more")
        return table

    def _busy(self) -> dict[str, float]:
        """Busy fraction of each pool in the last steps."""
        bounds = step_bounds(self.spans)
        if not bounds:
            return {}
        start_s, end_s = min(start for start, _ in bounds.values()), max(end for _, end in bounds.values())
        found = step_metrics(Timeline(self.spans), start_s, end_s).items()
        return {name.split("/", 1)[1].rsplit("/", 1)[0]: each for name, each in found if name.endswith("busy_fraction")}
