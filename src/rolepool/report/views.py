"""A run as one page for the browser, which needs no other files and no network, and as a trace for
Perfetto.

Owns what is on the page and limits its size: curves of long runs are binned, and the timeline shows
a limited number of steps, so that every page opens at once. The page itself is `template.html`; it
reads one JSON object.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from rolepool.config.loading import show
from rolepool.config.schema import all_keys
from rolepool.metrics.run_folder import validation_score
from rolepool.metrics.sampling import Sample, pool_use
from rolepool.metrics.spans import BETWEEN_STEPS, NONE, Timeline, lanes, step_bounds
from rolepool.report.compare import measured_steps
from rolepool.report.curves import chart_of, small_charts
from rolepool.report.findings import find
from rolepool.report.plots import (
    REWARD,
    TABLES,
    colors_for,
    in_step_order,
    mean_times,
    timed_operations,
)
from rolepool.report.predicted import other_placements
from rolepool.report.run import (
    TIMING,
    MetricsByStep,
    Run,
    finite_values,
    metric_names,
    parts_of,
    value_at,
)
from rolepool.report.samples import samples_of
from rolepool.report.summary import SpansByStep, around, by_step, summarise

MAX_SPANS = 10_000
MAX_LANES = 500
MAX_STEPS_SHOWN = 12
"""Steps on the timeline of a run that has more than `MAX_SPANS` spans."""

USAGE = ("Utilization (%), mean of the pool's ranks", "Memory (GiB), maximum of the pool's ranks")

Bounds = Mapping[int, tuple[float, float]]


def render(run: Run) -> str:
    """The page. `<` is escaped in the data, so that no text in it can end the script element or
    open a comment."""
    template = Path(__file__).with_name("template.html").read_text(encoding="utf-8")
    # Read back once: numbers are rounded to six digits, and NaN and infinity, which JSON cannot
    # hold, become null.
    exact = json.dumps(page_data(run))
    data = json.loads(
        exact, parse_float=lambda text: float(f"{float(text):.6g}"), parse_constant=lambda _: None
    )
    return template.replace(
        "__DATA__", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    )


def page_data(run: Run) -> dict[str, Any]:
    """Everything on the page. Curves over steps show the whole run; what is about pools, its last
    placement only."""
    parts = parts_of(run)
    last = parts[-1]
    grouped, bounds = by_step(last.spans), step_bounds(last.spans)
    summary = summarise(grouped, bounds)
    timed = {*timed_operations(run.metrics)} - {*BETWEEN_STEPS}
    operations = in_step_order({recorded.operation for recorded in run.spans} | timed)
    chosen = _choose_steps(grouped, bounds)
    predicted = other_placements(last)
    devices = {one.span.device for one in last.spans} or {
        planned.plan.device for planned in last.plans[-1:]
    }
    unit = "CPU slot" if devices == {"cpu"} else "GPU"
    samples = samples_of(run)
    return {
        "name": run.name,
        "skipped": run.notes,
        "rewards": _first_and_last(finite_values(run.metrics, REWARD)),
        "scores": _first_and_last(_validation_scores(run.metrics)),
        "samples": samples,
        "metrics": small_charts(run.metrics),
        "events": [event._asdict() for event in run.events],
        "operations": operations,
        "colors": colors_for(operations),
        "placements": [_placement(part) for part in parts if part.plans],
        "unit": unit,
        "num_steps": len(bounds),
        "num_averaged": len(summary.steps),
        "step_s": summary.step_s,
        "findings": [finding._asdict() for finding in find(last, summary, predicted)],
        "predicted": [
            (one.plan.sizes_in_words, one.name, one.step_s, one.low_s, one.high_s)
            for one in predicted
        ],
        "not_measured": sorted({note for one in predicted for note in one.notes}),
        "num_ranks": summary.num_ranks,
        "pools": {
            pool: [(*what, s) for what, s in times_s.items()]
            for pool, times_s in summary.pools_s.items()
        },
        "path": [(*what, seconds) for what, seconds in summary.path_s.items()],
        "windows": [
            {"why": why, **_window(grouped, bounds, steps, operations)}
            for why, steps in chosen.items()
        ],
        "breakdown": _breakdown(run.metrics),
        "usage": _monitored(last.monitor),
        "curves": list(_curves(run.metrics, unit)),
        "plan": run.plan.model_dump(mode="json")["pools"] if run.plan is not None else {},
        "config": _changed_config(run.config),
    }


def _placement(part: Run) -> dict[str, Any]:
    """First step, pools and mean seconds of a step of a part of a run that has one plan."""
    (planned,) = part.plans
    step_s = mean_times(measured_steps(part)).get("step")
    return {"first_step": planned.first_step, "pools": planned.plan.in_words, "step_s": step_s}


def _changed_config(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of each key that differs. `${...}` in a default stands for the value
    of another key."""
    changed = []
    for path, key in all_keys().items():
        value, default = show(value_at(config, path)), key.default
        if isinstance(default, str):
            default = re.sub(
                r"\$\{([^}]+)\}", lambda match: show(value_at(config, match[1])), default
            )
        if value != show(default):
            changed.append((path, value, show(default)))
    return changed


# Curves over steps or time


def _first_and_last(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """Step and value of the first and of the last point; one of them if they are the same; none if
    there is none."""
    points = list(values.items())
    return points if len(points) < 2 else [points[0], points[-1]]


def _validation_scores(metrics: MetricsByStep) -> dict[int, float]:
    scores = {step: validation_score(row) for step, row in metrics.items()}
    return {
        step: score for step, score in scores.items() if score is not None and math.isfinite(score)
    }


def _curves(metrics: MetricsByStep, unit: str) -> Iterator[dict[str, Any]]:
    names = [name for name in metric_names(metrics) if not name.endswith("/std")]
    for title, patterns in TABLES.curves.items():
        wanted = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        if wanted:
            values = {
                name: [(step, row[name]) for step, row in metrics.items() if name in row]
                for name in wanted
            }
            yield chart_of(title.format(unit=unit), "step", values)


def _breakdown(metrics: MetricsByStep) -> dict[str, Any]:
    """Seconds of the step, and of each operation in it. The step is shorter than their sum if
    operations overlap. Validation and saving are not part of a step."""
    steps = {step: row for step, row in metrics.items() if f"{TIMING}step" in row}
    names = (
        ["step", *(name for name in timed_operations(steps) if name not in BETWEEN_STEPS)]
        if steps
        else []
    )
    times = {
        name: [(step, row.get(f"{TIMING}{name}", 0.0)) for step, row in steps.items()]
        for name in names
    }
    return chart_of("Step time", "step", times)


def _monitored(monitor: Sequence[Sample]) -> list[dict[str, Any]]:
    """Utilization and memory of pools over time."""
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {
        title: defaultdict(list) for title in USAGE
    }
    for sample in monitor:
        for pool, used in pool_use(sample).items():
            for title, value in zip(USAGE, used, strict=True):
                charts[title][pool].append((sample["time_s"] - monitor[0]["time_s"], value))
    return [chart_of(title, "seconds", series) for title, series in charts.items() if series]


# Timeline


def _choose_steps(grouped: SpansByStep, bounds: Bounds) -> dict[str, list[int]]:
    """The windows of steps to show: the median step, on which the page opens, the slowest one, and
    all steps or as many of the first and last as fit. The first step includes warm-up, so it is
    neither median nor slowest."""
    steps = sorted(bounds)
    by_length = sorted(steps[1:] or steps, key=lambda step: bounds[step][1] - bounds[step][0])
    median = by_length[len(by_length) // 2 : len(by_length) // 2 + 1]
    sizes = [len(grouped[step]) for step in steps]
    count = (
        min(MAX_STEPS_SHOWN, MAX_SPANS // max(sizes, default=1)) // 2 - 1
    )  # at each end, besides slowest and median
    if len(steps) < 2 or count < 1:
        return {"median": median} if steps else {}
    if sum(sizes) <= MAX_SPANS:
        return {"median": median, "slowest": by_length[-1:], "all": steps}
    return {
        "median": median,
        "slowest": by_length[-1:],
        "first": steps[:count],
        "last": steps[-count:],
    }


def _window(
    grouped: SpansByStep, bounds: Bounds, steps: list[int], operations: list[str]
) -> dict[str, Any]:
    """Lanes with spans and waits in a window of steps; times count from its start. Spans that start
    before it or end after it are shown with their full length. Lanes after the first `MAX_LANES`
    are skipped."""
    start_s, end_s = bounds[steps[0]][0], bounds[steps[-1]][1]
    timeline = around(grouped, steps[0], steps[-1])
    all_lanes = lanes(timeline, start_s, end_s)
    shown: list[dict[str, Any]] = []
    for (pool, rank), lane in islice(all_lanes.items(), MAX_LANES):
        waits = [
            (*piece[:3], piece.start_s - start_s, piece.duration_s)
            for piece in lane
            if piece.position == NONE
        ]
        spans = []
        for step, operation, span in (
            timeline[piece.position] for piece in lane if piece.position != NONE
        ):
            counts = (
                span.num_rows,
                span.num_tokens,
                span.peak_memory_bytes,
                [*span.part_seconds.items()],
            )
            spans.append(
                (
                    operations.index(operation),
                    step,
                    span.start_s - start_s,
                    span.duration_s,
                    *counts,
                )
            )
        shown.append({"pool": pool, "rank": rank, "spans": spans, "waits": waits})
    starts = [(step, bounds[step][0] - start_s) for step in steps]
    return {
        "starts": starts,
        "seconds": end_s - start_s,
        "lanes": shown,
        "num_hidden": len(all_lanes) - len(shown),
    }


# Trace


def trace_pieces(run: Run) -> Iterator[str]:
    """The text of a trace in Chrome's JSON format: a process for each pool, a thread for each rank,
    a slice for each span, and an arrow from each result to the call that used it."""
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    for number, event in enumerate(_events(Timeline(run.spans))):
        yield (",\n" if number else "\n") + json.dumps(event)
    yield "\n]}\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of a trace: first the names, then all slices, then all arrows. Times are integer
    microseconds since the first span."""
    pools = {
        pool: number
        for number, pool in enumerate(sorted({pool for pool, _ in timeline.of_rank}), start=1)
    }
    threads = {}
    for pool, number in pools.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": pool}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": number,
            "args": {"sort_index": number},
        }
    # Perfetto treats a thread that has the number of its process as the main thread, so thread
    # numbers start higher.
    for number, (pool, rank) in enumerate(timeline.of_rank, start=len(pools) + 1):
        threads[pool, rank] = thread = {"pid": pools[pool], "tid": number}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"{pool} rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}}
    slices = []
    for step, operation, span in timeline:
        start_us, end_us = (
            int((time_s - timeline[0].span.start_s) * 1e6) for time_s in (span.start_s, span.end_s)
        )
        thread, times = threads[span.pool, span.rank], {"ts": start_us, "dur": end_us - start_us}
        slices.append((thread, start_us, end_us))
        args = {"step": step, **span._asdict(), "parts": span.part_seconds}
        yield {"ph": "X", "name": operation, "cat": span.role, **thread, **times, "args": args}
    for target, (thread, arrives_us, _) in enumerate(slices):
        for source in timeline.inputs_of(target):
            source_thread, start_us, end_us = slices[source]
            if start_us <= arrives_us:
                arrow = {"name": "data", "cat": "data", "id": source * len(timeline) + target}
                # A slice does not contain its end, so an arrow leaves in its last microsecond at
                # the latest.
                leaves_us = max(min(end_us - 1, arrives_us), start_us)
                yield {"ph": "s", **arrow, **source_thread, "ts": leaves_us}
                yield {"ph": "f", "bp": "e", **arrow, **thread, "ts": arrives_us}
