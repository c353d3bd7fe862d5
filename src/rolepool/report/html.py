"""`report.html`: a run on one page that needs nothing else, neither files nor network.

Owns what is on the page and how much of it: long runs are binned, and the timeline holds whole steps up to a number of
spans, so that a page opens at once however long the run. The page itself is `template.html`; it gets one JSON object.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rolepool.config.loading import show
from rolepool.config.schema import all_keys
from rolepool.errors import explained
from rolepool.metrics.analysis import Timeline, lanes, step_bounds
from rolepool.metrics.run_folder import write_whole
from rolepool.metrics.sampling import pool_use
from rolepool.report.colors import SERIES_COLORS, WAIT_COLORS, colors_for, in_step_order
from rolepool.report.findings import find
from rolepool.report.run import Rows, Run, value_at
from rolepool.report.summary import ByStep, around, by_step, summarise

MAX_POINTS = 500
MAX_SPANS = 20_000
MAX_STEPS_SHOWN = 12
"""In the timeline, of a run with more than `MAX_SPANS` spans."""

CURVES = {
    "Reward": ("critic/score/mean", "critic/rewards/mean", "val-core/*"),
    "KL": ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    "Response length (tokens)": ("response_length/mean", "response_length/max"),
    "Loss": ("actor/pg_loss", "critic/vf_loss"),
    "Entropy": ("actor/entropy",),
    "Tokens per second and GPU": ("perf/throughput",),
}

Bounds = Mapping[int, tuple[float, float]]


def write_report(run: Run, path: str | Path) -> Path:
    """Write the page of a run. An older one stays until the new one is whole."""
    page = render(run)
    with explained(f"report {path}: cannot be written", "give another file with -o"):
        return write_whole(Path(path), [page])


def render(run: Run) -> str:
    """The page. With `<` escaped, no text in the data can end the script element or open a comment."""
    template = resources.files("rolepool.report").joinpath("template.html").read_text(encoding="utf-8")
    data = json.dumps(_plain(page_data(run)), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", data)


def _plain(value: Any) -> Any:
    """What JSON holds: no number (a diverged loss) becomes null, and figures lose the digits that nobody can see."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def page_data(run: Run) -> dict[str, Any]:
    """Everything on the page."""
    grouped, bounds = by_step(run.spans), step_bounds(run.spans)
    summary = summarise(grouped, bounds)
    operations = in_step_order({recorded.operation for recorded in run.spans} | {*_timings(run.rows)})
    path = sorted(summary.path_s.items(), key=lambda item: -item[1])
    return {
        "name": run.name,
        "skipped": [f"skipped {count} unreadable lines of {file}" for file, count in run.skipped.items()],
        "operations": operations,
        "colors": colors_for(operations),
        "wait_colors": WAIT_COLORS,
        "series_colors": SERIES_COLORS,
        "num_steps": len(bounds),
        "num_averaged": len(summary.steps),
        "step_s": summary.step_s,
        "findings": [vars(finding) for finding in find(run, summary, grouped)],
        "pools": [
            {
                "pool": name,
                "num_ranks": use.num_ranks,
                "busy_s": use.busy_s,
                "waits_s": [(*waited_for, seconds) for waited_for, seconds in use.waits_s.items()],
            }
            for name, use in summary.pools.items()
        ],
        "path": [(pool, operation, seconds) for (pool, operation), seconds in path],
        "timeline": _timeline(grouped, bounds, operations),
        "breakdown": _breakdown(run.rows),
        "usage": _monitored(run.monitor),
        "curves": _curves(run.rows),
        "plan": [
            (name, ", ".join(pool.roles), " ".join(f"{slot.node}:{slot.gpu}" for slot in pool.slots), show(pool.share))
            for name, pool in (run.plan.pools.items() if run.plan is not None else ())
        ],
        "config": _changed_config(run.config),
    }


def _changed_config(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of what differs; `${...}` in a default stands for the value of another key."""
    changed = []
    for path, key in all_keys().items():
        value, default = value_at(config, path), key.default
        if isinstance(default, str):
            whole = re.fullmatch(r"\$\{([^}]+)\}", default)
            default = re.sub(r"\$\{([^}]+)\}", lambda match: str(value_at(config, match[1])), default)
            default = value_at(config, whole[1]) if whole else default
        if value != default:
            changed.append((path, show(value), show(default)))
    return changed


# Binned over steps or time


def _binned(points: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """At most `MAX_POINTS` points: the mean x of each, and the least, mean and most y."""
    if not points:
        return {"x": [], "min": [], "mean": [], "max": []}
    x, y = np.asarray(points, dtype=float).T
    starts = np.unique(np.linspace(0, len(x), min(len(x), MAX_POINTS), endpoint=False).astype(int))
    sizes = np.diff([*starts, len(x)])
    found = {
        "x": np.add.reduceat(x, starts) / sizes,
        "min": np.minimum.reduceat(y, starts),
        "mean": np.add.reduceat(y, starts) / sizes,
        "max": np.maximum.reduceat(y, starts),
    }
    return {name: values.tolist() for name, values in found.items()}


def _chart(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    lines = [{"name": name, **_binned(points)} for name, points in series.items()]
    return {"title": title, "x_label": x_label, "series": lines}


def _curves(rows: Rows) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in rows.values() for name in row)
    charts = []
    for title, patterns in CURVES.items():
        wanted = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        series = {name: [(step, row[name]) for step, row in rows.items() if name in row] for name in wanted}
        charts.append(_chart(title, "step", series))
    return [chart for chart in charts if chart["series"]]


def _timings(rows: Rows) -> list[str]:
    """The operations that rows have a time of."""
    names = {name.removeprefix("timing_s/") for row in rows.values() for name in row if name.startswith("timing_s/")}
    return in_step_order(names - {"step"})


def _breakdown(rows: Rows) -> dict[str, Any]:
    """Seconds of each operation a step, and of the step. Operations that overlap add up to more than it."""
    steps = {step: row for step, row in rows.items() if "timing_s/step" in row}
    bars = {
        name: _binned([(step, row.get(f"timing_s/{name}", 0.0)) for step, row in steps.items()])["mean"]
        for name in _timings(steps)
    }
    return {"operations": bars, "step": _binned([(step, row["timing_s/step"]) for step, row in steps.items()])}


def _monitored(monitor: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Utilization and memory of pools over time."""
    utilization: dict[str, list[tuple[float, float]]] = defaultdict(list)
    memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in monitor:
        time_s = sample["time_s"] - monitor[0]["time_s"]
        for pool, (percent, gib) in pool_use(sample).items():
            utilization[pool].append((time_s, percent))
            memory[pool].append((time_s, gib))
    titles = ("Utilization (%), mean of a pool's ranks", "Memory (GiB), most of a pool's ranks")
    charts = [_chart(title, "seconds", series) for title, series in zip(titles, (utilization, memory), strict=True)]
    return charts if utilization else []


# Timeline


def _timeline(grouped: ByStep, bounds: Bounds, operations: Sequence[str]) -> dict[str, Any]:
    """Windows of steps that follow each other; one window where all steps are shown."""
    chosen = _choose_steps(grouped, bounds)
    windows: list[list[int]] = []
    for step in sorted(chosen):
        if not windows or step != windows[-1][-1] + 1:
            windows.append([])
        windows[-1].append(step)
    shown = []
    for steps in windows:
        first, last = steps[0], steps[-1]
        why = ", ".join(dict.fromkeys(chosen[step] for step in steps))
        label = f"step {first} ({why})" if first == last else f"steps {first} to {last} ({why})"
        starts = [(step, bounds[step][0] - bounds[first][0]) for step in steps]
        window = _window(around(grouped, first, last), bounds[first][0], bounds[last][1], operations)
        shown.append({"label": label, "starts": starts, **window})
    return {"windows": shown, "num_shown": len(chosen)}


def _choose_steps(grouped: ByStep, bounds: Bounds) -> dict[int, str]:
    """The steps to show, and why each: all, or the slowest, the median one, and as many first and last as fit."""
    steps = sorted(bounds)
    if sum(len(grouped[step]) for step in steps) <= MAX_SPANS:
        return dict.fromkeys(steps, "all")
    by_length = sorted(steps, key=lambda step: bounds[step][1] - bounds[step][0])
    wanted = [(steps[0], "first"), (by_length[-1], "slowest"), (by_length[len(steps) // 2], "median")]
    for first, last in zip(steps, reversed(steps), strict=True):
        wanted += [(last, "last"), (first, "first")]
    chosen: dict[int, str] = {}
    room = MAX_SPANS
    for step, why in wanted[: 2 * MAX_STEPS_SHOWN]:
        if step not in chosen and (room >= len(grouped[step]) or not chosen) and len(chosen) < MAX_STEPS_SHOWN:
            chosen[step] = why
            room -= len(grouped[step])
    return chosen


def _window(spans: Timeline, start_s: float, end_s: float, operations: Sequence[str]) -> dict[str, Any]:
    """Lanes with spans and waits, times from the start. Spans are whole where the window cuts them; lanes are left out
    when one step alone has too many spans."""
    boxes: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
    for step, operation, span in spans:
        if span.end_s > start_s and span.start_s < end_s:
            times = (span.start_s - start_s, span.duration_s)
            counts = (span.num_rows, span.num_tokens, span.peak_memory_bytes)
            boxes[span.pool, span.rank].append((operations.index(operation), step, *times, *counts, span.parts))
    all_lanes = lanes(spans, start_s, end_s)
    shown: list[dict[str, Any]] = []
    num_spans = 0
    for lane in all_lanes:
        num_spans += len(boxes[lane.pool, lane.rank])
        if shown and num_spans > MAX_SPANS:
            break
        waits = [(*wait[:3], wait.start_s - start_s, wait.end_s - wait.start_s) for wait in lane.waits]
        shown.append({"pool": lane.pool, "rank": lane.rank, "spans": boxes[lane.pool, lane.rank], "waits": waits})
    return {"seconds": end_s - start_s, "lanes": shown, "left_out": len(all_lanes) - len(shown)}
