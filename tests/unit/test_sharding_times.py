"""What sharding costs: measured with a small model, and taken apart into a time per layer and a
time per parameter."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.multiprocessing import start_processes

from rolepool.metrics.sharding_times import ShardingTime, ShardingTimes
from rolepool.models.sharding_times import NUM_LAYERS, measure_sharding, sizes_to_measure
from rolepool.planner.sharding import ShardingCosts

PER_UNIT_S, PER_PARAM_S = 2e-3, 1e-9


def times_over(num_ranks: int, factor: float = 1.0, part: str = "forward") -> list[ShardingTime]:
    """Times of two models with known costs."""
    times = []
    for num_params in (100_000, 2_000_000):
        added_s = factor * (4 * PER_UNIT_S + num_params * PER_PARAM_S)
        times.append(ShardingTime(num_ranks, part, 4, num_params, 0.01 + added_s, 0.01))
    return times


def seconds(
    times: list[ShardingTime], num_ranks: int, num_units: int = 25, num_params: int = 500_000_000
) -> float:
    sharding = ShardingCosts(times).of_model("forward", num_units, num_params)
    assert sharding is not None
    return sharding.seconds(num_ranks)


def test_costs_of_a_layer_and_of_a_parameter_are_told_apart() -> None:
    assert seconds(times_over(2), 2) == pytest.approx(25 * PER_UNIT_S + 500_000_000 * PER_PARAM_S)


def test_one_rank_pays_nothing() -> None:
    assert seconds(times_over(2), 1) == 0


def test_between_two_numbers_of_ranks_the_cost_grows_evenly_and_beyond_them_it_stays() -> None:
    times = times_over(2) + times_over(8, factor=3.0)
    two, five, eight, more = (seconds(times, num_ranks) for num_ranks in (2, 5, 8, 16))
    assert five == pytest.approx((two + eight) / 2)
    assert eight == pytest.approx(3 * two)
    assert more == eight
    costs = ShardingCosts(times)
    assert [costs.covers(num_ranks) for num_ranks in (1, 2, 5, 8, 16)] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_only_an_optimizer_is_faster_on_a_shard_and_it_never_takes_less_than_nothing() -> None:
    """The larger model takes 3 ms less with sharding than without, and the small one 2 ms more."""
    small, large = 100_000, 2_000_000

    def added_s(part: str, num_params: int) -> float:
        times = [
            ShardingTime(2, part, 4, small, 0.012, 0.01),
            ShardingTime(2, part, 4, large, 0.017, 0.02),
        ]
        sharding = ShardingCosts(times).of_model(part, 4, num_params)
        assert sharding is not None
        return sharding.seconds(2)

    assert added_s("optimizer", small) == pytest.approx(0.002)
    assert added_s("optimizer", 10 * large) == 0
    assert added_s("forward", small) == pytest.approx(0.002)
    assert added_s("forward", 10 * large) == pytest.approx(0.002)


def test_what_was_not_measured_is_not_known() -> None:
    assert ShardingCosts(times_over(2)).of_model("prefill", 25, 1000) is None
    assert not ShardingCosts([]).is_measured
    assert not ShardingCosts([]).covers(1)


@pytest.mark.parametrize(
    ("field", "value"), [("sharded_s", math.inf), ("num_ranks", 0), ("alone_s", -1.0)]
)
def test_a_file_with_impossible_numbers_is_refused(field: str, value: float) -> None:
    content = ShardingTimes(times=times_over(2)).model_dump()
    assert ShardingTimes.model_validate_json(json.dumps(content)).times == times_over(2)
    content["times"][0][field] = value
    with pytest.raises(ValidationError):
        ShardingTimes.model_validate_json(json.dumps(content))


# Measuring


def test_on_gpus_only_the_whole_group_is_measured() -> None:
    assert sizes_to_measure(8, "cpu") == [2, 8]
    assert sizes_to_measure(8, "cuda") == [8]
    assert sizes_to_measure(2, "cpu") == [2]
    assert sizes_to_measure(1, "cpu") == []


def measure_on_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    times = measure_sharding("cpu")
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(ShardingTimes(times=times).model_dump_json())


def test_ranks_measure_every_part_with_and_without_sharding(tmp_path: Path) -> None:
    start_processes(measure_on_rank, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in (0, 1):
        times = ShardingTimes.model_validate_json((tmp_path / f"{rank}.json").read_bytes()).times
        assert {one.part for one in times} == {
            "forward",
            "backward",
            "optimizer",
            "score",
            "gather",
        }
        assert len({(one.part, one.num_params) for one in times}) == len(times) == 10
        assert {(one.num_ranks, one.num_units) for one in times} == {(2, NUM_LAYERS + 1)}
        assert sum(one.added_s for one in times) > 0  # collectives and copies are not free
