"""Findings: what a run's numbers mean, in plain words, and which key to change.

Owns the averages over the steps of a run (where each pool's time went, and the critical path), which are also on the
page, and the thresholds above which something is reported. Every finding includes the numbers it is based on.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from pydantic import ValidationError

from rolepool.config import Config
from rolepool.errors import RolepoolError, one_line
from rolepool.metrics.sampling import pool_use
from rolepool.metrics.spans import DRIVER, Recorded, Timeline, critical_path, lanes, step_metrics
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS
from rolepool.placement.strategies import ACTOR_POOL, CRITIC_POOL
from rolepool.report.run import Run, value_at

MAX_STEPS = 200
"""Steps over which averages are computed."""
MAX_REPLAYED_STEPS = 12

IDLE, IMBALANCE, HAND_OVER, SAVED = 0.3, 0.05, 0.05, 0.02
"""Thresholds, as fractions of a step. A change is suggested only if it saves more than the last one."""
LITTLE_MEMORY_LEFT, MUCH_MEMORY_LEFT = 0.05, 0.4

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
    """A sentence or two, the numbers in it, and the keys to change, with a value if the numbers give one."""

    text: str
    numbers: dict[str, float]
    keys: tuple[str, ...]


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


def replayed_step_s(grouped: SpansByStep, scales: Mapping[str, float]) -> float | None:
    """Duration of a step if each call of a pool took `scales[pool]` times as long; None if there are too few steps.

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
    for (_, number, pool), ranks in sorted(calls.items()):
        step, operation, span = ranks[0]
        start = max(free[pool], free[DRIVER], *(ends.get(call, 0.0) for call in span.after))
        if operation == "gen":
            starts.setdefault(step, start)
        slowest_s = max(recorded.span.duration_s for recorded in ranks)
        ends[number] = free[pool] = start + slowest_s * scales.get(pool, 1.0)
    first, *others = list(starts.values())[(len(starts) - 1) // 2 :] or [0.0]  # the first half is the ramp-up
    return (others[-1] - first) / len(others) if others else None


def find(run: Run, summary: Summary, grouped: SpansByStep) -> list[Finding]:
    """All findings about a run."""
    if not summary.steps:
        return []
    found = [*_idle_pool(run, summary, grouped), *_imbalance(run, summary), *_hand_overs(summary), *_memory(run)]
    saved_s, step_s = summary.saved_s, summary.step_s
    if saved_s > SAVED * step_s:
        text = f"Pools that worked at the same time saved {saved_s:.3g} s per step; a step took {step_s:.3g} s."
        found.append(Finding(text, {"saved_s": saved_s, "step_s": step_s}, ("placement.strategy",)))
    return found


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
    observation, numbers = f"{name} was idle {idle:.0%} of the time", {"idle_fraction": idle, "step_s": summary.step_s}
    now_s = replayed_step_s(grouped, {}) or 0.0
    then_s = {split: replayed_step_s(grouped, scales) or now_s for split, scales in _other_splits(run.plan)}
    shorter = [split for split in then_s if then_s[split] < now_s * (1 - SAVED)]
    if shorter:
        # A split that needs no other change is better than one that does.
        problems = {split: _problem_with(run, *split) for split in shorter}
        best = min(shorter, key=lambda split: (bool(problems[split]), then_s[split]))
        problem, estimate_s = problems[best], then_s[best] / now_s * summary.step_s
        override = f"placement.split.{best[0]}={best[1]}"
        text = f"{observation}. With {override} a step would take about {estimate_s:.3g} s instead of "
        text += f"{summary.step_s:.3g} s (an estimate: the measured spans, scaled linearly)."
        text += f" Another change is needed as well: {problem}." if problem else ""
        yield Finding(text, {**numbers, "estimated_step_s": estimate_s}, (override,))
    elif run.plan.pools.keys() == {ACTOR_POOL, CRITIC_POOL}:
        text = f"{observation}, and no other split of these GPUs makes a step shorter (an estimate: the measured "
        text += "spans, scaled linearly). One pool for all roles leaves no GPU idle; pools that share GPUs use each "
        text += "other's gaps."
        yield Finding(text, numbers, ("placement.strategy=standard", "placement.split.share=0.5"))
    else:
        yield Finding(f"{observation}: give it fewer GPUs or one more role.", numbers, ("placement.pools",))


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


def _problem_with(run: Run, key: str, value: int) -> str:
    """The first problem that `rolepool plan` would report with this value in `placement.split`; "" if there is none."""
    try:
        changed = Config.model_validate(run.config).model_dump()
        changed["placement"]["split"][key] = value
        config = Config.model_validate(changed)
        return next(iter(find_problems(config, build_plan(config))), "")
    except (ValidationError, RolepoolError) as error:
        return one_line(error)


def _imbalance(run: Run, summary: Summary) -> Iterator[Finding]:
    for pool, times_s in summary.pools_s.items():
        others = max(1, summary.num_ranks[pool] - 1)
        for (kind, _, operation), mean_s in times_s.items():
            waited_s = mean_s * summary.num_ranks[pool] / others
            if kind != "imbalance" or waited_s <= IMBALANCE * summary.step_s:
                continue
            # The key that balances the ranks and is not set yet. Response lengths are not known before generation, so
            # they cannot be balanced.
            key, batched = "data.max_response_length", OPERATIONS.get(operation)
            if batched is not None and batched.micro_batch is not None:
                balancing = ("trainer.balance_batch", batched.micro_batch.by_tokens)
                unset = [f"{name}=true" for name in balancing if value_at(run.config, name) is False]
                key = [*unset, "data.train_batch_size"][0]
            text = f"In {operation} the other {f'{others} ranks' if others > 1 else 'rank'} of {pool} waited "
            text += f"{waited_s:.3g} s per step ({waited_s / summary.step_s:.0%}) for the slowest rank."
            yield Finding(text, {"waited_s": waited_s, "step_s": summary.step_s}, (key,))


def _hand_overs(summary: Summary) -> Iterator[Finding]:
    handed_s = summary.path_s.get(("", ""), 0.0)
    driver_s = sum(seconds for (pool, _), seconds in summary.path_s.items() if pool == DRIVER)
    share = (handed_s + driver_s) / summary.step_s if summary.step_s else 0.0
    if share > HAND_OVER:
        text = f"{share:.0%} of a step's critical path is not work in a pool, but the driver ({driver_s:.3g} s) and "
        text += f"hand-overs between calls ({handed_s:.3g} s). Larger batches spread this time over more tokens."
        numbers = {"share": share, "driver_s": driver_s, "hand_over_s": handed_s, "step_s": summary.step_s}
        yield Finding(text, numbers, ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"))


def _memory(run: Run) -> Iterator[Finding]:
    """How full the fullest GPU of each pool was, if the monitor recorded the size of its memory."""
    gpus = [gpu for sample in run.monitor for gpu in sample["gpus"] if gpu.get("memory_total_bytes")]
    for name, pool in run.plan.pools.items() if run.plan is not None else ():
        sizes = [(gpu["memory_bytes"], gpu["memory_total_bytes"]) for gpu in gpus if name in gpu["pools"]]
        fullest = max(sizes, key=lambda size: size[0] / size[1], default=(0, 0))
        used, total = fullest[0] / 2**30, fullest[1] / 2**30
        left = 1 - used / total if total else LITTLE_MEMORY_LEFT
        if LITTLE_MEMORY_LEFT <= left <= MUCH_MEMORY_LEFT:
            continue
        # The key that decides most about a pool's memory: the micro-batch size of a role that is trained, or else of
        # one that computes log-probs or scores, or else the key of the rollout.
        known = [ROLE_SPECS[role] for role in pool.roles if role in ROLE_SPECS]  # others are of the run's extensions
        spec = min(known, key=lambda spec: (not spec.is_trained, not spec.batched), default=None)
        key = "placement.roles"
        if spec is not None:
            key = spec.batched[-1][1].rows if spec.batched else spec.memory_key
        text = f"{name} used at most {used:.1f} of {total:.1f} GiB of a GPU ({left:.0%} was free): "
        risk, room = "a longer batch may not fit; use smaller micro-batches.", "larger micro-batches would be faster."
        text += risk if left < LITTLE_MEMORY_LEFT else room
        yield Finding(text, {"used_gib": used, "total_gib": total}, (key,))


def duration(seconds: float) -> str:
    """Seconds in a unit that needs no exponent."""
    for unit, size in {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}.items():
        if seconds >= size * (2 if size > 1 else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def outside_load(run: Run) -> str | None:
    """How the later steps became longer while utilization fell; None if they did not."""
    used = [percent for sample in run.monitor for percent, _ in pool_use(sample).values()]
    times_s = [row["timing_s/step"] for row in run.metrics.values() if "timing_s/step" in row]
    if len(used) < 2 or len(times_s) < 2:
        return None
    early, late = (fmean(half) for half in (used[: len(used) // 2], used[len(used) // 2 :]))
    early_s, late_s = (fmean(half) for half in (times_s[: len(times_s) // 2], times_s[len(times_s) // 2 :]))
    if late_s < 1.5 * early_s or late > 0.8 * early:
        return None
    words = f"utilization fell from {early:.0f}% to {late:.0f}%, so other programs used the machine"
    return f"The later steps took {late_s / early_s:.1f} times as long while {words}."
