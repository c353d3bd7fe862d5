"""Calls on the roles of a pool: who gets what, what comes back, and in which processes it
happens."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from cluster_helpers import listening_addresses, pids_of, seconds_to
from roles_for_tests import Actor, Critic, Everything, Network

from rolepool.cluster import Cluster, RoleProxy
from rolepool.errors import DataError, WorkerError
from rolepool.placement import ParallelDims
from rolepool.protocol import (
    CallFuture,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Execute,
    Worker,
    register,
)
from rolepool.protocol.worker import WorkerContext


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture(scope="module")
def four(cluster: Cluster) -> RoleProxy:
    return cluster.groups["four"].add_role("everything", Everything)


@pytest.fixture(scope="module")
def mesh(cluster: Cluster) -> RoleProxy:
    """The same pool seen as two data-parallel groups of two ranks."""
    return cluster.groups["four"].add_role("meshed", Everything, dims=ParallelDims(dp=2, tp=2))


def batch_of(num_rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(num_rows)}, {"text": [f"row {i}" for i in range(num_rows)]}, {"step": 3}
    )


# The example


def test_the_example_of_the_issue_runs_both_updates_at_once_and_hands_out_futures(
    cluster: Cluster,
) -> None:
    critic = cluster.groups["four"].add_role("critic", Critic, bias=10.0)
    actor = cluster.groups["one"].add_role("actor", Actor)
    batch = DataProto.from_dict({"x": torch.arange(8.0)})

    begin = time.monotonic()
    critic_output = critic.update_critic(batch)  # a future, at once
    actor_output = actor.update_actor(batch)
    to_issue_s = time.monotonic() - begin
    assert isinstance(critic_output, DataProtoFuture) and isinstance(actor_output, DataProtoFuture)
    assert not critic_output.done() and not actor_output.done()
    critic_output = critic_output.get()
    actor_output = actor_output.get()

    assert to_issue_s < 0.8, "each update takes 1 s"
    assert torch.equal(critic_output.batch["values"], torch.arange(8.0) + 10)
    assert torch.equal(actor_output.batch["log_probs"], torch.arange(8.0) * 2)
    assert critic_output.meta_info["metrics"] == {"rank": [0, 1, 2, 3]}, "a list of each rank's"


# Modes


def test_rank_zero_runs_alone_and_its_result_comes_back(four: RoleProxy) -> None:
    assert four.rank_zero(1, [2], word="three") == (0, (1, [2]), {"word": "three"})


def test_one_to_all_gives_every_rank_the_same(four: RoleProxy) -> None:
    assert four.one_to_all([1, 2], word="x") == [
        (rank, ([1, 2],), {"word": "x"}) for rank in range(4)
    ]


def test_one_to_all_gives_every_rank_the_whole_of_a_batch(four: RoleProxy) -> None:
    for _, (data,), _ in four.one_to_all(batch_of(3)):
        assert data.batch["x"].tolist() == [0, 1, 2]
        assert data.meta_info == {"step": 3}


@pytest.mark.parametrize("num_rows", [1, 100], ids=["small", "too large for a reply"])
def test_one_to_all_returns_whole_batches(four: RoleProxy, num_rows: int) -> None:
    assert [data.batch["zeros"].shape for data in four.zeros(num_rows)] == [(num_rows, 1024)] * 4


def test_all_to_all_gives_every_rank_its_entry_of_each_list(four: RoleProxy) -> None:
    assert four.all_to_all([10, 11, 12, 13], word=("a", "b", "c", "d")) == [
        (rank, (10 + rank,), {"word": "abcd"[rank]}) for rank in range(4)
    ]
    assert four.all_to_all() == [(rank, (), {}) for rank in range(4)], (
        "without arguments there is nothing to hand out"
    )


def test_all_to_all_takes_a_list_of_batches(four: RoleProxy) -> None:
    results = four.all_to_all([batch_of(rank) for rank in range(4)])
    assert [len(data) for _, (data,), _ in results] == [0, 1, 2, 3]


def test_dp_compute_takes_a_list_with_an_entry_per_group(four: RoleProxy, mesh: RoleProxy) -> None:
    assert four.dp_compute([5, 6, 7, 8]) == [(rank, (5 + rank,), {}) for rank in range(4)]
    assert mesh.dp_compute([5, 6]) == [(0, (5,), {}), (2, (6,), {})]


def test_dp_compute_proto_cuts_batches_in_rank_order_and_joins_the_results(four: RoleProxy) -> None:
    result = four.dp_compute_proto(batch_of(8), factor=3)
    assert result.batch["y"].tolist() == [3 * i for i in range(8)]
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert result.non_tensor_batch["text"].tolist() == [f"row {i}" for i in range(8)]


def test_a_batch_may_be_given_by_name(four: RoleProxy) -> None:
    assert four.dp_compute_proto(factor=2, data=batch_of(4)).batch["y"].tolist() == [0, 2, 4, 6]


def test_dp_compute_metric_cuts_batches_and_gives_a_list(four: RoleProxy) -> None:
    assert four.dp_compute_metric(batch_of(8)) == [
        {"rank": 0, "sum": 1},
        {"rank": 1, "sum": 5},
        {"rank": 2, "sum": 9},
        {"rank": 3, "sum": 13},
    ]


@pytest.mark.parametrize("role", ["four", "mesh"])
def test_execute_rank_zero_runs_any_mode_on_rank_zero_alone(
    role: str, four: RoleProxy, mesh: RoleProxy
) -> None:
    proxy = {"four": four, "mesh": mesh}[role]
    assert proxy.one_to_all_on_zero("v") == (0, "v")
    assert proxy.all_to_all_on_zero(["v"]) == (0, "v")
    result = proxy.dp_compute_proto_on_zero(batch_of(5))
    assert (result.batch["y"].tolist(), result.batch["rank"].tolist()) == ([0, 1, 2, 3, 4], [0] * 5)
    assert proxy.dp_compute_metric_on_zero(batch_of(3)) == (0, [0, 1, 2])


def test_dp_compute_on_rank_zero_takes_a_list_with_the_one_entry_of_the_rank_that_runs(
    four: RoleProxy,
) -> None:
    assert four.dp_compute_on_zero(["v"]) == (0, "v")


def test_custom_functions_hand_out_arguments_and_collect_results(four: RoleProxy) -> None:
    future = four.custom(batch_of(4), factor=10)
    assert isinstance(future, CallFuture)
    assert future.get() == {"ranks": 4, "sum": 0 * 0 + 1 * 10 + 2 * 20 + 3 * 30}


def test_a_coroutine_runs_to_its_end_before_the_next_call_begins(cluster: Cluster) -> None:
    proxy = cluster.groups["four"].add_role("coroutines", Everything)
    slow, quick = proxy.slow_coroutine("slow"), proxy.quick("quick")
    assert quick.get() == [f"quick on {rank}" for rank in range(4)]
    assert slow.done()
    assert slow.get() == [f"slow on {rank}" for rank in range(4)]
    assert proxy.names_in_order() == [["slow", "quick"]] * 4


# Blocking


def test_blocking_is_a_default_that_a_proxy_and_a_call_override(
    cluster: Cluster, four: RoleProxy
) -> None:
    assert isinstance(four.quick("x"), CallFuture), "registered with blocking=False"
    assert four.quick("x", blocking=True) == [f"x on {rank}" for rank in range(4)]
    assert isinstance(four.one_to_all(1), list), "registered with the default"
    assert isinstance(four.one_to_all(1, blocking=False), CallFuture)

    futures_only = cluster.groups["four"].role("everything", blocking=False)
    assert isinstance(futures_only.one_to_all(1), CallFuture)
    assert isinstance(futures_only.dp_compute_proto(batch_of(4)), DataProtoFuture)
    assert isinstance(futures_only.one_to_all(1, blocking=True), list), "the call has the last word"
    waiting = cluster.groups["four"].role("everything", blocking=True)
    assert isinstance(waiting.quick("x"), list)
    assert isinstance(four.quick("x"), CallFuture), "other proxies of the role are as they were"


def test_a_role_that_is_made_without_waiting_takes_calls_at_once(cluster: Cluster) -> None:
    class Slow(Worker):
        def __init__(self) -> None:
            time.sleep(3)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def ready_ranks(self) -> int:
            return self.rank

    begin = time.monotonic()
    proxy = cluster.groups["four"].add_role("slow to start", Slow, blocking=False)
    future = proxy.ready_ranks(blocking=False)
    assert time.monotonic() - begin < 2.5
    assert future.get() == [0, 1, 2, 3]
    assert proxy.ready.get() is None


# Wrong use


def test_a_list_of_the_wrong_length_is_refused_with_role_method_and_sizes(
    four: RoleProxy, mesh: RoleProxy
) -> None:
    with pytest.raises(
        DataError, match=r"everything\.all_to_all: argument 0 .* 4 ranks, not 3 entries"
    ):
        four.all_to_all([1, 2, 3])
    with pytest.raises(
        DataError, match=r"everything\.all_to_all: argument word .* 4 ranks, not str"
    ):
        four.all_to_all([1, 2, 3, 4], word="abcd")
    with pytest.raises(
        DataError, match=r"meshed\.dp_compute: argument 0 .* 2 data-parallel groups, not 4 entries"
    ):
        mesh.dp_compute([1, 2, 3, 4])
    assert four.rank_zero() == (0, (), {}), "nothing was called"


def test_an_unknown_method_is_refused_with_the_ones_there_are(four: RoleProxy) -> None:
    with pytest.raises(
        AttributeError, match=r"Everything has no registered method compute; it has .*dp_compute, "
    ):
        four.compute()
    with pytest.raises(AttributeError, match="no registered method not_registered"):
        four.not_registered()


def test_an_unknown_role_is_refused_with_the_ones_there_are(
    cluster: Cluster, four: RoleProxy
) -> None:
    with pytest.raises(WorkerError, match=r"four has no role referee; it has .*everything"):
        cluster.groups["four"].role("referee")
    with pytest.raises(WorkerError, match="four already has a role everything"):
        cluster.groups["four"].add_role("everything", Everything)


@pytest.mark.parametrize("dims", [ParallelDims(tp=3), ParallelDims(dp=4, tp=2)])
def test_dims_of_another_number_of_ranks_are_refused(cluster: Cluster, dims: ParallelDims) -> None:
    with pytest.raises(WorkerError, match=r"four: .* dp \* sp \* tp must be 4"):
        cluster.groups["four"].add_role("odd", Everything, dims=dims)
    assert "odd" not in cluster.groups["four"].roles


def test_a_method_that_cannot_be_registered_says_why() -> None:
    with pytest.raises(DataError, match="dispatch_mode is 'all'"):
        register(dispatch_mode="all")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="or a dict with the functions dispatch_fn and collect_fn"):
        register(dispatch_mode={"dispatch_fn": lambda group: ((), {})})
    with pytest.raises(DataError, match="execute_mode is 'all'"):
        register(execute_mode="all")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="wait has a parameter named blocking"):

        @register(Dispatch.ONE_TO_ALL, Execute.ALL)
        def wait(self: Any, blocking: bool) -> None: ...


def test_a_future_that_a_function_of_the_driver_puts_together_cannot_be_handed_on(
    four: RoleProxy,
) -> None:
    with pytest.raises(
        DataError,
        match=r"CallFuture of everything\.custom on four.* pass the result of its get\(\)",
    ):
        four.one_to_all(four.custom(batch_of(4), factor=1))


# Meshes


def test_a_chunk_goes_to_every_rank_of_a_data_parallel_group_and_one_of_them_answers(
    mesh: RoleProxy,
) -> None:
    assert (mesh.dp_size, mesh.dims.tp, mesh.world_size) == (2, 2, 4)
    result = mesh.dp_compute_proto(batch_of(6))
    assert result.batch["y"].tolist() == [0, 1, 2, 3, 4, 5]
    assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2, 2]
    assert mesh.last_seen() == [
        (0, 0, 0, [0, 1, 2]),
        (1, 0, 1, [0, 1, 2]),
        (2, 1, 0, [3, 4, 5]),
        (3, 1, 1, [3, 4, 5]),
    ]
    assert mesh.dp_compute_metric(batch_of(6)) == [{"rank": 0, "sum": 3}, {"rank": 2, "sum": 12}]


def test_a_batch_that_the_data_parallel_groups_do_not_divide_is_padded_on_a_mesh_too(
    mesh: RoleProxy,
) -> None:
    assert mesh.dp_compute_proto(batch_of(7)).batch["y"].tolist() == list(range(7))
    assert [seen for *_, seen in mesh.last_seen()] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 4]] * 2


def test_a_call_on_a_mesh_has_a_span_of_every_rank(mesh: RoleProxy) -> None:
    future = mesh.dp_compute_proto(batch_of(6), blocking=False)
    assert [(span.pool, span.role, span.rank, span.method) for span in future.spans()] == [
        ("four", "meshed", rank, "dp_compute_proto") for rank in range(4)
    ]


def test_a_future_of_a_mesh_can_be_handed_to_a_role_that_sees_the_pool_otherwise(
    mesh: RoleProxy, four: RoleProxy
) -> None:
    produced = mesh.dp_compute_proto(batch_of(8), factor=5, blocking=False)
    renamed = DataProto.from_dict({"x": torch.zeros(8, dtype=torch.int64)})
    result = four.dp_compute_proto(produced.union(renamed))
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert result.non_tensor_batch["text"].tolist() == [f"row {i}" for i in range(8)]


# Processes


@pytest.fixture(scope="module")
def networks(cluster: Cluster) -> dict[str, RoleProxy]:
    return {
        "network": cluster.groups["four"].add_role("network", Network),
        "other": cluster.groups["four"].add_role("other", Network),
        "small": cluster.groups["one"].add_role("network", Network),
    }


def test_roles_of_a_pool_share_its_processes_and_its_process_group(
    cluster: Cluster, networks: dict[str, RoleProxy]
) -> None:
    first, second = networks["network"].process(), networks["other"].process()
    assert [process["pid"] for process in first] == pids_of(cluster)[:4]
    for name in ("pid", "process_group", "environment"):
        assert [process[name] for process in first] == [process[name] for process in second]
    assert len({process["pid"] for process in first}) == 4
    assert networks["small"].process()[0]["pid"] == pids_of(cluster)[4]


def test_every_process_finds_its_rank_in_the_environment_and_computes_with_one_thread(
    networks: dict[str, RoleProxy],
) -> None:
    in_four, in_one = networks["network"].process(), networks["small"].process()
    for size, processes in ((4, in_four), (1, in_one)):
        for rank, process in enumerate(processes):
            environment = process["environment"]
            assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), str(size))
            assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == (
                str(rank),
                str(size),
            )
            assert process["rank"] == (rank, size)
            assert process["backend"] == "gloo"
            assert process["threads"] == 1
            assert process["omp"] == "PASSIVE"
            context = process["context"]
            assert (context.rank, context.world_size, context.device) == (rank, size, "cpu")
    addresses = [
        {
            (process["environment"]["MASTER_ADDR"], process["environment"]["MASTER_PORT"])
            for process in processes
        }
        for processes in (in_four, in_one)
    ]
    assert [len(found) for found in addresses] == [1, 1], "one meeting point per pool"
    assert addresses[0] != addresses[1]


def test_a_collective_reaches_the_ranks_of_its_pool_only(networks: dict[str, RoleProxy]) -> None:
    in_four, in_one = networks["network"].all_reduce_rank(), networks["small"].all_reduce_rank()
    assert in_four.get() == [1 + 2 + 3 + 4] * 4
    assert in_one.get() == [1]


def test_initial_weights_depend_on_the_role_only(networks: dict[str, RoleProxy]) -> None:
    weights = networks["network"].initial()
    assert all(of_rank == weights[0] for of_rank in weights)
    assert networks["small"].initial() == weights[:1], "in a pool of another size"
    assert networks["other"].initial()[0] != weights[0], "another role"


def test_every_role_draws_its_own_random_numbers_on_every_rank(
    networks: dict[str, RoleProxy],
) -> None:
    drawn: dict[str, list[Any]] = {"network": [], "other": []}
    for name in ("network", "other", "other", "network", "other", "network"):
        drawn[name].append(networks[name].draw())
    for name, draws in drawn.items():
        for rank in range(4):
            seed = WorkerContext(pool="four", role=name, rank=rank).seed
            expected = draws_from(seed, len(draws))
            assert [draw[rank] for draw in draws] == expected, (
                f"{name} rank {rank} draws as if it were alone"
            )
    assert len({draw for draws in drawn.values() for ranks in draws for draw in ranks}) == 2 * 3 * 4


def draws_from(seed: int, count: int) -> list[tuple[float, float, float]]:
    generator = torch.Generator().manual_seed(seed)
    numpy_random, python_random = np.random.RandomState(seed % 2**32), random.Random(seed)
    return [
        (
            torch.rand(1, dtype=torch.float64, generator=generator).item(),
            float(numpy_random.random_sample()),
            python_random.random(),
        )
        for _ in range(count)
    ]


def test_an_empty_call_takes_milliseconds(four: RoleProxy) -> None:
    four.rank_zero()
    assert seconds_to(lambda: [four.one_to_all() for _ in range(20)]) / 20 < 0.1


# Who can reach it


def test_a_run_on_one_node_listens_on_the_loopback_address_only(cluster: Cluster) -> None:
    found = listening_addresses()
    assert sum(map(len, found.values())) >= 6, (
        "GCS, raylet, workers, the driver and the pool's store were seen"
    )
    assert set(found) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, found
    assert {process.address for process in cluster.groups["four"].processes} == {"127.0.0.1"}
