"""A run as one page for the browser, which needs no other files and no network.

Owns what is on the page and limits its size, so that every page opens at once: curves of long runs
are binned, and the timeline shows a limited number of steps. The page itself is `template.html`; it
reads one JSON object.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rolepool.config import show
from rolepool.config.schema import all_keys
from rolepool.metrics.sampling import Sample, pool_use
from rolepool.metrics.spans import BETWEEN_STEPS, preparation_times, step_bounds
from rolepool.planner.predict import Prediction
from rolepool.report.compare import measured_steps
from rolepool.report.curves import LargeChart, Point, chart_of, points_of, small_charts
from rolepool.report.findings import find
from rolepool.report.metrics_by_step import (
    REWARD,
    TIMING,
    MetricsByStep,
    finite_values,
    metric_names,
    timed_steps,
    validation_scores,
)
from rolepool.report.operations import colors_for, in_step_order, mean_times, timed_operations
from rolepool.report.page_timeline import windows
from rolepool.report.predicted import other_placements
from rolepool.report.run import ReadRun, parts_of, value_at
from rolepool.report.samples import samples_of
from rolepool.report.summary import Summary, by_step, summarise
from rolepool.report.tables import TABLES

UTILIZATION = "Utilization (%), mean of the pool's ranks"
MEMORY = "Memory (GiB), maximum of the pool's ranks"
MAX_START_ROWS = 60
"""The page shows so many parts of a start. Those of the driver come first."""

PageData = Mapping[str, object]
"""The JSON object that the page reads."""


def render(run: ReadRun) -> str:
    """The page. `<` is escaped in the data, so that no text in it can end the script element or
    open a comment."""
    template_file = Path(__file__).with_name("template.html")
    template = template_file.read_text(encoding="utf-8")
    # The data is read back once: numbers are rounded to six digits, and NaN and infinity, which
    # JSON cannot hold, become null.
    data = json.loads(
        json.dumps(page_data(run)),
        parse_float=_rounded,
        parse_constant=lambda _: None,
    )
    text = json.dumps(data, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c")
    return template.replace("__DATA__", escaped)


def _rounded(number: str) -> float:
    """A number in JSON, rounded to six digits."""
    return float(f"{float(number):.6g}")


def page_data(run: ReadRun) -> PageData:
    """Everything on the page. Curves over steps show the whole run; what is about pools, its last
    placement only."""
    last = parts_of(run)[-1]
    unit = _unit(last)
    # Read before the notes below, which count the lines that could not be read.
    samples = samples_of(run)
    return {
        "name": run.name,
        "skipped": run.notes,
        "rewards": _first_and_last(finite_values(run.metrics, REWARD)),
        "scores": _first_and_last(validation_scores(run.metrics)),
        "samples": samples,
        "metrics": small_charts(run.metrics),
        "events": [event._asdict() for event in run.events],
        "breakdown": _breakdown(run.metrics),
        "curves": list(_curves(run.metrics, unit)),
        "unit": unit,
        "usage": _usage(last.monitor),
        "config": _changed_config(run.config),
        "start": _start(run),
        "preparations": preparation_times(recorded.span for recorded in run.spans),
        **_plan_data(run),
        **_spans_data(run, last),
    }


def _plan_data(run: ReadRun) -> PageData:
    """The placements of a run, and the pools of the newest one."""
    if run.plan is None:
        return {"plan": {}, "placements": []}
    placements = [_placement(part) for part in parts_of(run)]
    plan = run.plan.model_dump(mode="json")
    return {"plan": plan["pools"], "placements": placements}


def _placement(part: ReadRun) -> PageData:
    """First step, pools and mean seconds of a step of a part of a run that has one plan."""
    (planned,) = part.plans
    step_s = mean_times(measured_steps(part)).get("step")
    return {
        "first_step": planned.first_step,
        "pools": planned.plan.in_words,
        "step_s": step_s,
    }


def _start(run: ReadRun) -> list[tuple[str, str, float, float]]:
    """What the driver and the processes did between the command and the first step: who, what, when
    it began, and its seconds."""
    if run.start is None:
        return []
    rows = []
    for entry in run.start.in_order[:MAX_START_ROWS]:
        offset_s = entry.start_s - run.start.began_s
        rows.append((entry.who, entry.what, offset_s, entry.duration_s))
    return rows


def _spans_data(run: ReadRun, last: ReadRun) -> PageData:
    """What the spans of the last placement tell: averages, findings, predictions, and the
    timeline."""
    grouped = by_step(last.spans)
    bounds = step_bounds(last.spans)
    summary = summarise(grouped, bounds)
    predicted = other_placements(last)
    findings = find(last, summary, predicted)
    names = set(timed_operations(run.metrics)).difference(BETWEEN_STEPS)
    names.update(recorded.operation for recorded in run.spans)
    operations = in_step_order(names)
    return {
        "operations": operations,
        "colors": colors_for(operations),
        "num_steps": len(bounds),
        "findings": [finding._asdict() for finding in findings],
        "windows": windows(grouped, bounds, operations),
        **_averages(summary),
        **_predictions(predicted),
    }


def _averages(summary: Summary) -> PageData:
    """The averages over steps. JSON has no tuples as keys, so each becomes the beginning of a
    row."""
    pools = {}
    for pool, times_s in summary.pools_s.items():
        pools[pool] = [(*kind_of_time, seconds) for kind_of_time, seconds in times_s.items()]
    path = [(*place, seconds) for place, seconds in summary.path_s.items()]
    return {
        "num_averaged": len(summary.steps),
        "step_s": summary.step_s,
        "num_ranks": summary.num_ranks,
        "pools": pools,
        "path": path,
    }


def _predictions(predicted: Sequence[Prediction]) -> PageData:
    rows = []
    notes: set[str] = set()
    for prediction in predicted:
        row = (
            prediction.plan.sizes_in_words,
            prediction.name,
            prediction.step_s,
            prediction.low_s,
            prediction.high_s,
        )
        rows.append(row)
        notes.update(prediction.notes)
    return {"predicted": rows, "not_measured": sorted(notes)}


def _unit(run: ReadRun) -> str:
    """What a rank works on, from the spans; from the plan if there are no spans."""
    devices = {recorded.span.device for recorded in run.spans}
    if not devices and run.plan is not None:
        devices = {run.plan.device}
    return "CPU slot" if devices == {"cpu"} else "GPU"


def _changed_config(config: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Key, value and default of each key that differs. `${...}` in a default stands for the value
    of another key."""

    def value_of(reference: re.Match[str]) -> str:
        return show(value_at(config, reference[1]))

    changed = []
    for path, key in all_keys().items():
        default = key.default
        if isinstance(default, str):
            default = re.sub(r"\$\{([^}]+)\}", value_of, default)
        shown_value = show(value_at(config, path))
        shown_default = show(default)
        if shown_value != shown_default:
            changed.append((path, shown_value, shown_default))
    return changed


# Curves over steps or time


def _first_and_last(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """Step and value of the first and of the last point; one or none if there are no more."""
    points = list(values.items())
    if len(points) < 2:
        return points
    return [points[0], points[-1]]


def _curves(metrics: MetricsByStep, unit: str) -> Iterator[LargeChart]:
    """The charts of `tables.yaml` for which the run has metrics."""
    names = [name for name in metric_names(metrics) if not name.endswith("/std")]
    for title, patterns in TABLES.curves.items():
        series = {}
        for pattern in patterns:
            for name in names:
                if fnmatchcase(name, pattern):
                    series[name] = points_of(metrics, name)
        if series:
            title_with_unit = title.format(unit=unit)
            yield chart_of(title_with_unit, "step", series)


def _breakdown(metrics: MetricsByStep) -> LargeChart:
    """Seconds of the step, and of each operation in it. The step is shorter than their sum if
    operations overlap. Validation and saving are not part of a step."""
    steps = timed_steps(metrics)
    times: dict[str, list[Point]] = defaultdict(list)
    for name in ("step", *timed_operations(steps)):
        if name in BETWEEN_STEPS:
            continue
        for step, row in steps.items():
            # An operation that did not run in this step took no time in it.
            seconds = row.get(f"{TIMING}{name}", 0.0)
            times[name].append((step, seconds))
    return chart_of("Step time", "step", times)


def _usage(monitor: Sequence[Sample]) -> list[LargeChart]:
    """Utilization and memory of pools over time."""
    utilization: dict[str, list[Point]] = defaultdict(list)
    memory: dict[str, list[Point]] = defaultdict(list)
    for sample in monitor:
        seconds = sample["time_s"] - monitor[0]["time_s"]
        for pool, use in pool_use(sample).items():
            utilization[pool].append((seconds, use.percent))
            memory[pool].append((seconds, use.memory_gib))
    if not utilization:
        return []
    return [
        chart_of(UTILIZATION, "seconds", utilization),
        chart_of(MEMORY, "seconds", memory),
    ]
