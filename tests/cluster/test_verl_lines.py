"""The lines with which programs for verl make worker groups run unchanged, except for their
imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from rolepool import DataProto, DataProtoFuture, Dispatch, ResourcePool, Worker, register
from rolepool.cluster import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from rolepool.errors import DataError, WorkerError
from rolepool.protocol import make_nd_compute_dataproto_dispatch_fn, ragged


@ray.remote
class Scorer(Worker):
    def __init__(self, config: dict[str, float], role: str = "scorer") -> None:
        super().__init__()
        self.config, self.role = config, role
        self.num_rows = 0
        self._register_dispatch_collect_info(mesh_name="scorer", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.bias = self.config["bias"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        data.batch["score"] = data.batch["x"] + self.bias + 100 * self.rank
        return data

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="scorer"), blocking=False
    )
    async def score_rows(self, data: TensorDict) -> TensorDict:
        self.num_rows = len(data)
        data["score"] = data["x"] + self.bias + 100 * self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def unchanged(self, data: Any) -> Any:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def about(self) -> tuple[str, int, int]:
        return self.role, self.num_rows, os.getpid()


@pytest.fixture(scope="module")
def pool() -> Iterator[RayResourcePool]:
    ray.init(num_cpus=4, include_dashboard=False)
    yield RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    ray.shutdown()


@pytest.fixture(scope="module")
def scorer(pool: RayResourcePool) -> RayWorkerGroup:
    class_with_args = RayClassWithInitArgs(cls=Scorer, config={"bias": 0.5}, role="judge")
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=class_with_args, device_name="cpu")
    assert group.init_model() == [None, None]
    return group


@pytest.mark.parametrize("num_rows", [4, 5, 1])
def test_a_group_of_a_pool_and_a_class_splits_batches_over_its_ranks(
    scorer: RayWorkerGroup, num_rows: int
) -> None:
    size = -(-num_rows // 2)
    result = scorer.score(
        DataProto.from_dict({"x": torch.arange(float(num_rows))}, {"name": ["a"] * num_rows})
    )
    assert result.batch["score"].tolist() == [
        row + 0.5 + 100 * (row // size) for row in range(num_rows)
    ]
    assert result.non_tensor_batch["name"].tolist() == ["a"] * num_rows
    assert scorer.world_size == 2
    assert [role for role, _, _ in scorer.about()] == ["judge"] * 2


@pytest.mark.parametrize("num_rows", [4, 5, 1])
def test_a_tensordict_is_split_and_a_tensordict_comes_back(
    scorer: RayWorkerGroup, num_rows: int
) -> None:
    lengths, size = torch.arange(num_rows) % 3, -(-num_rows // 2)
    tokens = ragged(torch.repeat_interleave(torch.arange(num_rows), lengths), lengths)
    names = [f"row {row}" for row in range(num_rows)]
    columns = {"x": torch.arange(float(num_rows)), "tokens": tokens, "name": names}
    data = TensorDict(columns, [num_rows]).set_non_tensor("temperature", 0.7)

    future = scorer.score_rows(data)
    result = future.get()

    assert isinstance(future, DataProtoFuture) and isinstance(result, TensorDict)
    assert [num for _, num, _ in scorer.about()] == [size, size]
    assert result.batch_size == torch.Size([num_rows])
    assert result["score"].tolist() == [row + 0.5 + 100 * (row // size) for row in range(num_rows)]
    assert [row.tolist() for row in result["tokens"].unbind()] == [
        [row] * (row % 3) for row in range(num_rows)
    ]
    assert (result["name"], result["temperature"]) == (names, 0.7)
    assert set(result.keys()) == {"x", "tokens", "name", "temperature", "score"}, (
        "and nothing that marks padding"
    )
    again = scorer.unchanged(future)
    assert isinstance(again, TensorDict) and again["score"].tolist() == result["score"].tolist(), (
        "also as a future"
    )


def test_an_array_inside_itself_is_sent_and_returned(scorer: RayWorkerGroup) -> None:
    loop = np.fromiter([None, "b"], object)
    loop[0] = loop
    returned = scorer.unchanged(DataProto.from_dict({"x": torch.arange(2)}, {"loop": loop}))
    assert returned.non_tensor_batch["loop"][1] == "b"
    assert returned.non_tensor_batch["loop"][0][1] == "b"


def test_classes_of_one_group_share_the_processes_of_a_pool_of_their_own(
    scorer: RayWorkerGroup,
) -> None:
    classes = {
        name: RayClassWithInitArgs(Scorer, {"bias": bias})
        for name, bias in (("actor", 1.0), ("critic", 2.0))
    }
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, name_prefix="second")
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=classes)
    )
    groups = group.spawn(prefix_set=classes.keys())

    for name, bias in (("actor", 1.0), ("critic", 2.0)):
        groups[name].init_model()
        assert groups[name].score(DataProto.from_dict({"x": torch.zeros(2)})).batch[
            "score"
        ].tolist() == [
            bias,
            bias + 100,
        ]
    pids = [[pid for *_, pid in one.about()] for one in (groups["actor"], groups["critic"], scorer)]
    assert pids[0] == pids[1]
    assert set(pids[0]).isdisjoint(pids[2])
    with pytest.raises(
        AttributeError, match=r"score: the group has the classes \['actor', 'critic'\]; call spawn"
    ):
        group.score(DataProto.from_dict({"x": torch.zeros(2)}))


def test_a_mesh_that_the_group_does_not_have_is_refused_with_what_to_write(
    pool: RayResourcePool, scorer: RayWorkerGroup
) -> None:
    again = RayClassWithInitArgs(Scorer, {"bias": 0.0})
    with pytest.raises(
        WorkerError,
        match=r"mesh 'scorer': .* is \(1, True\), but here it is \(0, False\); set tensor_",
    ):
        RayWorkerGroup(pool, again, tensor_parallel=2)


def test_a_pool_of_a_plan_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        DataError, match=r"resource_pool is a ResourcePool; write RayResourcePool\(\[2\]\)"
    ):
        RayWorkerGroup(ResourcePool((2,)), RayClassWithInitArgs(Scorer, {}))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_program_of_the_page_runs(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/from_verl.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n# verl_worker\.py\n(.*?)```", page, flags=re.DOTALL)
    assert program is not None
    (tmp_path / "verl_worker.py").write_text(program[1], encoding="utf-8")
    command = [sys.executable, "verl_worker.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.splitlines()[-1] == "tensor([2., 2., 2., 3., 3.])", ended.stderr
