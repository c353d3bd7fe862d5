"""A profile: what recorded runs say about the work of a step and about what each part of it costs.

Owns turning spans into observations of work and time, the linear model of costs that is fitted to
them with its uncertainty, and the work of each operation under another config and plan. Several
recordings of the same models on the same device make a better profile. Does not simulate anything.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_files import ShapeUnknown
from rolepool.config.run_keys import DataConfig
from rolepool.errors import ConfigError
from rolepool.metrics.sharding_times import ShardingTime
from rolepool.metrics.spans import (
    BETWEEN_STEPS,
    DRIVER,
    RULE_POOL,
    Part,
    Recorded,
    Span,
    Timeline,
    step_bounds,
)
from rolepool.placement.estimate import MicroBatch, shape_of
from rolepool.placement.plan import Plan
from rolepool.placement.roles import FIRST_OPERATION, OPERATIONS, ROLE_SPECS, Operation, Role
from rolepool.planner.sharding import PieceSharding, ShardingCosts

Array = npt.NDArray[np.float64]

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
NO_ROLE = Role("")
"""Stands for the driver, whose work does not depend on the lengths of rows."""


# What a piece of work costs

PRIOR_SHARES = np.array([0.1, 0.75, 0.08, 0.02, 0.03, 0.02])
"""What is assumed before anything is measured: how the time of typical work is divided among the
features. That of decode steps is divided in another way: a step reads all weights, however many
sequences it extends."""
PRIOR_SHARES_OF_DECODING = np.array([0.75, 0.1, 0.08, 0.02, 0.03, 0.02])
PRIOR_SHARES_OF_REST = np.array([0.45, 0.2, 0.0, 0.25, 0.1, 0.0])
"""That of the rest of a call: most of it is the same for all sizes, and in it ranks wait for each
other."""
PRIOR_STD = np.array([0.6, 0.6, 0.1, 0.3, 0.6, 0.1])
"""How unsure these shares are."""
NOISE = 0.1
"""The relative noise of one recorded time that the first fit assumes."""
LEAST_NOISE = 0.03
LEAST_EXPECTED = 0.05
"""Times that are expected to be a smaller part of the mean time count as this part."""
NUM_FITS = 3
NUM_ALIKE = 4
ALIKE = 3.0
"""Amounts of work within about a third are alike."""
STALL = 30.0
"""Times that are so many times longer than what is usual for the assumed shares are those of a
process that stood still. They would distort the first fit, so they are not used at all."""
OUTLIER = 4.0
"""Times that are so many times the usual deviation away from the first fit are not used, such as
those of a call that was interrupted by another program."""


NUM_AMOUNTS = 3
"""The features that are amounts of work: pieces, tokens, attended tokens. The others are about
several ranks."""
OTHER_RANKS = 0.5
"""The relative deviation of the time of sharding for numbers of ranks outside of those that were
measured."""


class Work(NamedTuple):
    """An amount of work on one rank."""

    num_pieces: float
    num_tokens: float = 0.0
    num_attended: float = 0.0

    def features(self, num_ranks: int, sharding: PieceSharding | None = None) -> list[float]:
        """What its time depends on. If it was measured what sharding adds, the last one is that
        time. Otherwise the last three stand for collectives: that there are any, the data that each
        rank exchanges, and the rounds of messages. Sharded models are gathered and reduced around a
        ring of ranks, which takes one round less than there are ranks."""
        if sharding is not None:
            return [*self, self.num_pieces * sharding.seconds(num_ranks)]
        is_shared, exchanged, rounds = num_ranks > 1, (num_ranks - 1) / num_ranks, num_ranks - 1
        return [*self, *(self.num_pieces * each for each in (is_shared, exchanged, rounds))]


class Seconds(NamedTuple):
    """A time and its variance."""

    mean: float
    variance: float


ALL_VISIBLE = Seconds(1.0, 0.2**2)
"""On CPU slots nothing overlaps with collectives, so a step waits for all of the time that sharding
was measured to take. Noise makes this unsure."""
PARTLY_VISIBLE = Seconds(0.5, 0.3**2)
"""On GPUs layers are gathered while others compute, so a step waits for some part between none and
all of it."""


class LinearCost(NamedTuple):
    """The time of some kind of work as a linear function of its features; no coefficient is
    negative."""

    coefficients: Array
    covariance: Array
    noise: float
    """The relative deviation of recorded times."""
    sharding: PieceSharding | None = None
    """What sharding adds to a piece of work, if it was measured."""

    @classmethod
    def fit(
        cls,
        seen: Sequence[tuple[Work, int, float]],
        shares: Array = PRIOR_SHARES,
        sharding: PieceSharding | None = None,
        visible: Seconds = ALL_VISIBLE,
    ) -> "LinearCost":
        """Fit recorded times: work, the number of ranks, and seconds. Directions in which the
        records do not vary stay as assumed before, and are as unsure. `visible` is the part of the
        time of sharding that a step waits for."""
        raw = np.array([work.features(num_ranks, sharding) for work, num_ranks, _ in seen])
        times = np.array([seconds for *_, seconds in seen])
        num_plain = raw.shape[1] - (sharding is not None)
        scale = raw.mean(0)
        scale = np.where(scale > 0, scale, raw[:, 0].mean())
        is_seen = raw.mean(0)[:num_plain] > 0
        # Work without tokens never has any. Collectives that one rank does not have are expected of
        # several ranks.
        prior = np.where(is_seen | (np.arange(num_plain) >= NUM_AMOUNTS), shares[:num_plain], 0.0)
        prior[0] += 1 - prior[is_seen].sum()
        deviations = PRIOR_STD[:num_plain]
        ratios = times / (raw[:, :num_plain] / scale[:num_plain] @ prior)
        kept = ratios <= STALL * np.median(ratios)
        raw, times = raw[kept], times[kept]
        surer = np.sqrt(_weights(raw))
        typical_s = max(float(times.mean()), 1e-9)
        times /= typical_s
        if sharding is not None:
            scale[-1] = typical_s  # this feature is a time, so its coefficient has no unit
            others = max(LEAST_EXPECTED, 1 - visible.mean * float(raw[:, -1].mean()) / typical_s)
            prior = np.append(prior * others, visible.mean)
            deviations = np.append(deviations * others, math.sqrt(visible.variance))
        features = raw / scale
        expected = features @ prior
        for _ in range(
            NUM_FITS - 1
        ):  # what a time may deviate is in proportion to what is expected
            noise = NOISE * np.maximum(expected, LEAST_EXPECTED) / surer
            solved, _ = _solve(features, times, noise, prior, deviations)
            expected = features @ solved
        expected = np.maximum(expected, LEAST_EXPECTED)
        errors = (times - expected) / expected
        deviation = max(float(np.median(np.abs(errors))), LEAST_NOISE)
        usual = np.abs(errors) <= OUTLIER * deviation
        noise = deviation * expected / surer
        solved, covariance = _solve(features[usual], times[usual], noise[usual], prior, deviations)
        unit = typical_s / scale
        return cls(solved * unit, covariance * np.outer(unit, unit), deviation, sharding)

    def seconds(self, work: Work, num_ranks: int) -> Seconds:
        features = np.array(work.features(num_ranks, self.sharding))
        mean = float(features @ self.coefficients)
        variance = float(features @ self.covariance @ features) + (self.noise * mean) ** 2
        if self.sharding is not None and not self.sharding.covers(num_ranks):
            variance += (OTHER_RANKS * float(features[-1])) ** 2
        return Seconds(mean, variance)


def _weights(raw: Array) -> Array:
    """How much each record counts. Records of about the same work have noise in common, such as
    another program that runs for some steps, so many of them together count as `NUM_ALIKE`.
    Otherwise small differences in work, and such noise, would decide what a token costs."""
    kinds = np.round(ALIKE * np.log1p(raw)).astype(np.int64)
    _, kind_of, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
    return np.minimum(1.0, NUM_ALIKE / counts[kind_of.reshape(-1)])


def _solve(
    features: Array, times: Array, noise: Array, prior: Array, deviations: Array
) -> tuple[Array, Array]:
    """The coefficients, none negative, and their covariance, by least squares with a prior and its
    deviations."""
    weights = 1 / noise**2
    kept = np.ones(len(prior), dtype=bool)
    covariance = np.zeros((len(prior), len(prior)))
    solved = np.zeros(len(prior))
    while kept.any():
        some = features[:, kept]
        precision = (some.T * weights) @ some + np.diag(1 / deviations[kept] ** 2)
        part = np.linalg.inv(precision)
        solved[kept] = part @ (some.T @ (weights * times) + prior[kept] / deviations[kept] ** 2)
        covariance[:] = 0.0
        covariance[np.ix_(kept, kept)] = part
        if (solved >= 0).all():
            break
        kept &= solved > 0
        solved[~kept] = 0.0
    return solved, covariance


# What was recorded


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
        return median(
            [bounds[step][1] - bounds[step][0] for step in measured_steps(self.spans)] or [math.nan]
        )


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


class Profile:
    """Costs and work that were measured in recordings of the same models."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self.recordings = [one for one in recordings if one.spans]
        self.rows: dict[tuple[int, int], Rows] = defaultdict(Rows)
        """By data.max_prompt_length and data.max_response_length."""
        self.sharing: list[Recording] = []
        """Recordings of pools that shared GPUs, whose calls slowed each other down. They are not in
        the costs."""
        helpers = {
            one.span.rank
            for each in self.recordings[:1]
            for one in each.spans
            if one.span.pool == RULE_POOL
        }
        self.num_helpers = max(1, len(helpers))
        """The processes of the rule reward."""
        self._seen: dict[tuple[str, str], list[tuple[Work, int, float]]] = defaultdict(list)
        """Work, ranks and seconds of each operation and part."""
        self._hand_overs_s: dict[str, list[float]] = defaultdict(list)
        self._fetched = np.zeros(2)
        """Seconds and bytes of the batches that processes fetched from the object store."""
        for one in self.recordings:
            if one.plan.sharing_pools and len(self.recordings) > 1:
                self.sharing.append(one)
            else:
                self._observe(one, set(measured_steps(one.spans)))
        if not self._seen:
            raise ConfigError(
                "predict: the run has no completed step with spans; give a run folder with some steps"
            )
        self.sharding = ShardingCosts(time for one in self.recordings for time in one.sharding)
        self.costs = {key: self._fit(*key) for key in self._seen}
        took_s, num_bytes = self._fetched
        self.bytes_per_s = num_bytes / took_s if took_s else BYTES_PER_S
        self.hand_over_s = {
            operation: median(seconds) for operation, seconds in self._hand_overs_s.items()
        }

    def _fit(self, operation: str, part: str) -> LinearCost:
        """The cost of a part of an operation."""
        shares = {DECODE: PRIOR_SHARES_OF_DECODING, REST: PRIOR_SHARES_OF_REST}.get(
            part, PRIOR_SHARES
        )
        visible = ALL_VISIBLE if self.recordings[0].plan.device == "cpu" else PARTLY_VISIBLE
        return LinearCost.fit(
            self._seen[operation, part], shares, self._sharding_of(operation, part), visible
        )

    def _sharding_of(self, operation: str, part: str) -> PieceSharding | None:
        """What sharding adds to each piece of a part; None if that was not measured, or if the
        model is not known."""
        role = next(
            (
                role
                for role, spec in ROLE_SPECS.items()
                if OPERATIONS.get(operation) in spec.operations
            ),
            None,
        )
        if role is None or not self.sharding.is_measured:
            return None
        with suppress(ShapeUnknown):
            shape = shape_of(self.recordings[0].config, role)
            return self.sharding.of_model(part, shape.num_layers + 1, shape.num_params)
        return None

    def _observe(self, one: Recording, steps: set[int]) -> None:
        """Add what the calls of these steps tell."""
        data, homes = one.config.data, one.plan.roles
        rows = self.rows[data.max_prompt_length, data.max_response_length]
        num_rows = data.train_batch_size * one.config.actor_rollout_ref.rollout.n
        is_sync_between = homes.get(Role.Actor) != homes.get(Role.Rollout)
        # With the steps before, because their calls are what the first calls of a step waited for.
        timeline = Timeline(each for each in one.spans if {each.step, each.step + 1} & steps)
        calls: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for position, (step, operation, span) in enumerate(timeline):
            if step in steps and operation not in BETWEEN_STEPS:
                # A sync between pools has several calls in each of them; they count as one.
                calls[
                    step, operation, 0 if operation == SYNC and is_sync_between else span.call
                ].append(position)
        for (_, operation, _), positions in calls.items():
            of_call = [timeline[position].span for position in positions]
            first, last = of_call[0], max(of_call, key=lambda span: span.end_s)
            is_sync_of_several = operation == SYNC and is_sync_between
            # The ranks of a pool start a call when each of them has ended the one before. A rank
            # that comes early waits for the others inside the call, so a call counts from the start
            # of its latest rank.
            latest = first if is_sync_of_several else of_call[-1]
            caused_s = max(
                timeline.cause_s(at) for at in positions if timeline[at].span.call == first.call
            )
            if first.pool != DRIVER and math.isfinite(caused_s):
                self._hand_overs_s[operation].append(max(0.0, latest.start_s - caused_s))
            if is_sync_of_several:
                ranks = one.plan.pool_of(Role.Actor).world_size
                self._seen[SYNC_BETWEEN, REST].append((Work(1), ranks, last.end_s - first.start_s))
                continue
            ranks = ranks_of(one.config, one.plan, last.role, last.pool, operation)
            # If ranks wait for each other, the latest one waits least. Otherwise a call takes as
            # long as its slowest.
            counted = latest if ranks > 1 else last
            took_s = last.end_s - latest.start_s
            for name, work, seconds in _works_of(counted, num_rows):
                more_s = max(-seconds, took_s - counted.duration_s) if name == REST else 0.0
                self._seen[operation, name].append((work, ranks, seconds + more_s))
            total = rows.totals[operation]
            for span in of_call:
                total.num_calls += 1
                total.num_rows += num_rows if span.pool == DRIVER else span.num_rows
                self._fetched += span.part_seconds.get("fetch", 0.0), span.num_bytes
                for name, work, _ in _works_of(span, num_rows):
                    total.parts[name] += work
            if operation == FIRST_OPERATION:
                _add_generation(rows, data, max(of_call, key=lambda span: span.duration_s))

    def rows_like(self, config: Config) -> tuple[Rows, float, float]:
        """The recorded rows whose lengths are nearest to those of a config, and how many times as
        long its prompts and responses are. Lengths are assumed to grow with the largest lengths
        that the config allows."""
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
        nearest = min(
            self.rows,
            key=lambda key: abs(math.log(key[0] / prompt)) + abs(math.log(key[1] / response)),
        )
        return self.rows[nearest], prompt / nearest[0], response / nearest[1]

    def seconds(self, operation: str, work: Mapping[str, Work], num_ranks: int) -> Seconds:
        """The time of a call of an operation."""
        parts = [
            self.costs[operation, name].seconds(amount, num_ranks) for name, amount in work.items()
        ]
        return Seconds(sum(part.mean for part in parts), sum(part.variance for part in parts))

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
        rows, of_prompt, of_response = self.rows_like(config)
        prompt, response = fmean(rows.num_prompt), fmean(rows.num_response)
        longer = (prompt * of_prompt + response * of_response) / (prompt + response)
        num_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n / num_parts
        total, found = rows.totals[operation.name], {}
        each = num_rows / max(total.num_rows, 1)
        num_batches = 1.0
        if operation.trains:
            key = f"{ROLE_SPECS[role].section}.ppo_mini_batch_size"
            num_batches = max(1.0, config.data.train_batch_size / config.at(key))
        for part, (pieces, tokens, attended) in total.parts.items():
            factor = of_prompt if part == PREFILL else 1.0 if role == NO_ROLE else longer
            amount = Work(
                pieces / total.num_calls, tokens * each * factor, attended * each * factor**2
            )
            if part == DECODE and rows.live:
                amount = _decode(config, rows, num_rows, of_prompt, of_response)
            elif part != REST and size is not None:
                num_pieces = (
                    num_batches  # updates, if the part has no tokens; otherwise micro-batches
                )
                if amount.num_tokens:
                    most = size.rows or max(1.0, size.tokens // (amount.num_tokens / num_rows))
                    num_pieces *= math.ceil(num_rows / num_batches / most)
                amount = amount._replace(num_pieces=num_pieces)
            found[part] = amount
        return found


def _decode(
    config: Config, rows: Rows, num_rows: float, of_prompt: float, of_response: float
) -> Work:
    """The decode steps of a rank with so many rows: as many running sequences in each step as in
    the recorded generations with the most similar number of rows, in proportion."""
    nearest = min(
        (number for number, _ in rows.live), key=lambda number: abs(math.log(number / num_rows))
    )
    alike = [parts for number, parts in rows.live if number == nearest]
    slots = config.actor_rollout_ref.rollout.max_num_seqs
    waves, at_once = max(1.0, num_rows / slots), min(num_rows, slots)
    prompt, half_response = fmean(rows.num_prompt), fmean(rows.num_response) / 2
    longer = (prompt * of_prompt + half_response * of_response) / (prompt + half_response)
    steps = tokens = attended = 0.0
    for part in chain.from_iterable(alike):
        running = part.num_tokens / part.num_pieces / nearest * at_once
        if running >= 0.5:
            num_steps = part.num_pieces * of_response * waves / len(alike)
            steps += num_steps
            tokens += num_steps * max(1.0, running)
            attended += num_steps * max(1.0, running) * part.num_attended / part.num_tokens * longer
    return Work(steps, tokens, attended)


def _works_of(span: Span, num_rows: int) -> list[tuple[str, Work, float]]:
    """The parts of a call on a rank: their names, work and seconds. The driver's work is in
    proportion to the rows of the whole batch."""
    counted = [part for part in span.parts if part.name != "fetch"]
    rest_s = max(0.0, span.duration_s - sum(part.seconds for part in counted))
    rest = Work(1, num_rows if span.pool == DRIVER else span.num_tokens)
    return [*((part.name, Work(*part[2:]), part.seconds) for part in counted), (REST, rest, rest_s)]


def ranks_of(config: Config, plan: Plan, role: str, pool: str, operation: str) -> int:
    """The ranks that exchange data in an operation. Rollouts exchange data only within a
    tensor-parallel group."""
    if pool not in plan.pools:
        return 1
    spec = ROLE_SPECS.get(Role(role))
    if operation != SYNC and spec is not None and spec.tensor_parallel is not None:
        return plan.dims_of(config, Role(role)).tp
    return plan.pools[pool].world_size


def measured_steps(spans: Iterable[Recorded]) -> list[int]:
    """The steps of a recording that are used: not the first ones, and not a step that has not
    ended."""
    steps = sorted({one.step for one in spans if one.operation == FIRST_OPERATION})
    used = steps[min(NUM_WARM_STEPS, max(0, len(steps) - 2)) :]
    stride = max(1, len(used) // MAX_STEPS)
    return used[::stride]


def _add_generation(rows: Rows, data: DataConfig, slowest: Span) -> None:
    decoded = [part for part in slowest.parts if part.name == DECODE and part.num_tokens]
    num_tokens = slowest.num_tokens / max(1, slowest.num_rows)
    # If it is not recorded, prompts and responses are assumed to be in proportion to their largest
    # lengths.
    num_sampled = (
        num_tokens * data.max_response_length / (data.max_prompt_length + data.max_response_length)
    )
    if decoded and slowest.num_rows:
        rows.live.append((slowest.num_rows, decoded))
        num_sampled = (
            sum(part.num_tokens for part in decoded) / slowest.num_rows + 1
        )  # one comes from the prefill
    rows.num_response.append(max(1.0, num_sampled))
    rows.num_prompt.append(max(1.0, num_tokens - num_sampled))
