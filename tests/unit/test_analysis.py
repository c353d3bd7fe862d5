"""Where a step's time went: every moment of every rank is explained once, and by what really
happened."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_runs import record

from rolepool.metrics.spans import DRIVER, RULE_POOL, Recorded, Span, step_bounds
from rolepool.metrics.timeline import Interval, Timeline, critical_path, lanes, step_metrics
from rolepool.planner.profile import measured_steps
from rolepool.report.summary import around, by_step

TICK_S = 0.125
"""Times of made-up schedules are multiples of it, so that sums of them are exact."""
ORIGIN_S = 1.7e9

thorough = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def spans_of(
    step: int,
    operation: str,
    pool: str,
    times: list[tuple[float, float]],
    call: int = 0,
    after: tuple[int, ...] = (),
    queued_s: float = 0.0,
    memory: int = 0,
) -> list[Recorded]:
    """A call, by the start and end of each rank."""
    return [
        Recorded(
            step,
            operation,
            Span(
                pool,
                pool,
                rank,
                operation,
                queued_s,
                *time,
                call=call,
                after=after,
                peak_memory_bytes=memory * 2**30,
            ),
        )
        for rank, time in enumerate(times)
    ]


def waits_in(lane: list[Interval]) -> list[Interval]:
    return [interval for interval in lane if interval.kind != "busy"]


# Worked by hand


def two_pools() -> list[Recorded]:
    """Two steps of 10 s. The critic's update runs on for 1 s into the next generation; generation
    is uneven."""
    spans = []
    for step, at in ((1, 100.0), (2, 110.0)):
        first = 10 * step
        gen, values, old, critic, actor = range(first, first + 5)
        spans += [
            *spans_of(
                step, "gen", "a", [(at, at + 3), (at, at + 4)], gen, queued_s=at - 3, memory=step
            ),
            *spans_of(
                step, "values", "b", [(at + 4.5, at + 6)], values, (gen,), queued_s=at - 3, memory=5
            ),
            *spans_of(
                step, "old_log_prob", "a", [(at + 4, at + 5)] * 2, old, (gen,), queued_s=at - 3
            ),
            *spans_of(step, "adv", DRIVER, [(at + 6, at + 7)], after=(values, old)),
            *spans_of(
                step, "update_critic", "b", [(at + 7.5, at + 11)], critic, (gen,), queued_s=at + 7
            ),
            *spans_of(
                step,
                "update_actor",
                "a",
                [(at + 7, at + 10), (at + 7, at + 10)],
                actor,
                (gen,),
                at + 7,
            ),
        ]
    return spans


def test_a_step_runs_from_its_generation_to_the_next_and_the_last_to_its_last_end() -> None:
    assert step_bounds(two_pools()) == {1: (100.0, 110.0), 2: (110.0, 121.0)}


def test_a_step_begins_with_the_call_that_was_made_first_whatever_its_name() -> None:
    renamed = []
    for recorded in two_pools():
        name = {"gen": "sample"}.get(recorded.operation, recorded.operation)
        renamed.append(recorded._replace(operation=name))
    assert step_bounds(renamed) == step_bounds(two_pools())
    path = critical_path(Timeline(renamed), 100.0, 110.0)
    assert [(link.start_s, link.end_s, link.kind, link.pool) for link in path] == [
        (link.start_s, link.end_s, link.kind, link.pool)
        for link in critical_path(Timeline(two_pools()), 100.0, 110.0)
    ]


def test_neither_the_driver_nor_a_later_call_that_starts_earlier_begins_a_step() -> None:
    """The driver may wait inside of its span, and a call on a free pool may overtake the first
    one."""
    early = [
        *spans_of(2, "adv", DRIVER, [(105.0, 117.0)], call=0),
        *spans_of(2, "ref", "b", [(109.0, 109.5)], call=29),
    ]
    spans = [*two_pools(), *early]
    assert step_bounds(spans) == step_bounds(two_pools())
    assert critical_path(Timeline(spans), 100.0, 110.0)[-1].end_s == 110.0
    assert Timeline(spans).step_begins.keys() == {100.0, 110.0}


def generated_ahead(num_steps: int, k: int) -> list[Recorded]:
    """Steps of 10 s with a rollout in its own pool. The generation of step n + k is queued with the
    updates of step n. It takes 8 s, and training the whole step."""
    spans = []
    number = 0
    for step in range(1, num_steps + 1):
        at = 100.0 + 10 * step
        first = 1 if step == 1 else step + k
        for following in range(first, min(step + k, num_steps) + 1):
            number += 1
            start_s = at - 8 * (step + k - following)
            spans += spans_of(
                following, "gen", "rollout", [(start_s, start_s + 8)], number, queued_s=at - 0.2
            )
        for operation, start_s in (("old_log_prob", at), ("update_actor", at + 3)):
            number += 1
            times = [(start_s, start_s + 3 if operation == "old_log_prob" else at + 10)]
            spans += spans_of(step, operation, "actor", times, number, queued_s=start_s - 0.1)
    return spans


@pytest.mark.parametrize("k", [0, 1, 2])
def test_generation_that_runs_ahead_does_not_begin_a_step(k: int) -> None:
    spans = generated_ahead(5, k)
    bounds = step_bounds(spans)
    # The first step begins with all that is generated before it.
    assert bounds[1] == (110.0 - 8 * k, 120.0)
    for step in (2, 3, 4):
        assert bounds[step] == (100.0 + 10 * step, 110.0 + 10 * step)
    timeline = Timeline(spans)
    assert [start_s for start_s, _ in bounds.values()] == list(timeline.step_begins)
    metrics = step_metrics(timeline, *bounds[3])
    is_generating = 3 + k <= 5
    assert metrics["pool/rollout/busy_fraction"] == pytest.approx(0.8 if is_generating else 0.0)
    assert metrics["pool/actor/busy_fraction"] == pytest.approx(1.0)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_report_shows_what_was_generated_for_later_steps_meanwhile(k: int) -> None:
    timeline = around(by_step(generated_ahead(9, k)), 4, 4)
    assert step_metrics(timeline, 140.0, 150.0)["pool/rollout/busy_fraction"] == pytest.approx(0.8)
    assert {recorded.step for recorded in timeline} == set(range(3, 6 + max(0, k - 1)))


def test_what_follows_a_step_is_no_step() -> None:
    validation = spans_of(3, "testing", DRIVER, [(130.0, 131.0)], call=1)
    assert step_bounds([*two_pools(), *validation]) == step_bounds(two_pools())


@pytest.mark.parametrize("num_steps", [1, 3])
def test_runs_that_begin_with_a_generation_have_the_bounds_that_they_always_had(
    num_steps: int,
) -> None:
    """Until steps began with their first call, they began with the operation `gen`."""
    for words in ("", "placement.strategy=split trainer.n_gpus_per_node=4"):
        spans = record(words, num_steps=num_steps).spans
        starts_s: dict[int, float] = {}
        for step, operation, span in spans:
            if operation == "gen":
                starts_s[step] = min(starts_s.get(step, span.start_s), span.start_s)
        assert {step: start_s for step, (start_s, _) in step_bounds(spans).items()} == starts_s
        assert measured_steps(spans) == sorted(starts_s)[-2:]


def test_waits_of_two_pools_are_those_worked_out_by_hand() -> None:
    found = lanes(Timeline(two_pools()), 110.0, 120.0)
    assert list(found) == [("a", 0), ("a", 1), ("b", 0), (DRIVER, 0)]
    busy = [
        (each.operation, each.start_s, each.end_s) for each in found["b", 0] if each.kind == "busy"
    ]
    assert busy == [
        ("update_critic", 110.0, 111.0),
        ("values", 114.5, 116.0),
        ("update_critic", 117.5, 120.0),
    ]
    until_update = [
        Interval("data", "b", "values", 115.0, 116.0),
        Interval("turn", DRIVER, "adv", 116.0, 117.0),
    ]
    assert waits_in(found["a", 0]) == [
        Interval("imbalance", "a", "gen", 113.0, 114.0),
        *until_update,
    ]
    assert waits_in(found["a", 1]) == until_update
    assert waits_in(found["b", 0]) == [
        Interval("data", "a", "gen", 111.0, 114.0),
        Interval("turn", "", "", 114.0, 114.5),
        Interval("turn", DRIVER, "adv", 116.0, 117.0),
        Interval("turn", "", "", 117.0, 117.5),
    ]
    assert found[DRIVER, 0][-1] == Interval("nothing", "", "", 117.0, 120.0)


def test_a_wait_that_ends_after_the_step_is_explained_by_the_next_steps_calls() -> None:
    assert lanes(Timeline(two_pools()), 100.0, 110.0)[DRIVER, 0][-1] == Interval(
        "data", "a", "update_actor", 107.0, 110.0
    )


def test_the_critical_path_is_the_one_worked_out_by_hand() -> None:
    assert critical_path(Timeline(two_pools()), 100.0, 110.0) == [
        Interval("work", "a", "gen", 100.0, 104.0),
        Interval("hand-over", "", "", 104.0, 104.5),
        Interval("work", "b", "values", 104.5, 106.0),
        Interval("work", DRIVER, "adv", 106.0, 107.0),
        Interval("work", "a", "update_actor", 107.0, 110.0),
    ]


def test_the_last_steps_critical_path_ends_in_what_ended_last() -> None:
    assert critical_path(Timeline(two_pools()), 110.0, 121.0)[-2:] == [
        Interval("hand-over", "", "", 117.0, 117.5),
        Interval("work", "b", "update_critic", 117.5, 121.0),
    ]


def test_metrics_of_two_pools_are_those_worked_out_by_hand() -> None:
    helpers = spans_of(2, "reward", RULE_POOL, [(110.0, 120.0)], 99)
    metrics = step_metrics(Timeline([*two_pools(), *helpers]), 110.0, 120.0)
    assert metrics.pop(f"pool/{RULE_POOL}/busy_fraction") == 1.0
    assert {name: value for name, value in metrics.items() if RULE_POOL not in name} == {
        "pool/a/busy_s": (7.0 + 8.0) / 2,
        "pool/a/idle_s": (3.0 + 2.0) / 2,
        "pool/a/busy_fraction": 0.75,
        "pool/a/wait_s": 2.0,
        "pool/a/peak_memory_gb": 2.0,
        "pool/b/busy_s": 5.0,
        "pool/b/idle_s": 5.0,
        "pool/b/busy_fraction": 0.5,
        "pool/b/wait_s": 5.0,
        "pool/b/peak_memory_gb": 5.0,
        "overlap/fraction": (1.0 + 0.5 + 2.5) / 10,
        "overlap/saved_s": 8.0 + 5.0 - 9.0,
    }


def test_a_driver_that_waits_inside_its_span_is_not_what_the_step_was_waiting_for() -> None:
    """Validation: the driver's span lasts as long as what it waits for, one batch after another."""
    spans = [
        *spans_of(1, "testing", DRIVER, [(0.0, 10.0)], after=(1, 2)),
        *spans_of(1, "testing", "a", [(1.0, 4.0)], 1, queued_s=1.0),
        *spans_of(1, "testing", "a", [(5.0, 9.0)], 2, queued_s=5.0),
    ]
    assert critical_path(Timeline(spans), 0.0, 10.0) == [
        Interval("work", DRIVER, "testing", 0.0, 1.0),
        Interval("work", "a", "testing", 1.0, 4.0),
        Interval("work", DRIVER, "testing", 4.0, 5.0),
        Interval("work", "a", "testing", 5.0, 9.0),
        Interval("work", DRIVER, "testing", 9.0, 10.0),
    ]


def test_data_that_a_wrong_clock_says_came_after_the_start_still_counts_as_its_cause() -> None:
    spans = [
        *spans_of(1, "gen", "a", [(0.0, 5.25)], 1),
        *spans_of(1, "values", "b", [(5.0, 8.0)], 2, (1,)),
    ]
    assert [
        (link.operation, link.start_s, link.end_s)
        for link in critical_path(Timeline(spans), 0.0, 8.0)
    ] == [
        ("gen", 0.0, 5.25),
        ("values", 5.25, 8.0),
    ]
    assert waits_in(lanes(Timeline(spans), 0.0, 8.0)["b", 0]) == [
        Interval("data", "a", "gen", 0.0, 5.0)
    ]


def test_a_resumed_run_which_numbers_its_calls_anew_is_explained_by_its_own_calls() -> None:
    later = [
        recorded._replace(
            step=recorded.step + 2,
            span=recorded.span._replace(
                queued_s=recorded.span.queued_s + 500,
                start_s=recorded.span.start_s + 500,
                end_s=recorded.span.end_s + 500,
            ),
        )
        for recorded in two_pools()
    ]
    path = critical_path(Timeline([*two_pools(), *later]), 600.0, 610.0)
    assert [(link.operation, link.kind) for link in path] == [
        (link.operation, link.kind) for link in critical_path(Timeline(two_pools()), 100.0, 110.0)
    ]


def test_spans_without_duration_that_name_each_other_do_not_hang_the_walk() -> None:
    spans = [
        *spans_of(1, "values", "a", [(5.0, 5.0)], 1, (2,)),
        *spans_of(1, "ref", "b", [(5.0, 5.0)], 2, (1,)),
    ]
    assert (
        sum(link.end_s - link.start_s for link in critical_path(Timeline(spans), 0.0, 8.0)) == 8.0
    )


def test_nothing_recorded_is_nothing_to_explain() -> None:
    assert step_bounds([]) == {}
    assert lanes(Timeline([]), 0.0, 1.0) == {}
    assert critical_path(Timeline([]), 0.0, 1.0) == [Interval("hand-over", "", "", 0.0, 1.0)]
    assert step_metrics(Timeline([]), 0.0, 1.0) == {"overlap/fraction": 0.0, "overlap/saved_s": 0.0}


# Any schedule


class Schedule:
    """Calls that run as they do in a run: in order on a pool, after what they were given and the
    driver made them.

    Half of them hand over in no time: then there is a cause for every start, and no call takes no
    time.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.ranks = {
            f"pool{number}": draw(st.integers(1, 3)) for number in range(draw(st.integers(1, 3)))
        }
        self.longest_hand_over = draw(st.sampled_from([0, 4]))
        self.driver_waits_inside = draw(st.booleans())
        self.spans: list[Recorded] = []
        self.ends: list[float] = []  # of each call
        self.free: dict[tuple[str, int], float] = {}
        self.driver_s = ORIGIN_S

    def ticks(self, most: int) -> float:
        return self.draw(st.integers(0 if self.longest_hand_over else min(1, most), most)) * TICK_S

    def some_calls(self) -> tuple[int, ...]:
        recent = range(max(0, len(self.ends) - 6), len(self.ends))
        return (
            tuple(self.draw(st.lists(st.sampled_from(recent), max_size=3, unique=True)))
            if recent
            else ()
        )

    def call(self, step: int, operation: str, pool: str, after: tuple[int, ...]) -> int:
        ready_s = max([self.driver_s, *(self.ends[call] for call in after)])
        times = []
        for rank in range(self.ranks[pool]):
            start_s = max(ready_s, self.free.get((pool, rank), 0.0)) + self.ticks(
                self.longest_hand_over
            )
            times.append((start_s, start_s + self.ticks(12)))
            self.free[pool, rank] = times[-1][1]
        self.spans += spans_of(step, operation, pool, times, len(self.ends), after, self.driver_s)
        self.ends.append(max(end_s for _, end_s in times))
        return len(self.ends) - 1

    def advantages(self, step: int, after: tuple[int, ...]) -> None:
        ready_s = max([self.driver_s, *(self.ends[call] for call in after)])
        end_s = ready_s + self.ticks(4)
        start_s = self.driver_s if self.driver_waits_inside else ready_s
        self.spans += spans_of(step, "adv", DRIVER, [(start_s, end_s)], after=after)
        self.driver_s = end_s

    def step(self, number: int) -> None:
        pools = st.sampled_from(list(self.ranks))
        calls = [self.call(number, "gen", "pool0", ())]
        for operation in self.draw(
            st.lists(st.sampled_from(["values", "old_log_prob", "ref", "reward"]), max_size=4)
        ):
            calls.append(self.call(number, operation, self.draw(pools), self.some_calls()))
        self.advantages(number, tuple(calls))
        for operation in self.draw(
            st.lists(st.sampled_from(["update_critic", "update_actor"]), max_size=3)
        ):
            self.call(number, operation, self.draw(pools), self.some_calls())


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    schedule = Schedule(draw)
    for number in range(1, draw(st.integers(1, 3)) + 1):
        schedule.step(number)
    return schedule


def covered(
    spans: list[Recorded], pool: str, operation: str, start_s: float, end_s: float, rank: int = -1
) -> bool:
    """Whether a rank of the pool, or the one given, was at that operation all the time."""
    return any(
        (each.span.pool, each.operation) == (pool, operation)
        and each.span.start_s <= start_s
        and each.span.end_s >= end_s
        and rank in (-1, each.span.rank)
        for each in spans
    )


def windows(schedule: Schedule) -> list[tuple[float, float]]:
    """Every step, and the middle of the run."""
    bounds = list(step_bounds(schedule.spans).values())
    first, last = bounds[0][0], bounds[-1][1]
    third = (last - first) // (3 * TICK_S) * TICK_S
    return [window for window in (*bounds, (first + third, last - third)) if window[0] < window[1]]


@thorough
@given(schedules())
def test_spans_and_waits_fill_every_lane_and_waits_are_for_what_was_going_on(
    schedule: Schedule,
) -> None:
    timeline = Timeline(schedule.spans)
    for start_s, end_s in windows(schedule):
        for (own_pool, own_rank), lane in lanes(timeline, start_s, end_s).items():
            assert all(piece.start_s < piece.end_s for piece in lane)
            assert [start_s, *(piece.end_s for piece in lane)] == [
                *(piece.start_s for piece in lane),
                end_s,
            ]
            for kind, pool, operation, since, until, _ in lane:
                if kind == "busy":
                    assert covered(schedule.spans, own_pool, operation, since, until, own_rank)
                    continue
                later = [each for each in schedule.spans if each.span.end_s >= until]
                if kind == "imbalance":
                    assert pool == own_pool
                    assert any(
                        (each.span.pool, each.operation) == (pool, operation) for each in later
                    )
                elif kind == "nothing":
                    assert not any(
                        (each.span.pool, each.span.rank) == (own_pool, own_rank) for each in later
                    )
                elif pool:
                    assert covered(schedule.spans, pool, operation, since, until)
                    assert kind == ("turn" if pool == DRIVER else "data")
                else:
                    assert kind == "turn"
                    assert schedule.longest_hand_over


@thorough
@given(schedules())
def test_the_critical_path_fills_the_step_with_real_work_and_hand_overs(schedule: Schedule) -> None:
    timeline = Timeline(schedule.spans)
    for start_s, end_s in windows(schedule):
        path = critical_path(timeline, start_s, end_s)
        assert (path[0].start_s, path[-1].end_s) == (start_s, end_s)
        assert all(one.end_s == other.start_s for one, other in pairwise(path))
        assert all(link.start_s < link.end_s for link in path)
        for link in path:
            if link.kind == "work":
                assert covered(schedule.spans, link.pool, link.operation, link.start_s, link.end_s)
        if schedule.longest_hand_over == 0 and (start_s, end_s) != windows(schedule)[-1]:
            assert {link.kind for link in path} == {"work"}


@thorough
@given(schedules())
def test_pool_metrics_are_those_counted_tick_by_tick(schedule: Schedule) -> None:
    timeline = Timeline(schedule.spans)
    for start_s, end_s in windows(schedule):
        metrics = step_metrics(timeline, start_s, end_s)
        wall_s = end_s - start_s
        busy: dict[tuple[str, int], set[int]] = {}
        for each in schedule.spans:
            since, until = (
                int((time_s - start_s) / TICK_S) for time_s in (each.span.start_s, each.span.end_s)
            )
            ticks = range(max(since, 0), min(until, int(wall_s / TICK_S)))
            busy.setdefault((each.span.pool, each.span.rank), set()).update(ticks)
        of_pool: dict[str, set[int]] = {}
        for (pool, _), ticks_of_rank in busy.items():
            if pool != DRIVER:
                of_pool[pool] = of_pool.get(pool, set()) | ticks_of_rank
        for pool in of_pool:
            ranks = [ticks_of_rank for (name, _), ticks_of_rank in busy.items() if name == pool]
            busy_s = sum(map(len, ranks)) * TICK_S / len(ranks)
            assert metrics[f"pool/{pool}/busy_s"] == busy_s
            assert metrics[f"pool/{pool}/idle_s"] == wall_s - busy_s
            assert metrics[f"pool/{pool}/busy_fraction"] == busy_s / wall_s
            waited = [
                wait.duration_s
                for (name, _), lane in lanes(timeline, start_s, end_s).items()
                for wait in lane
                if name == pool and wait.kind in ("data", "turn")
            ]
            assert metrics[f"pool/{pool}/wait_s"] == pytest.approx(sum(waited) / len(ranks))
        counts = [
            sum(tick in ticks for ticks in of_pool.values()) for tick in range(int(wall_s / TICK_S))
        ]
        assert metrics["overlap/fraction"] == sum(count >= 2 for count in counts) * TICK_S / wall_s
        assert metrics["overlap/saved_s"] == sum(count - 1 for count in counts if count) * TICK_S
