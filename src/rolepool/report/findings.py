"""Findings: what a run's numbers mean, in plain words, and which key to change.

Owns the averages over the steps of a run (where each pool's time went, and the critical path),
which are also on the page, and the thresholds above which something is reported. Every finding
includes the numbers it is based on; its text is in `tables.yaml`. Also owns the sign of other
programs on the machine, which `compare` asks for.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from statistics import fmean, median
from typing import Any, NamedTuple

from rolepool.metrics.spans import Recorded, Timeline, critical_path, lanes, step_metrics
from rolepool.placement.plan import DRIVER, RULE_POOL
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS
from rolepool.planner.predict import Prediction
from rolepool.report.plots import TABLES
from rolepool.report.run import TIMING, Run, value_at

MAX_STEPS = 200
"""Steps over which averages are computed."""
IMBALANCE, HAND_OVER, SAVED = 0.05, 0.05, 0.02
"""Thresholds, as fractions of a step."""
LITTLE_MEMORY_LEFT, MUCH_MEMORY_LEFT = 0.05, 0.4

MAX_PERIODS, MIN_STEPS = 10, 4
"""Periods that are compared to find outside load, and the steps with samples that each needs."""
SLOWER, LESS_USE = 1.5, 0.85
"""Outside load: a period is this much slower than the fastest one, and uses less than this part of
its utilization."""

SpansByStep = Mapping[int, Sequence[Recorded]]


class Summary(NamedTuple):
    """Averages over `steps`."""

    steps: list[int]
    step_s: float
    num_ranks: Mapping[str, int]
    """Ranks of each pool."""
    pools_s: dict[str, dict[tuple[str, str, str], float]]
    """Where each pool's time went: seconds per step, averaged over its ranks, by kind ("busy" or a
    kind of wait), and the pool and operation that it worked on or waited for."""
    path_s: dict[tuple[str, str], float]
    """Seconds of the critical path per step, by pool and operation; hand-overs between calls have
    two empty names."""
    saved_s: float


class Finding(NamedTuple):
    """A sentence or two, and the numbers in it."""

    text: str
    numbers: dict[str, float]
    overrides: tuple[str, ...] = ()
    """What to change: alternatives, each to be copied into the command of the next run."""
    gain_s: float = 0.0
    """Seconds per step that the change saves at most; 0 if the spans do not tell."""


class Period(NamedTuple):
    """Consecutive steps: their median duration, median seconds per token, and utilization (%) while
    ranks are busy."""

    first: int
    last: int
    step_s: float
    token_s: float
    use: float


def by_step(spans: Sequence[Recorded]) -> SpansByStep:
    in_order = sorted(spans, key=lambda recorded: recorded.step)
    return {step: [*group] for step, group in groupby(in_order, key=lambda recorded: recorded.step)}


def around(grouped: SpansByStep, first: int, last: int) -> Timeline:
    """The spans of these steps, and of the steps before and after, which may overlap or explain
    them."""
    near = [spans for step, spans in grouped.items() if first - 1 <= step <= last + 1]
    return Timeline(chain.from_iterable(near))


def summarise(grouped: SpansByStep, bounds: Mapping[int, tuple[float, float]]) -> Summary:
    """Averages over at most `MAX_STEPS` steps, evenly spaced. The first step is skipped if there
    are others, because it includes warm-up."""
    all_steps = sorted(bounds)[1:] or sorted(bounds)
    count = min(len(all_steps), MAX_STEPS)
    steps = [all_steps[len(all_steps) * index // count] for index in range(count)]
    num_ranks: Counter[str] = Counter()
    pools_s: dict[str, dict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    path_s: dict[tuple[str, str], float] = defaultdict(float)
    saved_s = 0.0
    for step in steps:
        spans, (start_s, end_s) = around(grouped, step, step), bounds[step]
        num_ranks |= Counter(pool for pool, _ in spans.of_rank)
        for (pool, _), lane in lanes(spans, start_s, end_s).items():
            for piece in lane:
                pools_s[pool][piece.kind, piece.pool, piece.operation] += (
                    piece.duration_s / num_ranks[pool] / count
                )
        for link in critical_path(spans, start_s, end_s):
            path_s[link.pool, link.operation] += link.duration_s / count
        saved_s += step_metrics(spans, start_s, end_s)["overlap/saved_s"] / count
    step_s = fmean(bounds[step][1] - bounds[step][0] for step in steps) if steps else 0.0
    return Summary(steps, step_s, num_ranks, pools_s, path_s, saved_s)


def find(run: Run, summary: Summary, predicted: Sequence[Prediction] = ()) -> list[Finding]:
    """All findings about a run: first what makes its times doubtful, then by the seconds that can
    be gained. `predicted` are the run's own placement and the best other ones."""
    if not summary.steps:
        return []
    found = [*_imbalance(run, summary), *_hand_overs(run, summary), *_memory(run)]
    for one in predicted[1:2]:
        if one.high_s < summary.step_s:
            numbers = {"step_s": summary.step_s, "predicted_s": one.step_s, "at_most_s": one.high_s}
            gain_s = summary.step_s - one.step_s
            found.append(
                _finding(
                    "other_placement",
                    numbers,
                    one.name,
                    gain_s=gain_s,
                    pools=one.plan.sizes_in_words,
                )
            )
    if summary.saved_s > SAVED * summary.step_s:
        found.append(_finding("saved", {"saved_s": summary.saved_s, "step_s": summary.step_s}))
    found.sort(key=lambda finding: -finding.gain_s)
    disturbed = outside_load(run)
    return [Finding(disturbed, {"step_s": summary.step_s}), *found] if disturbed else found


def _finding(
    kind: str, numbers: dict[str, float], *overrides: str, gain_s: float = 0.0, **more: Any
) -> Finding:
    """A finding whose text contains these numbers, and more."""
    words = {
        name: duration(value) if name.endswith("_s") else value for name, value in numbers.items()
    }
    return Finding(TABLES.findings[kind].format(**words, **more), numbers, overrides, gain_s)


def duration(seconds: float) -> str:
    """Seconds in a unit that needs no exponent."""
    for unit, size in {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}.items():
        if seconds >= size * (2 if size > 1 else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


# Other programs on the machine


def outside_load(run: Run) -> str | None:
    """What shows that other programs slowed a part of the run down; None if nothing does.

    A run that slows down by itself, because its responses grow or its ranks wait for each other,
    does as much as before in each second in which it is busy. If another program takes the
    processors, it does less.
    """
    periods = _periods(run)
    if not periods:
        return None
    fast, slow = (choose(periods, key=lambda period: period.token_s) for choose in (min, max))
    if slow.token_s < SLOWER * fast.token_s or slow.use > LESS_USE * fast.use:
        return None
    factor = slow.token_s / fast.token_s
    return TABLES.findings["outside_load"].format(
        slow=slow, slow_s=duration(slow.step_s), fast=fast, factor=factor
    )


def _periods(run: Run) -> list[Period]:
    """Consecutive parts of the run, without its first step; none if it is too short, or without
    samples."""
    steps = [step for step, row in run.metrics.items() if _is_measured(row)][1:]
    count = min(MAX_PERIODS, len(steps) // MIN_STEPS)
    periods = []
    for index in range(count):
        chosen = steps[len(steps) * index // count : len(steps) * (index + 1) // count]
        rows = [run.metrics[step] for step in chosen]
        step_s = median(row[f"{TIMING}step"] for row in rows)
        token_s = median(row[f"{TIMING}step"] / row["perf/total_num_tokens"] for row in rows)
        busy_percent = _mean_of_pools(rows, "utilization") / _mean_of_pools(rows, "busy_fraction")
        periods.append(Period(chosen[0], chosen[-1], step_s, token_s, busy_percent))
    return periods


def _is_measured(row: Mapping[str, float]) -> bool:
    """Whether a row has what a period is made of. A row of another program, or of a damaged file,
    may lack it."""
    numbers = [row.get(name, 0.0) for name in (f"{TIMING}step", "perf/total_num_tokens")]
    return (
        min(
            *numbers,
            *(_mean_of_pools([row], metric) for metric in ("utilization", "busy_fraction")),
        )
        > 0
    )


def _mean_of_pools(rows: Sequence[Mapping[str, float]], metric: str) -> float:
    """The mean of a metric of pools, without the pool of the rule reward; 0 if there is none."""
    pattern = re.compile(rf"pool/(?!{RULE_POOL}/).*/{metric}")
    values = [value for row in rows for name, value in row.items() if pattern.fullmatch(name)]
    return fmean(values) if values else 0.0


# Findings about batches and memory


def _scaled(run: Run, key: str, factor: float) -> str:
    """The override that multiplies a key's value; the key alone if its value is not a number."""
    value = value_at(run.config, key)
    if isinstance(value, int):
        return f"{key}={max(1, int(value * factor))}"
    return f"{key}={min(0.9, value * factor):.2g}" if isinstance(value, float) else key


def _imbalance(run: Run, summary: Summary) -> Iterator[Finding]:
    for pool, times_s in summary.pools_s.items():
        others = max(1, summary.num_ranks[pool] - 1)
        for (kind, _, operation), mean_s in times_s.items():
            waited_s = mean_s * summary.num_ranks[pool] / others
            if kind != "imbalance" or waited_s <= IMBALANCE * summary.step_s:
                continue
            # The key that balances the ranks and is not set yet. Response lengths are not known
            # before generation, so they cannot be balanced.
            override, batched = (
                _scaled(run, "data.max_response_length", 0.5),
                OPERATIONS.get(operation),
            )
            if batched is not None and batched.micro_batch is not None:
                balancing = ("trainer.balance_batch", batched.micro_batch.by_tokens)
                unset = [
                    f"{name}=true" for name in balancing if value_at(run.config, name) is False
                ]
                override = [*unset, _scaled(run, "data.train_batch_size", 2)][0]
            words = {
                "operation": operation,
                "others": f"{others} ranks" if others > 1 else "rank",
                "pool": pool,
            }
            # Equal ranks would end together at their mean, which shortens the step if it waits for
            # this operation.
            gain_s = min(mean_s, summary.path_s.get((pool, operation), 0.0))
            numbers = {"waited_s": waited_s, "step_s": summary.step_s}
            yield _finding(
                "imbalance",
                numbers,
                override,
                gain_s=gain_s,
                share=waited_s / summary.step_s,
                **words,
            )


def _hand_overs(run: Run, summary: Summary) -> Iterator[Finding]:
    handed_s = summary.path_s.get(("", ""), 0.0)
    driver_s = sum(seconds for (pool, _), seconds in summary.path_s.items() if pool == DRIVER)
    share = (handed_s + driver_s) / summary.step_s if summary.step_s else 0.0
    if share > HAND_OVER:
        numbers = {
            "share": share,
            "driver_s": driver_s,
            "hand_over_s": handed_s,
            "step_s": summary.step_s,
        }
        keys = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
        override = " ".join(_scaled(run, key, 2) for key in keys)
        yield _finding("hand_overs", numbers, override, gain_s=(handed_s + driver_s) / 2)


def _memory(run: Run) -> Iterator[Finding]:
    """How full the fullest GPU of each pool was, if the monitor recorded the size of its memory."""
    gpus = [
        gpu for sample in run.monitor for gpu in sample["gpus"] if gpu.get("memory_total_bytes")
    ]
    for name, pool in run.plan.pools.items() if run.plan is not None else ():
        sizes = [
            (gpu["memory_bytes"], gpu["memory_total_bytes"]) for gpu in gpus if name in gpu["pools"]
        ]
        fullest = max(sizes, key=lambda size: size[0] / size[1], default=(0, 0))
        used, total = fullest[0] / 2**30, fullest[1] / 2**30
        left = 1 - used / total if total else LITTLE_MEMORY_LEFT
        # The key that decides most about a pool's memory: the micro-batch size of a role that is
        # trained, or else of one that computes log-probs or scores, or else the key of the rollout.
        known = [
            ROLE_SPECS[role] for role in pool.roles if role in ROLE_SPECS
        ]  # others are of the run's extensions
        spec = min(known, key=lambda spec: (not spec.is_trained, not spec.batched), default=None)
        if spec is None or LITTLE_MEMORY_LEFT <= left <= MUCH_MEMORY_LEFT:
            continue
        key = spec.memory_key
        if spec.batched:
            sizes_of = spec.batched[-1][1]
            key = sizes_of.tokens if value_at(run.config, sizes_of.by_tokens) else sizes_of.rows
        is_chosen = bool(key) and value_at(run.config, key) is None  # the largest size that fits
        numbers = {"used_gib": used, "total_gib": total}
        if left < LITTLE_MEMORY_LEFT:
            override = f"{key}=1" if is_chosen else _scaled(run, key, 0.5)
            yield _finding("little_memory_left", numbers, override, pool=name, left=left)
        elif not is_chosen:
            yield _finding("much_memory_left", numbers, _scaled(run, key, 2), pool=name, left=left)
