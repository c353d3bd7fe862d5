"""A profile: what recorded runs say about the work of a step and about what each part of it costs.

Owns turning spans into observations of work and time, and the work of each operation under another
config and plan. `planner.costs` fits costs to the observations. Several recordings of the same
models on the same device make a better profile. Does not simulate anything.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from rolepool.config import Config
from rolepool.config.model_files import ShapeUnknown
from rolepool.config.run_keys import DataConfig
from rolepool.errors import ConfigError
from rolepool.metrics.sharding_times import ShardingTime
from rolepool.metrics.spans import (
    BETWEEN_STEPS,
    DRIVER,
    PREPARATIONS,
    RULE_POOL,
    Part,
    Recorded,
    Span,
    may_begin_step,
    step_bounds,
)
from rolepool.metrics.timeline import Timeline
from rolepool.placement.built_in_roles import UPDATE_WEIGHTS
from rolepool.placement.estimate import MicroBatch, shape_of
from rolepool.placement.plan import Plan
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Operation, Role
from rolepool.planner.costs import (
    ALL_VISIBLE,
    PARTLY_VISIBLE,
    PRIOR_SHARES,
    PRIOR_SHARES_OF_DECODING,
    PRIOR_SHARES_OF_REST,
    Array,
    LinearCost,
    MeasuredWork,
    Seconds,
    Work,
)
from rolepool.planner.sharding import PieceSharding, ShardingCosts

MAX_STEPS = 40
"""Steps of a recording that are used. More would take longer and add little."""
NUM_WARM_STEPS = 2
"""The first steps compile and allocate, so they are not used if there are others."""
REST = "rest"
"""The time of a call outside of its parts, with fetching its inputs."""
SYNC = UPDATE_WEIGHTS
SYNC_BETWEEN = "update_weights between pools"
"""A sync counts as another operation if its roles are in different pools."""
BYTES_PER_S = 1e9
"""How fast processes fetch batches, if no batch was recorded."""
DECODE = "decode"
PREFILL = "prefill"
FETCH = "fetch"
NO_ROLE = Role("")
"""Stands for the driver, whose work does not depend on the lengths of rows."""


class Recording(NamedTuple):
    """What a run recorded while it had one placement."""

    config: Config
    plan: Plan
    spans: Sequence[Recorded]
    sharding: Sequence[ShardingTime] = ()
    """What the run measured at its start; empty in older recordings."""

    @property
    def step_s(self) -> float:
        """The median step time; NaN if no step was measured."""
        bounds = step_bounds(self.spans)
        times_s = []
        for step in measured_steps(self.spans):
            begin_s, end_s = bounds[step]
            times_s.append(end_s - begin_s)
        return median(times_s or [math.nan])


@dataclass
class Totals:
    """The work of an operation, added up over calls, ranks and steps."""

    num_calls: int = 0
    num_rows: int = 0
    parts: dict[str, Array] = field(default_factory=lambda: defaultdict(lambda: np.zeros(3)))
    """Pieces, tokens and attended tokens of each part."""


@dataclass
class Rows:
    """The work of rows of certain lengths."""

    totals: dict[str, Totals] = field(default_factory=lambda: defaultdict(Totals))
    """By operation."""
    live: list[tuple[int, list[Part]]] = field(default_factory=list)
    """For each generation, the rows of its slowest rank, and the decode steps of that rank by
    running sequences."""
    num_prompt: list[float] = field(default_factory=list)
    num_response: list[float] = field(default_factory=list)
    """Mean tokens of the prompts and responses of each generation."""


class MeanLengths(NamedTuple):
    """Mean tokens of prompts and responses."""

    prompt: float
    response: float


class RowsLike(NamedTuple):
    """The recorded rows that are most like those of a config."""

    rows: Rows
    prompt_factor: float
    """How many times as long the prompts of the config are."""
    response_factor: float

    @property
    def recorded(self) -> MeanLengths:
        return MeanLengths(fmean(self.rows.num_prompt), fmean(self.rows.num_response))

    @property
    def num_tokens(self) -> float:
        """Mean tokens of a row of the config."""
        prompt, response = self.recorded
        return prompt * self.prompt_factor + response * self.response_factor


class Profile:
    """Costs and work that were measured in recordings of the same models."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self.recordings = [recording for recording in recordings if recording.spans]
        self.rows: dict[tuple[int, int], Rows] = defaultdict(Rows)
        """By data.max_prompt_length and data.max_response_length."""
        self.sharing: list[Recording] = []
        """Recordings of pools that shared GPUs, whose calls slowed each other down. They are not in
        the costs."""
        self.num_helpers = self._count_helpers()
        """The processes of the rule reward."""
        self._measured: dict[tuple[str, str], list[MeasuredWork]] = defaultdict(list)
        """The measured work by operation and part."""
        self._hand_overs_s: dict[str, list[float]] = defaultdict(list)
        self._fetched_s = 0.0
        self._fetched_bytes = 0
        """The batches that processes fetched from the object store."""
        has_several = len(self.recordings) > 1
        for recording in self.recordings:
            if recording.plan.sharing_pools and has_several:
                self.sharing.append(recording)
            else:
                self._observe(recording)
        if not self._measured:
            raise ConfigError(
                "predict: the run has no completed step with spans; give a run folder with some steps"
            )

        sharding_times: list[ShardingTime] = []
        for recording in self.recordings:
            sharding_times.extend(recording.sharding)
        self.sharding = ShardingCosts(sharding_times)
        self.costs: dict[tuple[str, str], LinearCost] = {}
        for operation, part in self._measured:
            self.costs[operation, part] = self._fit(operation, part)

        self.bytes_per_s = BYTES_PER_S
        if self._fetched_s:
            self.bytes_per_s = self._fetched_bytes / self._fetched_s
        self.hand_over_s: dict[str, float] = {}
        for operation, seconds in self._hand_overs_s.items():
            self.hand_over_s[operation] = median(seconds)

    def _count_helpers(self) -> int:
        ranks: set[int] = set()
        for recording in self.recordings[:1]:
            for recorded in recording.spans:
                span = recorded.span
                if span.pool == RULE_POOL:
                    ranks.add(span.rank)
        return max(1, len(ranks))

    def is_measured(self, operation: str) -> bool:
        return any(measured == operation for measured, _ in self.costs)

    def _fit(self, operation: str, part: str) -> LinearCost:
        """The cost of a part of an operation."""
        shares = PRIOR_SHARES
        if part == DECODE:
            shares = PRIOR_SHARES_OF_DECODING
        elif part == REST:
            shares = PRIOR_SHARES_OF_REST
        visible = PARTLY_VISIBLE
        if self.recordings[0].plan.device == "cpu":
            visible = ALL_VISIBLE
        return LinearCost.fit(
            measured=self._measured[operation, part],
            shares=shares,
            sharding=self._sharding_of(operation, part),
            visible=visible,
        )

    def _sharding_of(self, operation: str, part: str) -> PieceSharding | None:
        """What sharding adds to each piece of a part; None if that was not measured, or if the
        model is not known."""
        role = _role_of(operation)
        if role is None or not self.sharding.is_measured:
            return None
        with suppress(ShapeUnknown):
            shape = shape_of(self.recordings[0].config, role)
            # The embeddings are gathered on their own, like a layer.
            num_units = shape.num_layers + 1
            return self.sharding.of_model(part, num_units, shape.num_params)
        return None

    def _observe(self, recording: Recording) -> None:
        """Add what the calls of a recording tell."""
        steps = set(measured_steps(recording.spans))
        # With the steps before, because their calls are what the first calls of a step waited for.
        # What was generated ahead waited for the weights of an earlier one.
        num_before = 1 + recording.config.algorithm.max_staleness
        used_steps = set(steps)
        for back in range(1, num_before + 1):
            used_steps.update(step - back for step in steps)
        timeline = Timeline(recorded for recorded in recording.spans if recorded.step in used_steps)
        is_sync_between = _syncs_between_pools(recording)
        lengths = _largest_lengths(recording.config)
        rows = self.rows[lengths]
        calls = _calls_of(timeline, steps, is_sync_between)
        for operation, positions in calls.items():
            if operation.name == SYNC and is_sync_between:
                self._observe_sync_between(recording, timeline, positions)
                continue
            self._observe_call(
                recording,
                rows=rows,
                timeline=timeline,
                operation=operation.name,
                positions=positions,
            )

    def _observe_sync_between(
        self,
        recording: Recording,
        timeline: Timeline,
        positions: Sequence[int],
    ) -> None:
        """A weight sync from one pool to another. Its spans are those of several calls."""
        spans = [timeline[position].span for position in positions]
        first = spans[0]
        self._add_hand_over(SYNC, timeline, positions, first)
        ended_s = max(span.end_s for span in spans)
        measured = MeasuredWork(
            work=Work(1),
            num_ranks=recording.plan.pool_of(Role.Actor).world_size,
            seconds=ended_s - first.start_s,
        )
        self._measured[SYNC_BETWEEN, REST].append(measured)

    def _observe_call(
        self,
        recording: Recording,
        rows: Rows,
        timeline: Timeline,
        operation: str,
        positions: Sequence[int],
    ) -> None:
        """A call, of which each rank has a span."""
        spans = [timeline[position].span for position in positions]
        # The ranks of a pool start a call when each of them has ended the one before. A rank that
        # comes early waits for the others inside the call, so a call counts from the start of its
        # latest rank.
        latest = spans[-1]
        last_to_end = max(spans, key=lambda span: span.end_s)
        self._add_hand_over(operation, timeline, positions, latest)

        config = recording.config
        num_ranks = ranks_of(
            config,
            recording.plan,
            role=last_to_end.role,
            pool=last_to_end.pool,
            operation=operation,
        )
        # If ranks wait for each other, the latest one waits least. Otherwise a call takes as long
        # as its slowest.
        counted = last_to_end
        if num_ranks > 1:
            counted = latest
        took_s = last_to_end.end_s - latest.start_s
        for part, work, seconds in _works_of(counted, config.rows_of_step):
            if part == REST:
                # What the counted rank does not explain of the time of the call.
                unexplained_s = took_s - counted.duration_s
                seconds += max(-seconds, unexplained_s)
            measured = MeasuredWork(work, num_ranks, seconds)
            self._measured[operation, part].append(measured)

        self._add_totals(rows.totals[operation], spans, config.rows_of_step)
        known = OPERATIONS.get(operation)
        if known is not None and known.generates:
            slowest = max(spans, key=lambda span: span.duration_s)
            _add_generation(rows, config.data, slowest)

    def _add_hand_over(
        self,
        operation: str,
        timeline: Timeline,
        positions: Sequence[int],
        begun: Span,
    ) -> None:
        """Note how long after the end of what it waited for a call has begun."""
        first = timeline[positions[0]].span
        if first.pool == DRIVER:
            return  # nothing is handed over to the driver
        causes_s = []
        for position in positions:
            if timeline[position].span.call == first.call:
                causes_s.append(timeline.cause_s(position))
        caused_s = max(causes_s)
        # Nothing causes the first call of a recording.
        if math.isfinite(caused_s):
            waited_s = begun.start_s - caused_s
            self._hand_overs_s[operation].append(max(0.0, waited_s))

    def _add_totals(self, totals: Totals, spans: Iterable[Span], num_rows: int) -> None:
        for span in spans:
            totals.num_calls += 1
            if span.pool == DRIVER:
                totals.num_rows += num_rows
            else:
                totals.num_rows += span.num_rows
            self._fetched_s += span.part_seconds.get(FETCH, 0.0)
            self._fetched_bytes += span.num_bytes
            for part, work, _ in _works_of(span, num_rows):
                totals.parts[part] += work

    def rows_like(self, config: Config) -> RowsLike:
        """The recorded rows whose lengths are nearest to those of a config. Lengths are assumed to
        grow with the largest lengths that the config allows."""
        prompt, response = _largest_lengths(config)

        def distance(lengths: tuple[int, int]) -> float:
            recorded_prompt, recorded_response = lengths
            prompt_distance = abs(math.log(recorded_prompt / prompt))
            response_distance = abs(math.log(recorded_response / response))
            return prompt_distance + response_distance

        nearest = min(self.rows, key=distance)
        nearest_prompt, nearest_response = nearest
        return RowsLike(
            rows=self.rows[nearest],
            prompt_factor=prompt / nearest_prompt,
            response_factor=response / nearest_response,
        )

    def seconds(self, operation: str, work: Mapping[str, Work], num_ranks: int) -> Seconds:
        """The time of a call of an operation."""
        parts = []
        for part, amount in work.items():
            cost = self.costs[operation, part]
            parts.append(cost.seconds(amount, num_ranks))
        mean = sum(part.mean for part in parts)
        variance = sum(part.variance for part in parts)
        return Seconds(mean, variance)

    def work(
        self,
        config: Config,
        role: Role,
        operation: Operation,
        num_parts: int,
        size: MicroBatch | None,
    ) -> dict[str, Work]:
        """The work of one call of an operation on each of the ranks or groups that share it, by
        part."""
        like = self.rows_like(config)
        recorded = like.recorded
        longer = like.num_tokens / (recorded.prompt + recorded.response)
        totals = like.rows.totals[operation.name]
        num_rows = config.rows_of_step / num_parts
        row_factor = num_rows / max(totals.num_rows, 1)
        works = {}
        for part, (num_pieces, num_tokens, num_attended) in totals.parts.items():
            if part == DECODE and like.rows.live:
                works[part] = _decode(config, like, num_rows)
                continue
            length_factor = longer
            if part == PREFILL:
                length_factor = like.prompt_factor
            elif role == NO_ROLE:
                length_factor = 1.0
            work = Work(
                num_pieces=num_pieces / totals.num_calls,
                num_tokens=num_tokens * row_factor * length_factor,
                num_attended=num_attended * row_factor * length_factor**2,
            )
            if part != REST and size is not None:
                num_batches = _num_mini_batches(config, role, operation)
                work = _in_micro_batches(work, size, num_rows, num_batches)
            works[part] = work
        return works


class _Operation(NamedTuple):
    """What the spans of one call have in common."""

    step: int
    name: str
    call: int


def _calls_of(
    timeline: Timeline, steps: set[int], is_sync_between: bool
) -> dict[_Operation, list[int]]:
    """The positions of the spans of each call of these steps."""
    calls: dict[_Operation, list[int]] = defaultdict(list)
    for position, (step, operation, span) in enumerate(timeline):
        if step not in steps or operation in BETWEEN_STEPS:
            continue
        call = span.call
        if operation == SYNC and is_sync_between:
            # It has several calls in each of its pools; they count as one.
            call = 0
        calls[_Operation(step, operation, call)].append(position)
    return calls


def _syncs_between_pools(recording: Recording) -> bool:
    homes = recording.plan.roles
    return homes.get(Role.Actor) != homes.get(Role.Rollout)


def _largest_lengths(config: Config) -> tuple[int, int]:
    return config.data.max_prompt_length, config.data.max_response_length


def _role_of(operation: str) -> Role | None:
    for role, spec in ROLE_SPECS.items():
        if OPERATIONS.get(operation) in spec.operations:
            return role
    return None


def _num_mini_batches(config: Config, role: Role, operation: Operation) -> float:
    if not operation.trains:
        return 1.0
    key = f"{ROLE_SPECS[role].section}.ppo_mini_batch_size"
    mini_batch_size: int = config.at(key)
    return max(1.0, config.data.train_batch_size / mini_batch_size)


def _in_micro_batches(
    work: Work,
    size: MicroBatch,
    num_rows: float,
    num_batches: float,
) -> Work:
    """The same work in pieces of this size. Work without tokens, such as that of an optimizer, is
    done once for each mini-batch."""
    num_pieces = num_batches
    if work.num_tokens:
        tokens_per_row = work.num_tokens / num_rows
        rows_per_piece = size.rows or max(1.0, size.tokens // tokens_per_row)
        rows_per_batch = num_rows / num_batches
        num_pieces *= math.ceil(rows_per_batch / rows_per_piece)
    return work._replace(num_pieces=num_pieces)


def _decode(config: Config, like: RowsLike, num_rows: float) -> Work:
    """The decode steps of a rank with so many rows: as many running sequences in each step as in
    the recorded generations with the most similar number of rows, in proportion."""
    live = like.rows.live

    def distance(number: int) -> float:
        return abs(math.log(number / num_rows))

    recorded_numbers = [number for number, _ in live]
    nearest = min(recorded_numbers, key=distance)
    generations = [decode_steps for number, decode_steps in live if number == nearest]

    slots = config.actor_rollout_ref.rollout.max_num_seqs
    num_waves = max(1.0, num_rows / slots)
    at_once = min(num_rows, slots)

    # A decode step reads the prompt and, on average, half of the response.
    prompt, response = like.recorded
    half_response = response / 2
    longer_prompt = prompt * like.prompt_factor
    longer_half_response = half_response * like.response_factor
    longer = (longer_prompt + longer_half_response) / (prompt + half_response)

    steps = 0.0
    tokens = 0.0
    attended = 0.0
    for decode_steps in generations:
        for part in decode_steps:
            running = part.num_tokens / part.num_pieces / nearest * at_once
            if running < 0.5:
                continue
            num_steps = part.num_pieces * like.response_factor * num_waves / len(generations)
            num_tokens = num_steps * max(1.0, running)
            steps += num_steps
            tokens += num_tokens
            attended += num_tokens * part.num_attended / part.num_tokens * longer
    return Work(num_pieces=steps, num_tokens=tokens, num_attended=attended)


class PartOfCall(NamedTuple):
    """The work and time of a part of a call on one rank."""

    name: str
    work: Work
    seconds: float


def _works_of(span: Span, num_rows: int) -> list[PartOfCall]:
    """The parts of a call on a rank. The driver's work is in proportion to the rows of the whole
    batch."""
    works = []
    parts_s = 0.0
    for part in span.parts:
        if part.name == FETCH or part.name in PREPARATIONS:
            continue
        work = Work(
            num_pieces=part.num_pieces,
            num_tokens=part.num_tokens,
            num_attended=part.num_attended,
        )
        works.append(PartOfCall(part.name, work, part.seconds))
        parts_s += part.seconds

    amount = span.num_tokens
    if span.pool == DRIVER:
        amount = num_rows
    rest = PartOfCall(
        name=REST,
        work=Work(num_pieces=1, num_tokens=amount),
        seconds=max(0.0, span.duration_s - parts_s),
    )
    works.append(rest)
    return works


def ranks_of(
    config: Config,
    plan: Plan,
    role: str,
    pool: str,
    operation: str,
) -> int:
    """The ranks that exchange data in an operation. Rollouts exchange data only within a
    tensor-parallel group."""
    if pool not in plan.pools:
        return 1
    spec = ROLE_SPECS.get(Role(role))
    if operation != SYNC and spec is not None and spec.tensor_parallel is not None:
        return plan.dims_of(config, Role(role)).tp
    return plan.pools[pool].world_size


def measured_steps(spans: Iterable[Recorded]) -> list[int]:
    """The steps of a recording that are used: not the first ones, and not all of a long run."""
    recorded_steps: set[int] = set()
    for recorded in spans:
        if may_begin_step(recorded):
            recorded_steps.add(recorded.step)
    steps = sorted(recorded_steps)
    num_not_needed = max(0, len(steps) - 2)
    num_skipped = min(NUM_WARM_STEPS, num_not_needed)
    used = steps[num_skipped:]
    stride = max(1, len(used) // MAX_STEPS)
    return used[::stride]


def _add_generation(rows: Rows, data: DataConfig, slowest: Span) -> None:
    """Add the lengths of a generation, and the decode steps of its slowest rank."""
    num_rows = max(1, slowest.num_rows)
    num_tokens = slowest.num_tokens / num_rows
    decode_steps = []
    for part in slowest.parts:
        if part.name == DECODE and part.num_tokens:
            decode_steps.append(part)
    if decode_steps and slowest.num_rows:
        rows.live.append((slowest.num_rows, decode_steps))
        num_decoded = sum(part.num_tokens for part in decode_steps)
        # The first token of each response comes from the prefill.
        num_sampled = num_decoded / num_rows + 1
    else:
        # Prompts and responses are assumed to be in proportion to their largest lengths.
        largest = data.max_prompt_length + data.max_response_length
        num_sampled = num_tokens * data.max_response_length / largest
    rows.num_response.append(max(1.0, num_sampled))
    rows.num_prompt.append(max(1.0, num_tokens - num_sampled))
