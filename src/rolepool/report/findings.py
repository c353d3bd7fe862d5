"""Findings: what a run's numbers mean, in plain words, and which key to change.

Owns the averages over the steps of a run (where each pool's time went, and the critical path), which are also on the
page, and the thresholds above which something is reported. Every finding includes the numbers it is based on; its text
is in `tables.yaml`. Also owns the sign of other programs on the machine, which `compare` asks for.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from string import Formatter
from typing import Any, NamedTuple

from pydantic import ValidationError

from rolepool.config import Config
from rolepool.errors import RolepoolError, one_line
from rolepool.metrics.sampling import pool_use
from rolepool.metrics.spans import BETWEEN_STEPS, Recorded, Timeline, critical_path, lanes, step_bounds, step_metrics
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.plan import DRIVER, RULE_POOL
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.placement.strategies import ACTOR_POOL, CRITIC_POOL
from rolepool.report.run import Run, value_at
from rolepool.report.tables import TABLES

MAX_STEPS = 200
"""Steps over which averages are computed."""
MAX_REPLAYED_STEPS = 12

IDLE, IMBALANCE, HAND_OVER, SAVED = 0.3, 0.05, 0.05, 0.02
"""Thresholds, as fractions of a step. A change is suggested only if it saves more than the last one."""
LITTLE_MEMORY_LEFT, MUCH_MEMORY_LEFT = 0.05, 0.4

MAX_PERIODS, MIN_STEPS, MIN_SAMPLES = 10, 3, 5
"""Periods that are compared to find outside load, and the steps and samples that each needs."""
SLOWER, LESS_USE = 1.2, 0.85
"""Outside load: a period is this much slower than the fastest one, and uses less than this part of its utilization."""

SpansByStep = Mapping[int, Sequence[Recorded]]


class Summary(NamedTuple):
    """Averages over `steps`."""

    steps: list[int]
    step_s: float
    num_ranks: Mapping[str, int]
    """Ranks of each pool."""
    pools_s: dict[str, dict[tuple[str, str, str], float]]
    """Where each pool's time went: seconds per step, averaged over its ranks, by kind ("busy" or a kind of wait), and
    the pool and operation that it worked on or waited for."""
    path_s: dict[tuple[str, str], float]
    """Seconds of the critical path per step, by pool and operation; hand-overs between calls have two empty names."""
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
    """Consecutive steps: their median duration, median seconds per token, and utilization (%) while ranks are busy."""

    first: int
    last: int
    step_s: float
    token_s: float
    use: float


def by_step(spans: Sequence[Recorded]) -> SpansByStep:
    in_order = sorted(spans, key=lambda recorded: recorded.step)
    return {step: [*group] for step, group in groupby(in_order, key=lambda recorded: recorded.step)}


def around(grouped: SpansByStep, first: int, last: int) -> Timeline:
    """The spans of these steps, and of the steps before and after, which may overlap or explain them."""
    return Timeline(recorded for step in range(first - 1, last + 2) for recorded in grouped.get(step, ()))


def summarise(grouped: SpansByStep, bounds: Mapping[int, tuple[float, float]]) -> Summary:
    """Averages over at most `MAX_STEPS` steps, evenly spaced. The first step is skipped if there are others, because it
    includes warm-up."""
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
                pools_s[pool][piece.kind, piece.pool, piece.operation] += piece.duration_s / num_ranks[pool] / count
        for link in critical_path(spans, start_s, end_s):
            path_s[link.pool, link.operation] += link.duration_s / count
        saved_s += step_metrics(spans, start_s, end_s)["overlap/saved_s"] / count
    step_s = fmean(bounds[step][1] - bounds[step][0] for step in steps) if steps else 0.0
    return Summary(steps, step_s, num_ranks, pools_s, path_s, saved_s)


def replayed_step_s(grouped: SpansByStep, scales: Mapping[str, float], homes: Mapping[Role, str] = {}) -> float | None:
    """Duration of a step if each call of a pool took `scales[pool]` times as long; None if there are too few steps.
    `homes` moves roles to other pools, by name.

    Replays the recorded calls. Each starts as early as it can: after the earlier calls of its pool, after the calls
    whose results are its inputs, and after the driver.
    """
    steps = sorted(grouped)[1:]
    middle = max(0, (len(steps) - MAX_REPLAYED_STEPS) // 2)
    calls: dict[tuple[float, int, str], list[Recorded]] = defaultdict(list)
    for step in steps[middle : middle + MAX_REPLAYED_STEPS]:
        for recorded in grouped[step]:
            span = recorded.span
            calls[span.start_s if span.pool == DRIVER else span.queued_s, span.call, span.pool].append(recorded)
    ends: dict[int, float] = {}
    free: dict[str, float] = defaultdict(float)
    starts: dict[int, float] = {}
    for (_, number, recorded_pool), ranks in sorted(calls.items()):
        step, operation, span = ranks[0]
        pool = homes.get(Role(span.role), recorded_pool)
        start = max(free[pool], free[DRIVER], *(ends.get(call, 0.0) for call in span.after))
        if operation == "gen":
            starts.setdefault(step, start)
        slowest_s = max(recorded.span.duration_s for recorded in ranks)
        ends[number] = free[pool] = start + slowest_s * scales.get(pool, 1.0)
    first, *others = list(starts.values())[(len(starts) - 1) // 2 :] or [0.0]  # the first half is the ramp-up
    return (others[-1] - first) / len(others) if others else None


def find(run: Run, summary: Summary, grouped: SpansByStep) -> list[Finding]:
    """All findings about a run: first what makes its times doubtful, then by the seconds that can be gained."""
    if not summary.steps:
        return []
    found = [*_one_pool(run, summary, grouped), *_idle_pool(run, summary, grouped), *_imbalance(run, summary)]
    found += [*_hand_overs(run, summary), *_memory(run)]
    if summary.saved_s > SAVED * summary.step_s:
        found.append(_finding("saved", {"saved_s": summary.saved_s, "step_s": summary.step_s}))
    found.sort(key=lambda finding: -finding.gain_s)
    disturbed = outside_load(run)
    return [Finding(disturbed, {"step_s": summary.step_s}), *found] if disturbed else found


class Texts(Formatter):
    """Fills in the texts of `tables.yaml`."""

    def format_field(self, value: Any, form: str) -> Any:
        return duration(value) if form == "duration" else super().format_field(value, form)


def _finding(kind: str, numbers: dict[str, float], *overrides: str, gain_s: float = 0.0, **more: Any) -> Finding:
    """A finding whose text contains these numbers, and more. `problem` says which other change is needed as well."""
    kinds = [kind, "another_change"] if more.get("problem") else [kind]
    text = " ".join(Texts().format(TABLES.findings[one], **numbers, **more) for one in kinds)
    return Finding(text, numbers, overrides, gain_s)


def duration(seconds: float) -> str:
    """Seconds in a unit that needs no exponent."""
    for unit, size in {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}.items():
        if seconds >= size * (2 if size > 1 else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


# Other programs on the machine


def outside_load(run: Run) -> str | None:
    """What shows that other programs slowed a part of the run down; None if nothing does.

    A run that slows down by itself, because its responses grow or its ranks wait for each other, does as much as before
    in each second in which it is busy. If another program takes the processors, it does less.
    """
    periods = _periods(run)
    if not periods:
        return None
    fast, slow = (choose(periods, key=lambda period: period.token_s) for choose in (min, max))
    if slow.token_s < SLOWER * fast.token_s or slow.use > LESS_USE * fast.use:
        return None
    factor = slow.token_s / fast.token_s
    return Texts().format(TABLES.findings["outside_load"], slow=slow, fast=fast, factor=factor)


def _periods(run: Run) -> list[Period]:
    """Consecutive parts of the run, without its first step; none if it is too short, or without samples."""
    bounds = step_bounds(run.spans)
    steps, samples = sorted(bounds)[1:], sorted(run.monitor, key=lambda sample: sample["time_s"])
    times_s = [sample["time_s"] for sample in samples]
    of_pools = [one for one in run.spans if one.span.pool not in (DRIVER, RULE_POOL)]
    num_ranks = len({(one.span.pool, one.span.rank) for one in of_pools})
    busy_s: dict[int, float] = defaultdict(float)
    for step, _, span in (one for one in of_pools if one.operation not in BETWEEN_STEPS):
        busy_s[step] += span.duration_s / num_ranks
    count = min(MAX_PERIODS, len(steps) // MIN_STEPS, len(samples) // MIN_SAMPLES)
    periods = []
    for index in range(count):
        chosen = steps[len(steps) * index // count : len(steps) * (index + 1) // count]
        lengths_s = [bounds[step][1] - bounds[step][0] for step in chosen]
        tokens = [run.metrics.get(step, {}).get("perf/total_num_tokens", 1.0) for step in chosen]
        ranges = [[bisect_left(times_s, time_s) for time_s in bounds[step]] for step in chosen]
        uses = [pool_use(sample) for first, last in ranges for sample in samples[first:last]]
        percents = [percent for use in uses for pool, (percent, _) in use.items() if pool != RULE_POOL]
        busy = sum(busy_s[step] for step in chosen)
        if percents and busy and min(*tokens, *lengths_s) > 0:
            token_s = median(length_s / number for length_s, number in zip(lengths_s, tokens, strict=True))
            busy_percent = fmean(percents) * sum(lengths_s) / busy
            periods.append(Period(chosen[0], chosen[-1], median(lengths_s), token_s, busy_percent))
    return periods


# Findings about the placement


def _one_pool(run: Run, summary: Summary, grouped: SpansByStep) -> Iterator[Finding]:
    """What two pools would bring, if each operation of a pool took as long there as it did, and if its time grew as
    the number of ranks falls. The spans of one pool do not tell which of the two is nearer."""
    if run.plan is None or len(run.plan.pools) != 1:
        return
    ranks = next(iter(run.plan.pools.values())).world_size
    plan, problem = _split_plan(run, {} if ranks > 1 else {"share": 0.5})
    now_s = replayed_step_s(grouped, {})
    if plan is None or not now_s:
        return
    scales = {name: ranks / pool.world_size for name, pool in plan.pools.items()}
    replayed_s = [replayed_step_s(grouped, factors, plan.roles) or now_s for factors in ({}, scales)]
    same_s, scaled_s = (step_s / now_s * summary.step_s for step_s in replayed_s)
    gain_s = summary.step_s - same_s
    if gain_s <= SAVED * summary.step_s:
        return
    numbers = {"step_s": summary.step_s, "estimated_step_s": same_s}
    words = {"unit": run.unit, "problem": problem}
    if ranks == 1:
        override = "placement.strategy=split placement.split.share=0.5"
        yield _finding("one_pool_of_one_rank", numbers, override, gain_s=gain_s, **words)
        return
    sizes = " and ".join(str(pool.world_size) for pool in plan.pools.values())
    limit = 1 + gain_s / max(scaled_s - same_s, gain_s / ranks)
    more = {"ranks": ranks, "sizes": sizes, "scaled_s": scaled_s, "limit": limit, **words}
    yield _finding("one_pool_of_ranks", numbers, "placement.strategy=split", gain_s=gain_s, **more)


def _idle_pool(run: Run, summary: Summary, grouped: SpansByStep) -> Iterator[Finding]:
    """The pool that is idle most of the time. Pools that share GPUs do not count: others use their idle time."""
    idle_fractions = {
        name: 1 - sum(seconds for (kind, _, _), seconds in times_s.items() if kind == "busy") / sum(times_s.values())
        for name, times_s in summary.pools_s.items()
        if run.plan is not None and name in run.plan.pools and run.plan.pools[name].share == 1
    }
    name, idle = max(idle_fractions.items(), key=lambda item: item[1], default=("", 0.0))
    if run.plan is None or len(idle_fractions) < 2 or idle < IDLE:
        return
    numbers, words = {"idle_fraction": idle, "step_s": summary.step_s}, {"pool": name, "unit": run.unit}
    now_s = replayed_step_s(grouped, {}) or 0.0
    then_s = {split: replayed_step_s(grouped, scales) or now_s for split, scales in _other_splits(run.plan)}
    shorter = [split for split in then_s if then_s[split] < now_s * (1 - SAVED)]
    if shorter:
        # A split that needs no other change is better than one that does.
        problems = {split: _split_plan(run, dict([split]))[1] for split in shorter}
        best = min(shorter, key=lambda split: (bool(problems[split]), then_s[split]))
        numbers["estimated_step_s"] = then_s[best] / now_s * summary.step_s
        words |= {"override": f"placement.split.{best[0]}={best[1]}", "problem": problems[best]}
        gain_s = summary.step_s - numbers["estimated_step_s"]
        yield _finding("other_split", numbers, words["override"], gain_s=gain_s, **words)
        return
    # If all ranks are used all the time and operations scale linearly, the idle ranks' time is gained.
    sizes = {pool: run.plan.pools[pool].world_size for pool in idle_fractions}
    gain_s = sum(idle_fractions[pool] * sizes[pool] for pool in sizes) / sum(sizes.values()) * summary.step_s
    if run.plan.pools.keys() == {ACTOR_POOL, CRITIC_POOL}:
        overrides = ["placement.strategy=standard", "placement.split.share=0.5"]
        yield _finding("no_other_split", numbers, *overrides, gain_s=gain_s, **words)
    else:
        smaller = [max(1, number // 2) for number in run.plan.pools[name].per_node]
        override = f"placement.pools.{name}={smaller}".replace(" ", "")
        overrides = [override] if sizes[name] > sum(smaller) else []
        yield _finding("idle_pool", numbers, *overrides, gain_s=gain_s, **words)


def _other_splits(plan: Plan) -> Iterator[tuple[tuple[str, int], dict[str, float]]]:
    """Other ways to split the GPUs: the key of `placement.split` with its value, and by what factor it changes the time
    of each pool's calls."""
    if plan.pools.keys() != {ACTOR_POOL, CRITIC_POOL}:
        return
    actor, critic = plan.pools[ACTOR_POOL].counts_by_node, plan.pools[CRITIC_POOL].counts_by_node
    if len({*actor.values()}) > 1 or len({*critic.values()}) > 1:
        return
    if actor.keys().isdisjoint(critic):
        key, mine, rest = "actor_nodes", len(actor), len(critic)
    else:
        key, mine, rest = "actor_gpus_per_node", max(actor.values()), max(critic.values())
    for new in range(1, mine + rest):
        if new != mine:
            yield (key, new), {ACTOR_POOL: mine / new, CRITIC_POOL: rest / (mine + rest - new)}


def _split_plan(run: Run, keys: Mapping[str, float]) -> tuple[Plan | None, str]:
    """The plan of the strategy `split` with these keys of `placement.split`, None if there is no such plan; and the
    first problem that `rolepool plan` would report, "" if there is none."""
    plan = None
    try:
        changed = Config.model_validate(run.config).model_dump()
        changed["placement"]["strategy"] = "split"
        changed["placement"]["split"].update(keys)
        config = Config.model_validate(changed)
        plan = build_plan(config)
        return plan, next(iter(find_problems(config, plan)), "")
    except (ValidationError, RolepoolError) as error:
        return plan, one_line(error)


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
            # The key that balances the ranks and is not set yet. Response lengths are not known before generation, so
            # they cannot be balanced.
            override, batched = _scaled(run, "data.max_response_length", 0.5), OPERATIONS.get(operation)
            if batched is not None and batched.micro_batch is not None:
                balancing = ("trainer.balance_batch", batched.micro_batch.by_tokens)
                unset = [f"{name}=true" for name in balancing if value_at(run.config, name) is False]
                override = [*unset, _scaled(run, "data.train_batch_size", 2)][0]
            words = {"operation": operation, "others": f"{others} ranks" if others > 1 else "rank", "pool": pool}
            # Equal ranks would end together at their mean, which shortens the step if it waits for this operation.
            gain_s = min(mean_s, summary.path_s.get((pool, operation), 0.0))
            numbers = {"waited_s": waited_s, "step_s": summary.step_s}
            yield _finding("imbalance", numbers, override, gain_s=gain_s, share=waited_s / summary.step_s, **words)


def _hand_overs(run: Run, summary: Summary) -> Iterator[Finding]:
    handed_s = summary.path_s.get(("", ""), 0.0)
    driver_s = sum(seconds for (pool, _), seconds in summary.path_s.items() if pool == DRIVER)
    share = (handed_s + driver_s) / summary.step_s if summary.step_s else 0.0
    if share > HAND_OVER:
        numbers = {"share": share, "driver_s": driver_s, "hand_over_s": handed_s, "step_s": summary.step_s}
        keys = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
        override = " ".join(_scaled(run, key, 2) for key in keys)
        yield _finding("hand_overs", numbers, override, gain_s=(handed_s + driver_s) / 2)


def _memory(run: Run) -> Iterator[Finding]:
    """How full the fullest GPU of each pool was, if the monitor recorded the size of its memory."""
    gpus = [gpu for sample in run.monitor for gpu in sample["gpus"] if gpu.get("memory_total_bytes")]
    for name, pool in run.plan.pools.items() if run.plan is not None else ():
        sizes = [(gpu["memory_bytes"], gpu["memory_total_bytes"]) for gpu in gpus if name in gpu["pools"]]
        fullest = max(sizes, key=lambda size: size[0] / size[1], default=(0, 0))
        used, total = fullest[0] / 2**30, fullest[1] / 2**30
        left = 1 - used / total if total else LITTLE_MEMORY_LEFT
        # The key that decides most about a pool's memory: the micro-batch size of a role that is trained, or else of
        # one that computes log-probs or scores, or else the key of the rollout.
        known = [ROLE_SPECS[role] for role in pool.roles if role in ROLE_SPECS]  # others are of the run's extensions
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
