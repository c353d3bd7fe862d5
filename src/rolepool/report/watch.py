"""A run in the terminal, while it trains in another terminal or after it has ended.

Reads only what was added to the files of the run folder, and only the end of long files. A step's spans are written
when the step ends, so the view shows the last recorded operation of each rank, with its step.
"""

import contextlib
import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rolepool.metrics.run_folder import sparkline
from rolepool.metrics.sampling import pool_use
from rolepool.report.plots import colors_for
from rolepool.report.run import finite_values, read_run, value_at

LAST_STEPS = 5
"""Steps over which a pool's busy fraction is averaged."""
LAST_BYTES = 2**21
"""How much of the end of a long file is read at first."""
MAX_RANKS = 8
"""Ranks shown for each pool."""
SILENT_S = 30.0


def watch(folder: str | Path, *, once: bool) -> None:
    """Show a run until it ends or Ctrl-C. Prints one frame if `once` is set or the output is not a terminal."""
    watched = WatchedRun(folder)
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(watched.frame())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(watched.frame(), console=console, auto_refresh=False) as live:
        while not watched.is_finished:
            time.sleep(1.0)
            watched.update()
            live.update(watched.frame(), refresh=True)


class WatchedRun:
    """A run folder and what was read from it so far."""

    def __init__(self, folder: str | Path) -> None:
        self._run = read_run(folder, LAST_BYTES)
        self._utilization: dict[str, str] = {}
        self.update()

    def update(self) -> None:
        """Read what was added, and keep the last span of each rank."""
        self._run.read_new()
        self._run.spans.sort(key=lambda recorded: recorded.span.end_s)
        self._last_spans = {(recorded.span.pool, recorded.span.rank): recorded for recorded in self._run.spans}
        self._run.spans = [*self._last_spans.values()]
        for sample in self._run.monitor:
            for pool, (percent, gib) in pool_use(sample).items():
                self._utilization[pool] = f"{percent:.0f}%, {gib:.1f} GiB"
        self._run.monitor.clear()

    def _values(self, name: str) -> list[float]:
        return list(finite_values(self._run.metrics, name).values())

    @property
    def step(self) -> int:
        """The last step that has ended."""
        return max((step for step, row in self._run.metrics.items() if "timing_s/step" in row), default=0)

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run, from its last row, or from the config; None if it is unknown."""
        if rows := self._values("training/num_steps"):
            return int(rows[-1])
        from_config = value_at(self._run.config, "trainer.total_training_steps")
        return from_config if isinstance(from_config, int) else None

    @property
    def is_finished(self) -> bool:
        if value_at(self._run.config, "trainer.val_only") is True:
            return any("timing_s/testing" in row for row in self._run.metrics.values())
        return self.num_steps is not None and self.step >= self.num_steps

    def frame(self) -> Group:
        """What to show now."""
        last = self._values("timing_s/step")[-10:]
        of_steps = f" of {self.num_steps}" if self.num_steps is not None else ""
        words = [f"{self._run.name}: step {self.step}{of_steps}"]
        if last:
            words.append(f"{last[-1]:.3g} s per step")
        if last and self.num_steps is not None and not self.is_finished:
            words.append(f"about {timedelta(seconds=round((self.num_steps - self.step) * fmean(last)))} left")
        written_s = max((file.stat().st_mtime for file in self._run.folder.glob("*.jsonl")), default=time.time())
        silent_s = time.time() - written_s
        if self.is_finished:
            words.append("finished")
        elif silent_s > max(SILENT_S, *last, 0):
            words.append(f"nothing written for {silent_s:.0f} s")
        curve = "no reward yet"
        if rewards := self._values("critic/score/mean"):
            curve = f"reward {sparkline(rewards, width=50)} {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        return Group(Text(", ".join(words), style="bold"), self._table(), Text(curve))

    def _table(self) -> Table:
        """A line for each rank with its last operation. What concerns the pool is only in the pool's first line."""
        columns = ("pool", "rank", "busy", "utilization", "last operation", "step", "took")
        table = Table(*columns, box=None, padding=(0, 1, 0, 0))
        colors = colors_for({recorded.operation for recorded in self._last_spans.values()})
        for pool in sorted({pool for pool, _ in self._last_spans}):
            ranks = sorted(rank for name, rank in self._last_spans if name == pool)
            busy = self._values(f"pool/{pool}/busy_fraction")[-LAST_STEPS:]
            pool_cells = [pool, f"{fmean(busy):.0%}" if busy else "", self._utilization.get(pool, "")]
            for rank in ranks[:MAX_RANKS]:
                step, operation, span = self._last_spans[pool, rank]
                name, fraction, used = map(Text, pool_cells)
                last = Text(operation, style=colors[operation])
                table.add_row(name, str(rank), fraction, used, last, str(step), f"{span.duration_s:.3g} s")
                pool_cells = ["", "", ""]
            if len(ranks) > MAX_RANKS:
                table.add_row("", f"and {len(ranks) - MAX_RANKS} more")
        return table
