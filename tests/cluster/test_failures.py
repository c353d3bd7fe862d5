"""Workers that fail, and workers that die: one clear error, soon, and the rest goes on."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from cluster_helpers import (
    all_ended,
    is_running,
    leaked_since,
    pids_of,
    shared_memory,
    start,
    wait_until,
)
from roles_for_tests import Fragile, Greedy, NeverReady

from rolepool.cluster import Cluster, RoleProxy
from rolepool.cluster.answers import Asked, await_all
from rolepool.config import load_config
from rolepool.errors import WorkerError
from rolepool.protocol import CallFuture, DataProto, DataProtoFuture

SOON_S = 5.0
"""Within which a death is reported."""


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """One Ray for all clusters of this file."""
    before = shared_memory()
    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()
    wait_until(lambda: not leaked_since(before))


@pytest.fixture(scope="module")
def cluster(shared_ray: None) -> Iterator[Cluster]:
    """Two pools that stay alive, and one for each way to die."""
    pools = {
        "healthy": [2],
        "bystander": [1],
        "idle": [1],
        "busy": [1],
        "meeting": [2],
        "leaving": [1],
        "barrier": [2],
    }
    with start(pools) as cluster:
        for group in cluster.groups.values():
            group.add_role("fragile", Fragile, blocking=False)
        for group in cluster.groups.values():
            group.role("fragile").ready.get()
        yield cluster


@pytest.fixture
def healthy(cluster: Cluster) -> RoleProxy:
    return cluster.groups["healthy"].role("fragile")


@pytest.fixture
def bystander(cluster: Cluster) -> RoleProxy:
    return cluster.groups["bystander"].role("fragile")


def rows(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)})


def kill(cluster: Cluster, pool: str, rank: int = 0) -> int:
    """`kill -9` of a rank; returns its pid once the process is gone."""
    pid = cluster.groups[pool].processes[rank].pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    return pid


def error_of(call: Callable[[], Any], within_s: float = SOON_S) -> WorkerError:
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        call()
    assert time.monotonic() - begin < within_s
    return caught.value


def assert_still_works(*roles: RoleProxy) -> None:
    for role in roles:
        assert role.work().get() == list(range(role.world_size))


# Exceptions


def test_an_exception_in_a_method_says_where_it_happened_and_how(
    cluster: Cluster, healthy: RoleProxy, bystander: RoleProxy
) -> None:
    error = error_of(lambda: healthy.fail_on([1]))
    process = cluster.groups["healthy"].processes[1]
    assert (error.pool, error.role, error.rank, error.method) == (
        "healthy",
        "fragile",
        1,
        "fail_on",
    )
    assert (error.node, error.pid) == (process.address, process.pid)
    assert error.problems[0] == (
        f"healthy rank 1 (fragile.fail_on, node {process.address}, pid {process.pid}) failed: "
        "ValueError: broken on purpose on 1"
    )
    assert "Traceback (most recent call last)" in str(error)
    assert 'raise ValueError(f"broken on purpose on {self.rank}")' in str(error), (
        "the line of the role's own code"
    )
    assert_still_works(healthy, bystander)


def test_processes_are_found_by_pool_and_rank_in_the_list_of_processes(healthy: RoleProxy) -> None:
    for _ in range(2):  # Ray would change the title with each call
        titles = [
            Path(f"/proc/{process.pid}/cmdline").read_text() for process in healthy.group.processes
        ]
        assert [title.rstrip("\0 ") for title in titles] == [
            "rolepool healthy/0",
            "rolepool healthy/1",
        ]
        healthy.work().get()


def test_what_the_user_must_change_is_told_without_a_traceback(healthy: RoleProxy) -> None:
    first, second = error_of(healthy.fail_by_the_user).problems
    assert first == "some.key=1: must be 2"
    who = r"healthy rank [01] \(fragile.fail_by_the_user, node .*, pid \d+\)"
    assert re.fullmatch(f"some.other=3: must be 4; in {who}", second)


def test_a_process_that_dies_before_it_has_a_rank_is_one_line(shared_ray: None) -> None:
    class Stillborn:
        def whereabouts(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    actor = ray.remote(num_cpus=0)(Stillborn).remote()
    asked = {actor.whereabouts.remote(): Asked("a process of a_pool", "a_pool")}
    (problem,) = error_of(lambda: await_all(asked, "start"), within_s=30).problems
    assert problem.startswith("a process of a_pool could not start: The actor died")
    assert "\n" not in problem


def test_the_pool_stays_usable_when_all_ranks_fail(healthy: RoleProxy) -> None:
    for _ in range(3):
        assert error_of(lambda: healthy.fail_on([0, 1])).rank in (0, 1)
    assert_still_works(healthy)


def test_a_failed_call_raises_the_same_each_time_it_is_asked(healthy: RoleProxy) -> None:
    future = healthy.fail_on([0], blocking=False)
    first, second = error_of(future.get), error_of(future.get)
    assert str(first) == str(second)
    assert str(error_of(future.spans)) == str(first)
    assert future.done()


def test_calls_made_after_one_that_fails_run_nevertheless(healthy: RoleProxy) -> None:
    failing, following = healthy.fail_on([0, 1], blocking=False), healthy.work()
    assert following.get() == [0, 1]
    error_of(failing.get)


def test_an_exception_while_a_role_is_made_names_role_and_rank(
    cluster: Cluster, healthy: RoleProxy
) -> None:
    group = cluster.groups["healthy"]
    error = error_of(lambda: group.add_role("never ready", NeverReady, "/models/none"))
    assert (error.pool, error.role, error.rank, error.method) == (
        "healthy",
        "never ready",
        1,
        "__init__",
    )
    assert error.pid == group.processes[1].pid
    assert "FileNotFoundError: no model at /models/none" in str(error)
    assert_still_works(healthy)

    late = group.add_role("never ready either", NeverReady, "/models/none", blocking=False)
    assert "no model at /models/none" in str(error_of(late.work)), (
        "a call on a role that could not be made"
    )
    assert error_of(late.ready.get).method == "__init__"
    assert_still_works(healthy)


def test_a_wait_that_runs_out_names_the_call_and_the_call_goes_on(healthy: RoleProxy) -> None:
    future = healthy.work(2.5)
    begin = time.monotonic()
    error = error_of(lambda: future.get(timeout_s=0.3))
    assert 0.3 <= time.monotonic() - begin < 2
    assert str(error) == "fragile.work on healthy has not ended after 0.3 s"
    assert future.get() == [0, 1]


def test_a_wait_of_no_time_at_all_says_so(healthy: RoleProxy) -> None:
    future = healthy.work(0.5)
    assert str(error_of(lambda: future.get(timeout_s=0), within_s=0.4)) == (
        "fragile.work on healthy has not ended after 0 s"
    )
    future.get()


def test_a_call_that_needs_a_failed_result_fails_with_the_producers_error(
    cluster: Cluster, healthy: RoleProxy, bystander: RoleProxy
) -> None:
    produced = healthy.fail_with_batch(rows(4))
    needs_it = bystander.add_one(produced)
    needs_that = healthy.add_one(needs_it)
    for future in (needs_that, needs_it, produced):
        error = error_of(future.get)
        assert (error.pool, error.role, error.method) == ("healthy", "fragile", "fail_with_batch")
        assert "KeyError: 'no such column'" in str(error)
    assert_still_works(healthy, bystander)


def test_a_worker_error_survives_pickling() -> None:
    error = WorkerError(
        ["first", "second"], pool="p", role="r", rank=1, node="10.0.0.1", pid=7, method="m"
    )
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
    assert isinstance(copy, WorkerError)
    assert (str(copy), copy.problems) == ("first\nsecond", ("first", "second"))
    assert vars(copy) == vars(error)


# Deaths


@pytest.fixture(scope="module")
def dead_producer(cluster: Cluster) -> tuple[DataProtoFuture, int]:
    """A result that nobody fetched, of a process that was idle when it was killed; and its pid."""
    result = cluster.groups["idle"].role("fragile").make(rows(4))
    result.spans()
    return result, kill(cluster, "idle")


def test_a_worker_that_is_killed_while_idle_fails_the_next_call(
    cluster: Cluster,
    healthy: RoleProxy,
    bystander: RoleProxy,
    dead_producer: tuple[DataProtoFuture, int],
) -> None:
    _, pid = dead_producer
    idle = cluster.groups["idle"].role("fragile")
    for _ in range(2):
        error = error_of(lambda: idle.work(blocking=True))
        assert (error.pool, error.rank, error.pid) == ("idle", 0, pid)
        assert f"idle rank 0 (node {error.node}, pid {pid}) died during fragile.work" in str(error)
    error_of(lambda: cluster.groups["idle"].add_role("another", Fragile))
    assert_still_works(healthy, bystander)


def test_a_result_outlives_its_producer(
    healthy: RoleProxy, dead_producer: tuple[DataProtoFuture, int]
) -> None:
    result, _ = dead_producer
    assert bool(result.get().batch["wide"].eq(0).all())
    assert healthy.add_one(result).get().batch["x"].tolist() == [1, 2, 3, 4], "also in another pool"
    assert_still_works(healthy)


def test_a_worker_that_is_killed_in_a_call_fails_that_call_and_all_that_wait_behind_it(
    cluster: Cluster, healthy: RoleProxy, bystander: RoleProxy
) -> None:
    busy = cluster.groups["busy"].role("fragile")
    elsewhere = bystander.work(1.0)
    running, waiting, produced = busy.work(60), busy.work(), busy.make(rows(4))
    needs_it = healthy.add_one(produced)
    time.sleep(0.2)
    pid = kill(cluster, "busy")
    begin = time.monotonic()
    for future in (running, waiting, needs_it, produced):
        error = error_of(future.get)
        assert (error.pool, error.role, error.rank, error.pid) == ("busy", "fragile", 0, pid)
        assert f"pid {pid}) died during fragile." in str(error)
    assert time.monotonic() - begin < SOON_S, "all of them together"
    assert error_of(busy.work, within_s=2).pid == pid, "a later call fails when it is made"
    assert elsewhere.get() == [0], "another pool's call runs on"
    assert_still_works(healthy, bystander)


def test_the_watchdog_reports_a_death_while_the_run_waits_for_another_pool(
    shared_ray: None, tmp_path: Path
) -> None:
    """Rank 0 does not notice that rank 1 is dead, as in a collective of GPUs."""
    keys = load_config([], []).config.trainer
    with start({"awaited": [1], "dying": [2]}) as cluster:
        cluster.start_watchdog(keys, tmp_path, lambda line: None)
        awaited, dying = (
            cluster.groups[name].add_role("fragile", Fragile) for name in ("awaited", "dying")
        )
        running = awaited.work(4 * SOON_S)
        hanging = dying.work(600)
        time.sleep(0.5)
        peer = cluster.groups["dying"].processes[0].pid
        pid = kill(cluster, "dying", rank=1)
        error = error_of(running.get)
        assert (error.pool, error.rank, error.pid, error.method) == ("dying", 1, pid, "work")
        assert error.is_death
        assert error_of(hanging.get) is error
        wait_until(lambda: not is_running(peer), timeout_s=SOON_S)
        # What is known already does not disturb later waits, which are longer than the first poll.
        assert running.get() == [0]
        assert awaited.work(1.0).get() == [0]


@pytest.fixture(scope="module")
def killed_peer(cluster: Cluster) -> tuple[CallFuture, DataProtoFuture, int]:
    """A collective that rank 0 waits in and rank 1 died before; an earlier result of both; and the
    pid of rank 1."""
    meeting = cluster.groups["meeting"].role("fragile")
    result = meeting.make(rows(4))
    result.spans()
    future = meeting.meet_the_one_that_sleeps(1, 60)
    time.sleep(0.5)
    return future, result, kill(cluster, "meeting", rank=1)


def test_the_error_names_the_one_that_was_killed_and_not_the_peer_that_waited_for_it(
    cluster: Cluster, healthy: RoleProxy, killed_peer: tuple[CallFuture, DataProtoFuture, int]
) -> None:
    future, _, pid = killed_peer
    error = error_of(future.get)
    assert (error.pool, error.rank, error.pid, error.method) == (
        "meeting",
        1,
        pid,
        "meet_the_one_that_sleeps",
    )
    wait_until(lambda: all_ended(process.pid for process in cluster.groups["meeting"].processes))
    assert error_of(cluster.groups["meeting"].role("fragile").work).pid == pid
    assert_still_works(healthy)


def test_a_result_of_both_outlives_them(
    cluster: Cluster, healthy: RoleProxy, killed_peer: tuple[CallFuture, DataProtoFuture, int]
) -> None:
    future, result, _ = killed_peer
    error_of(future.get)
    wait_until(lambda: all_ended(process.pid for process in cluster.groups["meeting"].processes))
    assert bool(result.get().batch["wide"].eq(0).all())
    assert len(healthy.add_one(result).get()) == len(result)
    assert_still_works(healthy)


def test_a_worker_that_leaves_by_itself_is_a_death_too(
    cluster: Cluster, healthy: RoleProxy
) -> None:
    leaving = cluster.groups["leaving"].role("fragile")
    error = error_of(leaving.leave().get)
    assert (error.pool, error.rank, error.method) == ("leaving", 0, "leave")
    assert error.pid == cluster.groups["leaving"].processes[0].pid
    assert "died during fragile.leave" in str(error)
    assert_still_works(healthy)


def test_one_rank_that_fails_while_the_others_wait_for_it_does_not_hang(
    cluster: Cluster, healthy: RoleProxy
) -> None:
    barrier = cluster.groups["barrier"].role("fragile")
    future, waiting = barrier.fail_on_one_while_others_wait(), barrier.work()
    error = error_of(future.get, within_s=10)
    assert (error.pool, error.rank, error.method) == ("barrier", 1, "fail_on_one_while_others_wait")
    assert "ValueError: did not come to the barrier" in str(error)
    assert "did not come to the barrier" in str(error_of(waiting.get)), (
        "the pool cannot be used any more, and says why"
    )
    assert "did not come to the barrier" in str(error_of(barrier.work))
    wait_until(lambda: all_ended(process.pid for process in cluster.groups["barrier"].processes))
    assert_still_works(healthy)


# Memory


def test_out_of_memory_is_one_error_with_what_was_wanted_what_was_free_and_what_helps(
    cluster: Cluster, healthy: RoleProxy
) -> None:
    group = cluster.groups["healthy"]
    errors = [
        error_of(lambda: group.add_role("too large", Greedy, at_once=True)),
        error_of(group.add_role("greedy", Greedy).take_too_much),
    ]
    for error, role, method in zip(
        errors, ("too large", "greedy"), ("__init__", "take_too_much"), strict=True
    ):
        assert (error.pool, error.role, error.rank, error.method) == ("healthy", role, 1, method)
        first, second = error.problems
        who = f"healthy rank 1 ({role}.{method}, node {error.node}, pid {group.processes[1].pid})"
        found = re.fullmatch(
            r"(.*) is out of memory: it asked for (.*), and \S+ [MGT]iB are free in host memory",
            first,
        )
        assert found is not None and found.groups() == (who, "4.0 PiB")
        assert second.startswith(
            f"try some.rows=2 or {method}.offload=true; more advice is in docs/troubleshooting.md"
        )
    assert_still_works(healthy)


# Repairs


class CountsPings:
    """The handle of a process, which counts how often the process is asked whether it lives."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.num_pings = 0

    def __getattr__(self, name: str) -> Any:
        self.num_pings += name == "ping"
        return getattr(self._actor, name)


def test_after_a_failure_each_process_is_asked_once_whether_it_lives(shared_ray: None) -> None:
    with start({"healthy": [1], "dying": [1]}, helpers={"helping": 1}) as cluster:
        for group in cluster.groups.values():
            group.add_role("fragile", Fragile)
        (process,) = cluster.groups["healthy"].processes
        process.actor = counter = CountsPings(process.actor)

        error_of(lambda: cluster.groups["healthy"].role("fragile").fail_on([0]))
        assert counter.num_pings == 1, "a death may have caused the exception"
        assert cluster.find_death() is None
        assert cluster.repair() == []
        assert counter.num_pings == 1, "it has answered"

        for name in ("dying", "helping"):
            kill(cluster, name)
        assert error_of(cluster.groups["dying"].role("fragile").work().get).is_death
        assert counter.num_pings == 1, "Ray has named the process that died"
        assert sorted(cluster.repair()) == ["dying", "helping"]
        assert counter.num_pings == 2, "others may have died, too, and one has"
        for name in ("dying", "helping"):
            assert_still_works(cluster.groups[name].add_role("fragile", Fragile))
        assert_still_works(cluster.groups["healthy"].role("fragile"))


# At random


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_a_kill_of_any_worker_at_any_moment_is_one_clean_error(shared_ray: None, seed: int) -> None:
    rng = random.Random(seed)
    before = shared_memory()
    with start({"train": [2], "generate": [1]}) as cluster:
        train = cluster.groups["train"].add_role("trainer", Fragile)
        generate = cluster.groups["generate"].add_role("generator", Fragile)
        pids = pids_of(cluster)
        victim, killed_at = rng.choice(pids), []

        def strike() -> None:
            killed_at.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        timer = threading.Timer(rng.uniform(0.1, 1.5), strike)
        timer.start()
        with pytest.raises(WorkerError) as caught:
            while True:
                made = generate.make(rows(5), seconds=0.02)
                training, added = train.steps(3), train.add_one(made)
                assert generate.add_one(added).get().batch["x"].tolist() == [2, 3, 4, 5, 6]
                training.get()
        took_s = time.monotonic() - killed_at[0]
        assert took_s < SOON_S
        assert caught.value.pid == victim, str(caught.value)
        assert caught.value.rank is not None and caught.value.node and caught.value.method
        dead = caught.value.pool
        survivors = [role for role in (train, generate) if role.group.name != dead]
        assert_still_works(*survivors)
    wait_until(lambda: all_ended(pids))
    assert not leaked_since(before)
