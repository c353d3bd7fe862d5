"""A profile: what recorded runs say about the work of a step and about what each part of it costs.

Owns turning spans into observations of work and time, and the work of each operation under another config and plan.
Several recordings of the same models on the same device make a better profile. Does not simulate anything.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from rolepool.config import Config
from rolepool.config.run_keys import DataConfig
from rolepool.errors import ConfigError
from rolepool.metrics.spans import BETWEEN_STEPS, DRIVER, RULE_POOL, Part, Recorded, Span, step_bounds
from rolepool.placement.estimate import MicroBatch
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, Operation, Role
from rolepool.planner.costs import LinearCost, Seconds, Work

MAX_STEPS = 40
"""Steps of a recording that are used. More would take longer and add little."""
NUM_WARM_STEPS = 2
"""The first steps compile and allocate, so they are not used if there are others."""
REST = "rest"
"""The time of a call outside of its parts, with fetching its inputs."""
SYNC, SYNC_BETWEEN = "update_weights", "update_weights between pools"
BYTES_PER_S = 1e9
"""How fast processes fetch batches, if no batch was recorded."""
DECODE, PREFILL = "decode", "prefill"


class Recording(NamedTuple):
    """What a run recorded while it had one placement."""

    config: Config
    plan: Plan
    spans: Sequence[Recorded]


@dataclass
class Rows:
    """The work of rows of certain lengths."""

    totals: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 4))
    """Rows, pieces, tokens and attended tokens of each operation and part, added up over ranks and steps."""
    num_calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    live: list[tuple[int, list[Part]]] = field(default_factory=list)
    """For each generation, the rows of its slowest rank, and the decode steps of that rank by running sequences."""
    num_prompt: list[float] = field(default_factory=list)
    num_response: list[float] = field(default_factory=list)
    """Mean tokens of the prompts and responses of each generation."""


class Profile:
    """Costs and work that were measured in recordings of the same models."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self.recordings = [one for one in recordings if one.spans]
        self.rows: dict[tuple[int, int], Rows] = defaultdict(Rows)
        """By data.max_prompt_length and data.max_response_length."""
        self.sharing: list[Recording] = []
        """Recordings of pools that shared GPUs, whose calls slowed each other down. They are not in the costs."""
        self.step_s: dict[int, float] = {}
        """The median step time of each recording, by its position."""
        helpers = {one.span.rank for each in self.recordings[:1] for one in each.spans if one.span.pool == RULE_POOL}
        self.num_helpers = max(1, len(helpers))
        """The processes of the rule reward."""
        fetched = [(0.0, 0)]
        """Seconds and bytes of the batches that processes fetched from the object store."""
        self._seen: dict[tuple[str, str], list[tuple[Work, int, float]]] = defaultdict(list)
        gaps: dict[str, list[float]] = defaultdict(list)
        for position, one in enumerate(self.recordings):
            steps, bounds = measured_steps(one.spans), step_bounds(one.spans)
            if steps:
                self.step_s[position] = median(bounds[step][1] - bounds[step][0] for step in steps)
            if one.plan.sharing_pools and len(self.recordings) > 1:
                self.sharing.append(one)
                continue
            chosen = set(steps)
            used = [each for each in one.spans if each.step in chosen]
            self._observe(one, used, gaps)
            fetched += [(each.span.part_seconds.get("fetch", 0.0), each.span.num_bytes) for each in used]
        if not self._seen:
            raise ConfigError("predict: the run has no completed step with spans; give a run folder with some steps")
        self.costs = {key: LinearCost.fit(seen) for key, seen in self._seen.items()}
        took_s, num_bytes = np.sum(fetched, axis=0)
        self.bytes_per_s = num_bytes / took_s if took_s else BYTES_PER_S
        self.hand_over_s = {operation: median(of_operation) for operation, of_operation in gaps.items()}

    def _observe(self, one: Recording, spans: Sequence[Recorded], gaps: dict[str, list[float]]) -> None:
        data = one.config.data
        rows = self.rows[data.max_prompt_length, data.max_response_length]
        calls: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
        between: dict[int, list[Span]] = defaultdict(list)
        num_rows = data.train_batch_size * one.config.actor_rollout_ref.rollout.n
        homes = {one.plan.roles.get(Role.Actor), one.plan.roles.get(Role.Rollout)}
        has_work = any(part.num_tokens for _, _, span in spans for part in span.parts)  # older runs and logs have none
        for step, operation, span in spans:
            if operation in BETWEEN_STEPS:
                continue
            calls[step, operation, span.call].append(span)
            if operation == SYNC and len(homes) > 1:
                between[step].append(span)
                continue
            of_rows = num_rows if span.pool == DRIVER else span.num_rows
            works = _works_of(span, num_rows, has_work)
            for name, work, _ in works:
                total = rows.totals[operation, name]
                for index, amount in enumerate((0, *work)):
                    total[index] += amount
            for name in {name for name, *_ in works}:
                rows.totals[operation, name][0] += of_rows
            rows.num_calls[operation] += 1
        for (_, operation, _), of_call in calls.items():
            if operation == SYNC and len(homes) > 1:
                continue
            last = max(of_call, key=lambda span: span.end_s)  # a call takes as long as its slowest rank
            ranks = ranks_of(one.config, one.plan, last.role, last.pool, operation)
            start_s = min(span.start_s for span in of_call)
            for name, work, seconds in _works_of(last, num_rows, has_work):
                waited_s = last.start_s - start_s if name == REST else 0.0
                self._seen[operation, name].append((work, ranks, seconds + waited_s))
        for of_step in between.values():
            took_s = max(span.end_s for span in of_step) - min(span.start_s for span in of_step)
            ranks = one.plan.pool_of(Role.Actor).world_size
            self._seen[SYNC_BETWEEN, REST].append((Work(1), ranks, took_s))
        for (_, operation, _), of_call in calls.items():
            if operation == "gen":
                _add_generation(rows, data, max(of_call, key=lambda span: span.duration_s))
        _add_gaps(spans, gaps)

    def rows_like(self, config: Config) -> tuple[Rows, float, float]:
        """The recorded rows whose lengths are nearest to those of a config, and how many times as long its prompts and
        responses are. Lengths are assumed to grow with the largest lengths that the config allows."""
        prompt, response = config.data.max_prompt_length, config.data.max_response_length

        def distance(key: tuple[int, int]) -> float:
            return abs(math.log(key[0] / prompt)) + abs(math.log(key[1] / response))

        nearest = min(self.rows, key=distance)
        return self.rows[nearest], prompt / nearest[0], response / nearest[1]

    def seconds(self, operation: str, work: Mapping[str, Work], num_ranks: int) -> Seconds:
        """The time of a call of an operation."""
        parts = [self.costs[operation, name].seconds(amount, num_ranks) for name, amount in work.items()]
        return Seconds(sum(part.mean for part in parts), sum(part.variance for part in parts))

    def work(
        self, config: Config, role: Role | None, operation: Operation, num_parts: int, size: MicroBatch | None
    ) -> dict[str, Work]:
        """The work of one call of an operation on each of the ranks or groups that share it, by part."""
        rows, of_prompt, of_response = self.rows_like(config)
        prompt, response = fmean(rows.num_prompt), fmean(rows.num_response)
        longer = (prompt * of_prompt + response * of_response) / (prompt + response)
        num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n / num_parts
        found: dict[str, Work] = {}
        for (name, part), (of_rows, pieces, tokens, attended) in rows.totals.items():
            if name != operation.name:
                continue
            each = num_rows / max(of_rows, 1)
            factor = of_prompt if part == PREFILL else 1.0 if role is None else longer
            amount = Work(pieces / rows.num_calls[name], tokens * each * factor, attended * each * factor**2)
            if part == DECODE:
                amount = self._decode(config, rows, num_rows, of_response, prompt * of_prompt, response * of_response)
            elif part != REST and size is not None and role is not None:
                amount = amount._replace(num_pieces=_num_pieces(config, role, operation, size, num_rows, amount))
            found[part] = amount
        return found

    def _decode(
        self, config: Config, rows: Rows, num_rows: float, of_response: float, prompt: float, response: float
    ) -> Work:
        """The decode steps of a rank with so many rows: as many running sequences in each step as in the recorded
        generations with the most similar number of rows, in proportion."""
        nearest = min((number for number, _ in rows.live), key=lambda number: abs(math.log(number / num_rows)))
        alike = [parts for number, parts in rows.live if number == nearest]
        slots = config.actor_rollout_ref.rollout.max_num_seqs
        waves, at_once = max(1.0, num_rows / slots), min(num_rows, slots)
        longer = (prompt + response / 2) / (fmean(rows.num_prompt) + fmean(rows.num_response) / 2)
        steps = tokens = attended = 0.0
        for part in (one for parts in alike for one in parts):
            running = part.num_tokens / part.num_pieces / nearest * at_once
            if running < 0.5:
                continue
            num_steps = part.num_pieces * of_response * waves / len(alike)
            steps += num_steps
            tokens += num_steps * max(1.0, running)
            attended += num_steps * max(1.0, running) * part.num_attended / part.num_tokens * longer
        return Work(steps, tokens, attended)


def _works_of(span: Span, num_rows: int, has_parts: bool) -> list[tuple[str, Work, float]]:
    """The parts of a call on a rank: their names, work and seconds. The driver's work is in proportion to the rows of
    the whole batch."""
    counted = [part for part in span.parts if has_parts and part.name != "fetch"]
    rest_s = max(0.0, span.duration_s - sum(part.seconds for part in counted))
    rest = Work(1, num_rows if span.pool == DRIVER else span.num_tokens)
    return [*((part.name, Work(*part[2:]), part.seconds) for part in counted), (REST, rest, rest_s)]


def ranks_of(config: Config, plan: Plan, role: str, pool: str, operation: str) -> int:
    """The ranks that exchange data in an operation. Rollouts exchange data only within a tensor-parallel group."""
    if pool not in plan.pools:
        return 1
    spec = ROLE_SPECS.get(Role(role))
    if operation != SYNC and spec is not None and spec.tensor_parallel is not None:
        return int(config.at(spec.tensor_parallel))
    return plan.pools[pool].world_size


def measured_steps(spans: Iterable[Recorded]) -> list[int]:
    """The steps of a recording that are used: not the first ones, and not a step that has not ended."""
    steps = sorted({one.step for one in spans if one.operation == "gen"})
    used = steps[min(NUM_WARM_STEPS, max(0, len(steps) - 2)) :]
    stride = max(1, len(used) // MAX_STEPS)
    return used[::stride]


def _num_pieces(
    config: Config, role: Role, operation: Operation, size: MicroBatch, num_rows: float, work: Work
) -> float:
    """How many micro-batches (or updates, if the part has no tokens) a call makes on a rank."""
    num_batches, rows = 1.0, num_rows
    if operation.trains:
        key = f"{ROLE_SPECS[role].section}.ppo_mini_batch_size"
        num_batches = max(1.0, config.data.train_batch_size / config.at(key))
        rows = num_rows / num_batches
    if not work.num_tokens:
        return num_batches
    most = size.rows or max(1.0, size.tokens // (work.num_tokens / num_rows))
    return num_batches * math.ceil(rows / most)


def _add_generation(rows: Rows, data: DataConfig, slowest: Span) -> None:
    decoded = [part for part in slowest.parts if part.name == DECODE and part.num_tokens]
    num_tokens = slowest.num_tokens / max(1, slowest.num_rows)
    # If it is not recorded, prompts and responses are assumed to be in proportion to their largest lengths.
    num_sampled = num_tokens * data.max_response_length / (data.max_prompt_length + data.max_response_length)
    if decoded and slowest.num_rows:
        rows.live.append((slowest.num_rows, decoded))
        num_sampled = sum(part.num_tokens for part in decoded) / slowest.num_rows + 1  # one comes from the prefill
    rows.num_response.append(max(1.0, num_sampled))
    rows.num_prompt.append(max(1.0, num_tokens - num_sampled))


def _add_gaps(spans: Sequence[Recorded], gaps: dict[str, list[float]]) -> None:
    """For each call, how long after the end of what it waited for it started: its pool's last call, its inputs, and
    the driver."""
    calls: dict[tuple[int, str], list[Recorded]] = defaultdict(list)
    for recorded in spans:
        calls[recorded.span.call, recorded.span.pool].append(recorded)
    free: dict[str, float] = {}
    ended: dict[int, float] = {}
    for (number, pool), of_call in sorted(calls.items(), key=lambda item: min(one.span.start_s for one in item[1])):
        span = of_call[0].span
        start_s, end_s = min(one.span.start_s for one in of_call), max(one.span.end_s for one in of_call)
        causes = [ended[call] for call in span.after if call in ended]
        if pool in free:
            causes.append(free[pool])
        if free.get(DRIVER, math.inf) <= start_s and span.queued_s >= free[DRIVER]:
            causes.append(free[DRIVER])
        if pool in free and causes and pool != DRIVER:
            gaps[of_call[0].operation].append(max(0.0, start_s - max(causes)))
        free[pool] = end_s
        ended[number] = max(end_s, ended.get(number, 0.0))
