"""`report.html`: a run on one page that needs nothing else, neither files nor network.

Owns what is on the page and how much of it: long runs are binned, and the timeline holds whole steps up to a number of
spans, so that a page opens at once however long the run. The page itself is `template.html`; it gets one JSON object.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rolepool.config.loading import show
from rolepool.config.schema import all_keys
from rolepool.metrics.analysis import Recorded, Timeline, lanes, step_bounds
from rolepool.report.colors import SERIES_COLORS, WAIT_COLORS, colors_for, in_step_order
from rolepool.report.findings import find, value_at
from rolepool.report.run import Run
from rolepool.report.summary import HAND_OVER, Summary, around, by_step, summarise

MAX_POINTS = 500
MAX_SPANS = 20_000
MAX_SELECTED_STEPS = 40

CURVES = {
    "Reward": ("critic/score/mean", "critic/rewards/mean", "val-core/"),
    "KL": ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    "Response length (tokens)": ("response_length/mean", "response_length/max"),
    "Loss": ("actor/pg_loss", "critic/vf_loss"),
    "Entropy": ("actor/entropy",),
    "Tokens per second and GPU": ("perf/throughput",),
}
"""Charts, and the metrics in them: names, or prefixes that end in a slash."""


def write_report(run: Run, path: str | Path) -> Path:
    """Write the page of a run. An older one stays until the new one is whole."""
    target = Path(path)
    temporary = target.with_name(f".tmp-{target.name}")
    temporary.write_text(render(run), encoding="utf-8")
    temporary.replace(target)
    return target


def render(run: Run) -> str:
    """The page. With `<` escaped, no text in the data can end the script element or open a comment."""
    template = resources.files("rolepool.report").joinpath("template.html").read_text(encoding="utf-8")
    data = json.dumps(_finite(page_data(run)), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", data)


def page_data(run: Run) -> dict[str, Any]:
    """Everything on the page."""
    grouped = by_step(run.spans)
    summary = summarise(run, grouped)
    operations = in_step_order({recorded.operation for recorded in run.spans})
    colors = colors_for(in_step_order({*operations, *_timings(run.rows)}))
    return {
        "name": run.name,
        "skipped": [f"skipped {count} unreadable lines of {file}" for file, count in run.skipped.items()],
        "colors": colors,
        "wait_colors": WAIT_COLORS,
        "series_colors": SERIES_COLORS,
        "num_steps": len(summary.step_times),
        "num_averaged": len(summary.steps),
        "step_s": summary.step_s,
        "findings": [asdict(finding) for finding in find(run, summary, grouped)],
        "plan": _plan(run),
        "config": _changed_config(run.config),
        "pools": [{"pool": name, **vars(use), "total_s": use.total_s} for name, use in summary.pools.items()],
        "path": _path(summary),
        "timeline": _timeline(grouped, step_bounds(run.spans), operations),
        "breakdown": _breakdown(run.rows),
        "usage": _monitored(run) or _from_spans(run, summary),
        "curves": _curves(run.rows),
    }


def _finite(value: Any) -> Any:
    """Plain JSON: what is no number (a diverged loss) becomes null, and figures lose digits that nobody can see."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _plan(run: Run) -> list[dict[str, str]]:
    pools = run.plan.pools if run.plan is not None else {}
    return [
        {
            "pool": name,
            "roles": ", ".join(pool.roles),
            "share": show(pool.share),
            "slots": "; ".join(
                f"node {node}: " + ",".join(str(slot.gpu) for slot in pool.slots if slot.node == node)
                for node in pool.counts_by_node
            ),
        }
        for name, pool in pools.items()
    ]


def _changed_config(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of what differs; a default that follows another key is that key's value."""

    def resolve(default: Any) -> Any:
        if not isinstance(default, str):
            return list(default) if isinstance(default, tuple) else default
        whole = re.fullmatch(r"\$\{([^}]+)\}", default)
        if whole:
            return value_at(config, whole[1])
        return re.sub(r"\$\{([^}]+)\}", lambda match: str(value_at(config, match[1])), default)

    pairs = [(path, value_at(config, path), resolve(key.default)) for path, key in all_keys().items()]
    return [(path, show(value), show(default)) for path, value, default in pairs if value != default]


def _path(summary: Summary) -> list[dict[str, Any]]:
    return [
        {"pool": pool, "operation": operation, "seconds": seconds, "share": seconds / summary.step_s}
        for (pool, operation), seconds in summary.path_s.items()
        if pool != HAND_OVER or seconds > 0
    ]


# Binned over steps or time


def _binned(x: Sequence[float], y: Sequence[float]) -> dict[str, list[float]]:
    """At most `MAX_POINTS` points: the mean x of each, and the least, mean and most y."""
    if not x:
        return {"x": [], "min": [], "mean": [], "max": []}
    starts = np.unique(np.linspace(0, len(x), min(len(x), MAX_POINTS), endpoint=False).astype(int))
    sizes = np.diff([*starts, len(x)])
    values = np.asarray(y, dtype=float)
    return {
        "x": (np.add.reduceat(np.asarray(x, dtype=float), starts) / sizes).tolist(),
        "min": np.minimum.reduceat(values, starts).tolist(),
        "mean": (np.add.reduceat(values, starts) / sizes).tolist(),
        "max": np.maximum.reduceat(values, starts).tolist(),
    }


def _series(rows: Iterable[Mapping[str, float]], name: str) -> dict[str, list[float]]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return _binned([step for step, _ in points], [value for _, value in points])


def _curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    charts = []
    for title, wanted in CURVES.items():
        found = [name for name in names if name in wanted or name.startswith(tuple(w for w in wanted if w[-1] == "/"))]
        if found:
            series = [{"name": name, **_series(rows, name)} for name in found]
            charts.append({"title": title, "x_label": "step", "series": series})
    return charts


def _timings(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The operations that rows have a time of."""
    names = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")}
    return in_step_order(names - {"step"})


def _breakdown(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Seconds of each operation a step, and of the step. Operations that overlap add up to more than it."""
    merged: dict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        merged[row["step"]].update(row)
    steps = [row for row in merged.values() if "timing_s/step" in row]
    operations = _timings(steps)
    bars = {
        name: _binned([row["step"] for row in steps], [row.get(f"timing_s/{name}", 0.0) for row in steps])["mean"]
        for name in operations
    }
    return {"operations": bars, "step": _series(steps, "timing_s/step")}


def _monitored(run: Run) -> list[dict[str, Any]]:
    """Utilization and memory by pool over time, as the monitor saw them: of GPUs, or of processes where there are
    none."""
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for sample in run.monitor:
        use: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for gpu in sample.get("gpus", ()):
            for pool in gpu.get("pools", ()):
                use[pool].append((gpu["utilization"], gpu["memory_bytes"]))
        for process in sample.get("processes", ()) if not use else ():
            use[process["pool"]].append((process["cpu_percent"], process["memory_bytes"]))
        for pool, pairs in use.items():
            utilization = sum(pair[0] for pair in pairs) / len(pairs)
            samples[pool].append((sample["time_s"], utilization, max(pair[1] for pair in pairs) / 2**30))
    first_s = min((sample["time_s"] for sample in run.monitor), default=0.0)
    titles = ("Utilization (%), mean of a pool's ranks", "Memory (GiB), most of a pool's ranks")
    return _usage_charts(samples, titles, "seconds", first_s)


def _from_spans(run: Run, summary: Summary) -> list[dict[str, Any]]:
    """The same by step, from what the spans say."""
    busy_s: dict[tuple[str, int], float] = defaultdict(float)
    peak: dict[tuple[str, int], int] = defaultdict(int)
    for step, _, span in run.spans:
        busy_s[span.pool, step] += span.duration_s
        peak[span.pool, step] = max(peak[span.pool, step], span.peak_memory_bytes)
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for (pool, step), seconds in sorted(busy_s.items()):
        if pool in summary.pools and summary.step_times.get(step):
            busy = 100 * seconds / (summary.step_times[step] * summary.pools[pool].num_ranks)
            samples[pool].append((step, busy, peak[pool, step] / 2**30))
    return _usage_charts(samples, ("Busy (%), mean of a pool's ranks", "Peak memory of a call (GiB)"), "step", 0.0)


def _usage_charts(
    samples: Mapping[str, Sequence[tuple[float, float, float]]], titles: Sequence[str], x_label: str, first: float
) -> list[dict[str, Any]]:
    charts = []
    for column, title in enumerate(titles, 1):
        series = [
            {"name": pool, **_binned([point[0] - first for point in points], [point[column] for point in points])}
            for pool, points in samples.items()
        ]
        charts.append({"title": title, "x_label": x_label, "series": series})
    return charts if samples else []


# Timeline


def _timeline(
    grouped: Mapping[int, list[Recorded]], bounds: Mapping[int, tuple[float, float]], operations: Sequence[str]
) -> dict[str, Any]:
    """Windows of whole steps next to each other; all steps where they are few enough."""
    chosen = _choose_steps(grouped, bounds)
    windows: list[list[int]] = []
    for step in sorted(chosen):
        if windows and step == windows[-1][-1] + 1:
            windows[-1].append(step)
        else:
            windows.append([step])
    shown = []
    for steps in windows:
        spans, (start_s, end_s) = around(grouped, steps[0], steps[-1]), (bounds[steps[0]][0], bounds[steps[-1]][1])
        made = _window(spans, start_s, end_s, operations, MAX_SPANS)
        made["starts"] = [(step, bounds[step][0] - start_s) for step in steps]
        label = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        why = ", ".join(dict.fromkeys(chosen[step] for step in steps))
        shown.append({"label": f"{label} ({why})", **made})
    return {"operations": operations, "windows": shown, "num_steps": len(bounds), "num_shown": len(chosen)}


def _choose_steps(grouped: Mapping[int, list[Recorded]], bounds: Mapping[int, tuple[float, float]]) -> dict[int, str]:
    """The steps to show, and why each: all, or the slowest, the median one, and as many first and last as fit."""
    steps = sorted(bounds)
    if sum(len(grouped[step]) for step in steps) <= MAX_SPANS:
        return dict.fromkeys(steps, "all")
    by_length = sorted(steps, key=lambda step: bounds[step][1] - bounds[step][0])
    ends = [
        pair for first, last in zip(steps, reversed(steps), strict=True) for pair in ((first, "first"), (last, "last"))
    ]
    wanted = [(steps[0], "first"), (by_length[-1], "slowest"), (by_length[len(steps) // 2], "median"), *ends]
    chosen: dict[int, str] = {}
    room = MAX_SPANS
    for step, why in wanted:
        room -= len(grouped[step]) if step not in chosen else 0
        if (room < 0 and chosen) or len(chosen) == MAX_SELECTED_STEPS:
            break
        chosen.setdefault(step, why)
    return chosen


def _window(
    spans: Sequence[Recorded], start_s: float, end_s: float, operations: Sequence[str], most: int
) -> dict[str, Any]:
    """Lanes with spans and waits, times from the start. Spans are whole where the window cuts them; lanes are left out
    once there are too many spans."""
    mine: dict[tuple[str, int], list[Recorded]] = defaultdict(list)
    for recorded in spans:
        if recorded.span.end_s > start_s and recorded.span.start_s < end_s:
            mine[recorded.span.pool, recorded.span.rank].append(recorded)
    shown: list[dict[str, Any]] = []
    all_lanes = lanes(Timeline(spans), start_s, end_s)
    for lane in all_lanes:
        most -= len(mine[lane.pool, lane.rank])
        if shown and most < 0:
            break
        boxes = [_box(recorded, start_s, operations) for recorded in mine[lane.pool, lane.rank]]
        waits = [
            (wait.kind, wait.pool, wait.operation, wait.start_s - start_s, wait.end_s - wait.start_s)
            for wait in lane.waits
        ]
        shown.append({"pool": lane.pool, "rank": lane.rank, "spans": boxes, "waits": waits})
    return {"seconds": end_s - start_s, "lanes": shown, "left_out": len(all_lanes) - len(shown)}


def _box(recorded: Recorded, start_s: float, operations: Sequence[str]) -> tuple[Any, ...]:
    step, operation, span = recorded
    counts = (span.num_rows, span.num_tokens, span.peak_memory_bytes)
    return (operations.index(operation), step, span.start_s - start_s, span.duration_s, *counts, span.parts)
