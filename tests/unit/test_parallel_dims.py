"""How ranks work together on a role: what the keys ask for, and sums over the parts of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes

from rolepool.config import load_config
from rolepool.errors import PlacementError
from rolepool.models.ranks import PartSums
from rolepool.placement import ParallelDims, Role, build_plan
from rolepool.placement.parallel import dims_of

SIZES = st.integers(1, 6)


@given(dp=SIZES, sp=SIZES, tp=SIZES)
def test_every_part_has_as_many_neighbouring_ranks_and_one_that_returns_the_result(
    dp: int, sp: int, tp: int
) -> None:
    dims = ParallelDims(dp=dp, sp=sp, tp=tp)
    ranks = range(dims.world_size)
    parts = [dims.dp_rank(rank) for rank in ranks]
    assert parts == sorted(parts)
    assert {parts.count(part) for part in range(dp)} == {sp * tp}
    returning = [rank for rank in ranks if dims.returns_result(rank)]
    assert [dims.dp_rank(rank) for rank in returning] == list(range(dp))
    assert all(dims.tp_rank(rank) == 0 for rank in returning)


def test_ranks_that_cannot_be_divided_so_are_refused() -> None:
    assert ParallelDims.over(4, tp=2) == ParallelDims(dp=2, shard=4, tp=2)
    assert ParallelDims.over(4, shard=2).num_replicas == 2
    with pytest.raises(PlacementError, match="tensor_parallel=3 must divide 4 processes"):
        ParallelDims.over(4, tp=3)
    with pytest.raises(PlacementError, match="shard=3 must divide 4 processes"):
        ParallelDims.over(4, shard=3)


def test_the_dims_of_a_role_come_from_its_keys_and_its_pool() -> None:
    words = [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    config = load_config([], words).config
    plan = build_plan(config)
    assert plan.dims_of(config, Role.Actor) == ParallelDims(dp=4, shard=2)
    assert plan.dims_of(config, Role.Critic) == ParallelDims(dp=4, shard=4)
    assert plan.dims_of(config, Role.Rollout) == ParallelDims(dp=2, tp=2)
    assert plan.dims_of(config, Role.RefPolicy) == ParallelDims(dp=4, shard=4)
    assert dims_of(config, Role.Actor, 8) == ParallelDims(dp=8, shard=2)


def _sum_on_rank(rank: int, dims: ParallelDims, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=dims.world_size)
    part_sums = PartSums(dims, "cpu")
    rows_of_part = 10 * (dims.dp_rank(rank) + 1)
    sums = [*part_sums.sum([rows_of_part]), part_sums.max(rows_of_part)]
    (folder / f"{rank}.txt").write_text(repr(sums))
    dist.destroy_process_group()


@pytest.mark.parametrize("dims", [ParallelDims(dp=2, sp=2), ParallelDims(dp=2, tp=2)], ids=str)
def test_rows_that_several_ranks_compute_together_are_counted_once(
    dims: ParallelDims, tmp_path: Path
) -> None:
    start_processes(_sum_on_rank, (dims, tmp_path), dims.world_size, start_method="forkserver")
    results = {file.read_text() for file in tmp_path.glob("*.txt")}
    assert results == {repr([30.0, 20])}
