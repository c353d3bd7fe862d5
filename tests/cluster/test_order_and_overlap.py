"""When calls run: one after another on a pool, side by side on two, and none of them waits for the
driver."""

from __future__ import annotations

import itertools
import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from roles_for_tests import Sleeper

from rolepool.cluster import Cluster, RoleProxy, WorkerGroup
from rolepool.cluster.watchdog import Watchdog
from rolepool.config import load_config
from rolepool.metrics import Span
from rolepool.metrics.run_folder import State
from rolepool.protocol import DataProto
from span_times import extent_s, overlap_s

OVERHEAD = 1.15
"""How much longer than the longer of two pools' work both may take, when they run at once."""


POOLS = {"actor": "two", "critic": "one", "rollout": "three"}


@pytest.fixture(scope="module")
def groups(shared_cluster: Cluster) -> dict[str, WorkerGroup]:
    found = {name: shared_cluster.groups[pool] for name, pool in POOLS.items()}
    for group in found.values():
        group.add_role("sleeper", Sleeper)
    return found


@pytest.fixture
def actor(groups: dict[str, WorkerGroup]) -> RoleProxy:
    return groups["actor"].role("sleeper")


@pytest.fixture
def critic(groups: dict[str, WorkerGroup]) -> RoleProxy:
    return groups["critic"].role("sleeper")


@pytest.fixture
def rollout(groups: dict[str, WorkerGroup]) -> RoleProxy:
    return groups["rollout"].role("sleeper")


def batch_of(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)})


def assert_one_after_another(spans: list[Span]) -> None:
    for rank in {span.rank for span in spans}:
        of_rank = [span for span in spans if span.rank == rank]
        for earlier, later in itertools.pairwise(of_rank):
            assert earlier.end_s <= later.start_s


def test_calls_on_a_pool_run_in_the_order_made_though_they_take_different_times(
    actor: RoleProxy,
) -> None:
    random.seed(0)
    futures = [actor.write_down(number, random.choice([0.0, 0.0, 0.05])) for number in range(30)]
    assert [future.get() for future in futures] == [[number] * 2 for number in range(30)]
    assert actor.written_down() == [list(range(30))] * 2
    assert_one_after_another([span for future in futures for span in future.spans()])


def test_a_call_that_waits_for_another_pool_is_not_overtaken(
    actor: RoleProxy, critic: RoleProxy
) -> None:
    late = critic.add(batch_of(4), 1, seconds=0.5)
    waiting = actor.add(late, 1)
    later = actor.write_down(100)
    assert later.get() == [100, 100]
    assert waiting.done()
    assert_one_after_another(waiting.spans() + later.spans())
    assert late.spans()[0].end_s <= min(span.start_s for span in waiting.spans())


def test_roles_of_a_pool_take_turns_in_the_order_of_their_calls(
    groups: dict[str, WorkerGroup], actor: RoleProxy
) -> None:
    second_role = groups["actor"].add_role("reference", Sleeper)
    futures = [role.write_down(0, 0.05) for _ in range(3) for role in (actor, second_role)]
    spans = [span for future in futures for span in future.spans()]
    assert_one_after_another(spans)
    assert [span.role for span in spans if span.rank == 0] == ["sleeper", "reference"] * 3


def test_calls_on_two_pools_overlap(actor: RoleProxy, critic: RoleProxy) -> None:
    in_actor = [actor.add(batch_of(4), 1, seconds=1.0), actor.add(batch_of(4), 1, seconds=1.0)]
    in_critic = [critic.add(batch_of(4), 1, seconds=0.8), critic.add(batch_of(4), 1, seconds=0.8)]
    actor_spans = [span for future in in_actor for span in future.spans()]
    critic_spans = [span for future in in_critic for span in future.spans()]

    longer_s = max(extent_s(actor_spans), extent_s(critic_spans))
    assert extent_s(actor_spans + critic_spans) <= OVERHEAD * longer_s
    assert extent_s(actor_spans + critic_spans) <= OVERHEAD * 2.0, (
        "twice 1 s in the one, twice 0.8 s in the other"
    )
    assert overlap_s(actor_spans, critic_spans) >= 1.4


def test_a_chain_over_three_pools_is_issued_before_its_first_call_ends(
    actor: RoleProxy, critic: RoleProxy, rollout: RoleProxy
) -> None:
    begin = time.time()
    generated = rollout.add(batch_of(5), 1, seconds=1.0)
    valued = critic.multiply(generated, 10)
    updated = actor.add(valued.union(DataProto.from_dict({"other": torch.zeros(5)})), 3)
    issued = time.time()
    assert not generated.done()

    assert updated.get().batch["x"].tolist() == [(i + 1) * 10 + 3 for i in range(5)]
    assert issued - begin < 0.8
    spans = [future.spans() for future in (generated, valued, updated)]
    assert issued < spans[0][0].end_s
    assert all(span.queued_s <= issued for chained in spans for span in chained), (
        "all three were queued by then"
    )
    for earlier, later in itertools.pairwise(spans):
        assert max(span.end_s for span in earlier) <= min(span.start_s for span in later)


def test_an_update_runs_on_while_another_pool_generates(
    actor: RoleProxy, rollout: RoleProxy
) -> None:
    update = actor.update(2.5)
    generated = [rollout.add(batch_of(2), step, seconds=0.1) for step in range(8)]
    for step, future in enumerate(generated):
        assert future.get().batch["x"].tolist() == [step, step + 1], (
            "results arrive during the update"
        )
    assert not update.done()
    assert update.get() == [10, 10]
    assert (
        overlap_s(update.spans(), [span for future in generated for span in future.spans()]) >= 0.7
    )


def test_waiting_for_one_pool_does_not_keep_another_from_working(
    actor: RoleProxy, critic: RoleProxy
) -> None:
    slow = critic.write_down(1, 2.0)
    queue = [actor.write_down(number, 0.1) for number in range(5)]
    slow.get()
    assert all(future.done() for future in queue)


def test_every_span_was_queued_before_it_started_and_started_before_it_ended(
    actor: RoleProxy, critic: RoleProxy
) -> None:
    before = time.time()
    futures = [role.add(batch_of(4), 1, seconds=0.05) for _ in range(5) for role in (actor, critic)]
    spans = [span for future in futures for span in future.spans()]
    after = time.time()
    assert len(spans) == 5 * (2 + 1)
    for span in spans:
        assert before <= span.queued_s <= span.start_s <= span.end_s <= after
        assert span.duration_s >= 0.05
        assert (span.role, span.method) == ("sleeper", "add")
    assert [span.pool for span in spans] == ["two", "two", "one"] * 5


def test_making_a_role_has_a_span_too(groups: dict[str, WorkerGroup]) -> None:
    proxy = groups["critic"].add_role("with a span", Sleeper)
    (span,) = proxy.ready.spans()
    assert (span.pool, span.role, span.rank, span.method) == (
        POOLS["critic"],
        "with a span",
        0,
        "__init__",
    )
    assert span.queued_s <= span.start_s <= span.end_s


def test_the_live_state_says_what_each_pool_runs_now_and_what_waits(
    groups: dict[str, WorkerGroup], actor: RoleProxy, critic: RoleProxy, tmp_path: Path
) -> None:
    written: list[State] = []

    def follow(seconds: float) -> None:
        """Read the states that are written in the next seconds."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(0.1)
            with suppress(FileNotFoundError):
                state = State(**json.loads((tmp_path / "state.json").read_text()))
                if state not in written:
                    written.append(state)

    live = Watchdog(groups, load_config([], []).config.trainer, tmp_path, print)
    try:
        live.begin("step 7")
        began_s = time.time()
        late = critic.add(batch_of(4), 1, seconds=2.5)
        waiting = actor.multiply(late, 2, seconds=2.0)
        follow(4.3)
        waiting.get()
        ended_s = time.time()
        follow(1.2)
        live.begin("step 8")
        follow(1.2)
    finally:
        live.stop()
    steps = [state for state in written if state.what == "step 7"]
    names = [
        {pool: [call[0] for call in calls if call[2] is None] for pool, calls in one.pools.items()}
        for one in steps
    ]
    assert names[0] == {"actor": [], "critic": ["add"], "rollout": []}
    assert {"actor": ["multiply"], "critic": [], "rollout": []} in names
    assert names[-1] == {"actor": [], "critic": [], "rollout": []}
    ((_, start_s, end_s),), ((_, next_s, last_s),) = (
        steps[-1].pools["critic"],
        steps[-1].pools["actor"],
    )
    assert began_s <= start_s < end_s <= next_s + 0.1
    assert ended_s <= last_s < ended_s + 1.5
    assert all(calls == [] for calls in written[-1].pools.values()), (
        "the operations of step 7 are not part of step 8"
    )
