"""Findings: what a run's numbers mean, in plain words, and which key to change.

Owns the thresholds above which something is reported. Every finding includes the numbers it is
based on; its text is in `tables.yaml`. `summary` owns the averages, `outside_load` the sign of other
programs on the machine, and `collapse` the signs of a run that stops learning.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rolepool.placement.plan import DRIVER
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, RoleSpec
from rolepool.planner.predict import Prediction
from rolepool.report.collapse import signs_of_collapse
from rolepool.report.outside_load import outside_load
from rolepool.report.run import ReadRun, value_at
from rolepool.report.summary import Summary
from rolepool.report.tables import TABLES
from rolepool.units import duration

IMBALANCE = 0.05
"""Ranks that wait longer than this part of a step for the slowest rank are reported."""
HAND_OVER = 0.05
"""The driver and hand-overs are reported if they are more than this part of a step."""
SAVED = 0.02
"""Time saved by pools that work at the same time is reported above this part of a step."""
LITTLE_MEMORY_LEFT = 0.05
MUCH_MEMORY_LEFT = 0.4
"""Parts of a GPU's memory."""

GIB = 2**30


class Finding(NamedTuple):
    """A sentence or two, and the numbers in it."""

    text: str
    numbers: dict[str, float]
    overrides: tuple[str, ...] = ()
    """What to change: alternatives, each to be copied into the command of the next run."""
    gain_s: float = 0.0
    """Seconds per step that the change saves at most; 0 if the spans do not tell."""


def find(run: ReadRun, summary: Summary, predicted: Sequence[Prediction] = ()) -> list[Finding]:
    """All findings about a run: first what makes its times doubtful, then what endangers its
    learning, then by the seconds that can be gained. `predicted` are the run's own placement and
    the best other ones."""
    if not summary.steps:
        return []
    findings = [
        *_imbalance(run, summary),
        *_hand_overs(run, summary),
        *_memory(run),
        *_other_placement(summary, predicted),
        *_saved(summary),
    ]
    findings.sort(key=lambda finding: finding.gain_s, reverse=True)
    findings[:0] = _collapse(run)
    disturbed = outside_load(run)
    if disturbed:
        findings.insert(0, Finding(disturbed, {"step_s": summary.step_s}))
    return findings


def _finding(
    kind: str,
    numbers: dict[str, float],
    *overrides: str,
    gain_s: float = 0.0,
    **words: str | float,
) -> Finding:
    """A finding whose text contains these numbers and words."""
    fields: dict[str, str | float] = dict(words)
    for name, value in numbers.items():
        if name.endswith("_s"):
            fields[name] = duration(value)
        else:
            fields[name] = value
    template = TABLES.findings[kind]
    return Finding(
        text=template.format(**fields),
        numbers=numbers,
        overrides=overrides,
        gain_s=gain_s,
    )


def _scaled(run: ReadRun, key: str, factor: float) -> str:
    """The override that multiplies a key's value; the key alone if its value is not a number."""
    value = value_at(run.config, key)
    if isinstance(value, int):
        number = max(1, int(value * factor))
        return f"{key}={number}"
    if isinstance(value, float):
        # The keys with fractions are shares of memory; more than 0.9 leaves too little for others.
        share = min(0.9, value * factor)
        return f"{key}={share:.2g}"
    return key


# Findings about learning


CORRECTION = "algorithm.rollout_correction"


def _collapse(run: ReadRun) -> Iterator[Finding]:
    """An effective sample size that falls while gradients grow."""
    signs = signs_of_collapse(run)
    if signs is None:
        return
    numbers = {
        "first_size": signs.first_size,
        "last_size": signs.last_size,
        "first_norm": signs.first_norm,
        "last_norm": signs.last_norm,
        "num_steps": float(signs.num_steps),
    }
    yield _finding("collapse", numbers, _correcting_override(run))


def _correcting_override(run: ReadRun) -> str:
    """The correction that is not in force yet: first weights, then rejection. If both are, a
    smaller learning rate."""
    bypasses = value_at(run.config, f"{CORRECTION}.bypass_mode") is True
    if not bypasses and value_at(run.config, f"{CORRECTION}.rollout_is") is None:
        return f"{CORRECTION}.rollout_is=token"
    if value_at(run.config, f"{CORRECTION}.rollout_rs") is None:
        return f"{CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.01"
    return _scaled(run, "actor_rollout_ref.actor.optim.lr", 0.5)


# Findings about placement and time


def _other_placement(summary: Summary, predicted: Sequence[Prediction]) -> Iterator[Finding]:
    """The best other placement, if even the upper end of its predicted interval is faster."""
    if len(predicted) < 2:
        return
    best_other = predicted[1]
    if best_other.high_s < summary.step_s:
        numbers = {
            "step_s": summary.step_s,
            "predicted_s": best_other.step_s,
            "at_most_s": best_other.high_s,
        }
        yield _finding(
            "other_placement",
            numbers,
            best_other.name,
            gain_s=summary.step_s - best_other.step_s,
            pools=best_other.plan.sizes_in_words,
        )


def _saved(summary: Summary) -> Iterator[Finding]:
    """The time that pools saved because they worked at the same time."""
    if summary.saved_s > SAVED * summary.step_s:
        numbers = {"saved_s": summary.saved_s, "step_s": summary.step_s}
        yield _finding("saved", numbers)


def _imbalance(run: ReadRun, summary: Summary) -> Iterator[Finding]:
    """Operations in which the ranks of a pool wait long for the slowest of them."""
    for pool, times_s in summary.pools_s.items():
        num_ranks = summary.num_ranks[pool]
        num_others = max(1, num_ranks - 1)
        others = f"{num_others} ranks" if num_others > 1 else "rank"
        for (kind, _, operation), mean_s in times_s.items():
            # The mean includes the slowest rank, which does not wait.
            waited_s = mean_s * num_ranks / num_others
            if kind != "imbalance" or waited_s <= IMBALANCE * summary.step_s:
                continue
            # Equal ranks would end together at their mean, which shortens the step if it waits for
            # this operation.
            gain_s = min(mean_s, summary.path_s.get((pool, operation), 0.0))
            yield _finding(
                "imbalance",
                {"waited_s": waited_s, "step_s": summary.step_s},
                _balancing_override(run, operation),
                gain_s=gain_s,
                share=waited_s / summary.step_s,
                operation=operation,
                others=others,
                pool=pool,
            )


def _balancing_override(run: ReadRun, operation: str) -> str:
    """The key that balances the ranks in an operation and is not set yet; if all are set, a larger
    batch."""
    spec = OPERATIONS.get(operation)
    if spec is None or spec.micro_batch is None:
        # Response lengths are not known before generation, so they cannot be balanced.
        return _scaled(run, "data.max_response_length", 0.5)
    for key in ("trainer.balance_batch", spec.micro_batch.by_tokens):
        if value_at(run.config, key) is False:
            return f"{key}=true"
    return _scaled(run, "data.train_batch_size", 2)


def _hand_overs(run: ReadRun, summary: Summary) -> Iterator[Finding]:
    """The part of the critical path that is not work in a pool."""
    hand_over_s = summary.path_s.get(("", ""), 0.0)
    driver_s = 0.0
    for (pool, _), seconds in summary.path_s.items():
        if pool == DRIVER:
            driver_s += seconds
    not_work_s = hand_over_s + driver_s
    if not summary.step_s:
        return
    share = not_work_s / summary.step_s
    if share <= HAND_OVER:
        return
    numbers = {
        "share": share,
        "driver_s": driver_s,
        "hand_over_s": hand_over_s,
        "step_s": summary.step_s,
    }
    # Both keys, so that the number of mini-batches stays the same.
    keys = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    override = " ".join(_scaled(run, key, 2) for key in keys)
    yield _finding("hand_overs", numbers, override, gain_s=not_work_s / 2)


# Findings about memory


def _memory(run: ReadRun) -> Iterator[Finding]:
    """How full the fullest GPU of each pool was, if the monitor recorded the size of its memory."""
    if run.plan is None:
        return
    for name, pool in run.plan.pools.items():
        # Roles of the run's extensions are not known here.
        specs = [ROLE_SPECS[role] for role in pool.roles if role in ROLE_SPECS]
        fullest = _fullest_gpu(run, name)
        if not specs or fullest is None:
            continue
        left = 1 - fullest.part
        key = _memory_key(run, specs)
        # A micro-batch size that is not set is the largest that fits.
        is_chosen_by_us = bool(key) and value_at(run.config, key) is None
        if left < LITTLE_MEMORY_LEFT:
            kind = "little_memory_left"
            if is_chosen_by_us:
                override = f"{key}=1"
            else:
                override = _scaled(run, key, 0.5)
        elif left > MUCH_MEMORY_LEFT and not is_chosen_by_us:
            kind = "much_memory_left"
            override = _scaled(run, key, 2)
        else:
            continue
        numbers = {
            "used_gib": fullest.used_bytes / GIB,
            "total_gib": fullest.total_bytes / GIB,
        }
        yield _finding(kind, numbers, override, pool=name, left=left)


class UsedMemory(NamedTuple):
    """How full a GPU was in a sample."""

    used_bytes: int
    total_bytes: int

    @property
    def part(self) -> float:
        return self.used_bytes / self.total_bytes


def _fullest_gpu(run: ReadRun, pool: str) -> UsedMemory | None:
    """A pool's GPU in the sample in which it was fullest; None if no sample tells the size of its
    memory."""
    fullest: UsedMemory | None = None
    for sample in run.monitor:
        for gpu in sample["gpus"]:
            total_bytes = gpu.get("memory_total_bytes")
            if not total_bytes or pool not in gpu["pools"]:
                continue
            used = UsedMemory(gpu["memory_bytes"], total_bytes)
            if fullest is None or used.part > fullest.part:
                fullest = used
    return fullest


def _memory_key(run: ReadRun, specs: Sequence[RoleSpec]) -> str:
    """The key that decides most about a pool's memory: the micro-batch size of a role that is
    trained, or else of one that computes log-probs or scores, or else the key of the rollout."""

    def sort_key(spec: RoleSpec) -> tuple[bool, bool]:
        """Roles that are trained come first, and then roles with micro-batches."""
        return not spec.is_trained, not spec.batched

    spec = min(specs, key=sort_key)
    if not spec.batched:
        return spec.memory_key
    _, micro_batch = spec.batched[-1]
    if value_at(run.config, micro_batch.by_tokens):
        return micro_batch.tokens
    return micro_batch.rows
