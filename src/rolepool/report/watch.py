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

RECENT_STEPS = 10
"""Steps whose times are used."""
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
    watched = WatchedRun(folder)
    console = Terminal()
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
        self.state = self._read_state()
        """What runs now; None if that is not known."""

    def _read_state(self) -> State | None:
        state = self.run.read_whole("state.json", TypeAdapter(State).validate_json)
        if state is None or self.run.is_finished:
            return None
        age_s = time.time() - state.time_s
        if age_s >= SILENT_S:
            return None
        return state

    def _recent(self, name: str) -> list[float]:
        """Values of the steps with the current placement."""
        return list(finite_values(self.current.metrics, name).values())

    def frame(self) -> Group:
        """What to show now."""
        times_s = self._recent("timing_s/step")[-RECENT_STEPS:]
        title = ", ".join(self._words(times_s))
        words = Text(title, style="bold")
        # Steps that are too short would have ended before the frame is read.
        can_be_followed = fmean(times_s or [SHORT_S]) >= SHORT_S
        if self.state is not None and can_be_followed:
            lanes = self._live_lanes(self.state, times_s)
        else:
            lanes = self._recorded_lanes()
        return Group(words, *lanes, Text(self._curve()))

    def _words(self, times_s: Sequence[float]) -> Iterator[str]:
        """How far the run is; `times_s` are the times of the last steps."""
        run = self.run
        progress = self.state.what if self.state else f"step {run.step}"
        if run.num_steps is not None:
            progress += f" of {run.num_steps}"
        yield f"{run.name}: {progress}"
        if times_s:
            yield f"{duration(times_s[-1])} per step"
        if times_s and run.num_steps is not None and not run.is_finished:
            num_left = run.num_steps - run.step
            left_s = round(num_left * fmean(times_s))
            yield f"about {timedelta(seconds=left_s)} left"
        for name, count in run.event_counts.items():
            yield f"{name}: {count}"
        yield state_of(run, is_silent=self.state is None)

    def _curve(self) -> str:
        rewards = list(finite_values(self.run.metrics, REWARD).values())
        if not rewards:
            return "no reward yet"
        bars = sparkline(rewards, width=50)
        return f"reward {bars} {rewards[0]:.3f} -> {rewards[-1]:.3f}"

    def _live_lanes(self, state: State, times_s: Sequence[float]) -> Iterator[Text]:
        """What each pool has done since the step began, on an axis as long as the last steps
        took."""
        since_s = state.since_s
        now_s = time.time()
        running_s = now_s - since_s
        axis_s = max(running_s, *times_s, 0)
        yield Text(f"{state.what}, running for {duration(running_s)}; a line is {duration(axis_s)}")
        for pool, calls in state.pools.items():
            running: list[str] = []
            bars: list[Bar] = []
            for name, start_s, end_s in calls:
                if end_s is None:
                    running.append(f"{name} for {duration(now_s - start_s)}")
                until_s = end_s or now_s
                bars.append((name, start_s - since_s, until_s - since_s))
            what = ", ".join(running) or "waiting"
            yield self._title(f"{pool}: {what}", pool)
            yield lane(bars, axis_s)

    def _recorded_lanes(self) -> Iterator[Text]:
        """The last step whose spans are recorded, if nothing runs, or if steps are too short to
        follow."""
        bounds = step_bounds(self.current.spans)
        if not bounds:
            return
        step = max(bounds)
        start_s, end_s = bounds[step]
        step_s = end_s - start_s
        yield Text(f"step {step}, the last one recorded; a line is {duration(step_s)}")
        lanes = first_rank_lanes(self.current.spans, start_s, end_s)
        for pool, bars in lanes.items():
            yield self._title(pool, pool)
            yield lane(bars, step_s)

    def _title(self, words: str, pool: str) -> Text:
        """The words, how busy the pool was in the last steps, and its utilization and memory in the
        last one."""
        parts = [words]
        busy = self._recent(f"pool/{pool}/busy_fraction")[-LAST_STEPS:]
        if busy:
            parts.append(f"busy {fmean(busy):.0%}")
        percents = self._recent(f"pool/{pool}/utilization")
        if percents:
            parts.append(f"use {percents[-1]:.0f}%")
        peaks_gib = self._recent(f"pool/{pool}/peak_memory_gb")
        if peaks_gib:
            parts.append(show_bytes(peaks_gib[-1] * 2**30))
        return Text(", ".join(parts))


def lane(bars: Sequence[Bar], axis_s: float) -> Text:
    """Operations as a line of text. Each has at least one letter; dots are time without work."""
    cells_per_s = LANE_WIDTH / (axis_s or 1.0)
    cells: list[str] = []
    for operation, start_s, end_s in bars:
        first = int(max(start_s, 0) * cells_per_s)
        after = max(first + 1, round(end_s * cells_per_s))
        num_idle = first - len(cells)
        num_busy = after - first
        cells += ["."] * num_idle
        cells[first:] = [operation] * num_busy

    colors = colors_for({operation for operation, _, _ in bars})
    text = Text(" ")
    for operation, group in groupby(cells):
        fill = "="
        style = "dim"
        if operation == ".":
            fill = "."
        if operation in colors:
            style = f"black on {colors[operation]}"
        width = len(list(group))
        # If there is room, the last cell stays empty, so that two operations do not touch.
        name = operation[: max(width - 1, 1)]
        letters = name.ljust(width - 1, fill).ljust(width)
        text.append(letters, style)
    return text
