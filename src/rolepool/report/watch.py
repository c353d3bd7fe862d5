"""A run in the terminal, while it trains in another terminal or after it has ended.

Reads only the end of long files, and some of the earlier metrics. While the run trains, the view
shows what runs now, from `state.json`. Otherwise it shows the last step that was recorded, from its
spans.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter
from rich.console import Group
from rich.live import Live
from rich.text import Text

from rolepool.metrics.row_text import sparkline
from rolepool.metrics.run_folder import State
from rolepool.metrics.spans import step_bounds
from rolepool.metrics.timeline import Bar, first_rank_lanes
from rolepool.report.metrics_by_step import REWARD, finite_values
from rolepool.report.operations import colors_for
from rolepool.report.run import parts_of, read_run, sampled_lines
from rolepool.report.run_state import state_of
from rolepool.terminal import Terminal
from rolepool.units import duration, show_bytes

LAST_STEPS = 5
"""Steps over which a pool's busy fraction is averaged."""
LAST_BYTES = 2**20
"""How much of the end of spans and samples is read."""
SILENT_S = 30.0
"""A state that is older is not what runs now."""
SHORT_S = 3.0
"""Steps that are shorter cannot be followed, because `state.json` is written once per second."""
LANE_WIDTH = 78


def watch(folder: str | Path, *, once: bool) -> None:
    """Show a run until it ends or Ctrl-C. Prints one frame if `once` is set or the output is not a
    terminal."""
    watched, console = WatchedRun(folder), Terminal()
    if once or not console.is_terminal:
        console.print(watched.frame())
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(watched.frame(), console=console, auto_refresh=False) as live,
    ):
        while not watched.run.is_finished:
            time.sleep(1.0)
            watched = WatchedRun(folder)
            live.update(watched.frame(), refresh=True)


class WatchedRun:
    """A run as it is now."""

    def __init__(self, folder: str | Path) -> None:
        self.run = read_run(folder, LAST_BYTES, sampled_lines)
        self.current = parts_of(self.run)[-1]
        state = self.run.read_whole("state.json", TypeAdapter(State).validate_json)
        is_current = (
            state is not None and time.time() - state.time_s < SILENT_S and not self.run.is_finished
        )
        self.state = state if is_current else None

    def _recent(self, name: str) -> list[float]:
        """Values of the steps with the current placement."""
        return list(finite_values(self.current.metrics, name).values())

    def frame(self) -> Group:
        """What to show now."""
        last = self._recent("timing_s/step")[-10:]
        of_steps = f" of {self.run.num_steps}" if self.run.num_steps is not None else ""
        words = [
            f"{self.run.name}: {self.state.what if self.state else f'step {self.run.step}'}{of_steps}"
        ]
        if last:
            words.append(f"{duration(last[-1])} per step")
        if last and self.run.num_steps is not None and not self.run.is_finished:
            words.append(
                f"about {timedelta(seconds=round((self.run.num_steps - self.run.step) * fmean(last)))} left"
            )
        words += [f"{name}: {count}" for name, count in self.run.event_counts.items()]
        words.append(state_of(self.run, is_silent=self.state is None))
        curve = "no reward yet"
        if rewards := [*finite_values(self.run.metrics, REWARD).values()]:
            curve = f"reward {sparkline(rewards, width=50)} {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        is_followed = self.state and fmean(last or [SHORT_S]) >= SHORT_S
        lanes = (
            self._live_lanes(self.state, last)
            if self.state and is_followed
            else self._recorded_lanes()
        )
        return Group(Text(", ".join(words), style="bold"), *lanes, Text(curve))

    def _live_lanes(self, state: State, last: Sequence[float]) -> Iterator[Text]:
        """What each pool has done since the step began, on an axis as long as the last steps
        took."""
        since_s, now_s = state.since_s, time.time()
        axis_s = max(now_s - since_s, *last, 0)
        yield Text(
            f"{state.what}, running for {duration(now_s - since_s)}; a line is {duration(axis_s)}"
        )
        for pool, calls in state.pools.items():
            running = [
                f"{name} for {duration(now_s - start_s)}"
                for name, start_s, end_s in calls
                if end_s is None
            ]
            yield self._title(f"{pool}: {''.join(running) or 'waiting'}", pool)
            bars = [
                (name, start_s - since_s, (end_s or now_s) - since_s)
                for name, start_s, end_s in calls
            ]
            yield lane(bars, axis_s)

    def _recorded_lanes(self) -> Iterator[Text]:
        """The last step whose spans are recorded, if nothing runs, or if steps are too short to
        follow."""
        if bounds := step_bounds(self.current.spans):
            step, (start_s, end_s) = max(bounds.items())
            yield Text(f"step {step}, the last one recorded; a line is {duration(end_s - start_s)}")
            for pool, bars in first_rank_lanes(self.current.spans, start_s, end_s).items():
                yield self._title(pool, pool)
                yield lane(bars, end_s - start_s)

    def _title(self, words: str, pool: str) -> Text:
        """The words, how busy the pool was in the last steps, and its utilization and memory in the
        last one."""
        busy = self._recent(f"pool/{pool}/busy_fraction")[-LAST_STEPS:]
        more = [f"busy {fmean(busy):.0%}"] if busy else []
        more += [f"use {percent:.0f}%" for percent in self._recent(f"pool/{pool}/utilization")[-1:]]
        more += [
            show_bytes(gib * 2**30) for gib in self._recent(f"pool/{pool}/peak_memory_gb")[-1:]
        ]
        return Text(", ".join([words, *more]))


def lane(bars: Sequence[Bar], axis_s: float) -> Text:
    """Operations as a line of text. Each has at least one letter; dots are time without work."""
    cells_per_s = LANE_WIDTH / (axis_s or 1.0)
    cells: list[str] = []
    for operation, start_s, end_s in bars:
        first = int(max(start_s, 0) * cells_per_s)
        after = max(first + 1, round(end_s * cells_per_s))
        cells += ["."] * (first - len(cells))
        cells[first:] = [operation] * (after - first)
    colors = colors_for({operation for operation, _, _ in bars})
    text = Text(" ")
    for operation, group in groupby(cells):
        width = len(list(group))
        letters = (
            operation[: max(width - 1, 1)]
            .ljust(width - 1, "." if operation == "." else "=")
            .ljust(width)
        )
        text.append(letters, f"black on {colors[operation]}" if operation in colors else "dim")
    return text
