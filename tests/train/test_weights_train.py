"""Runs whose weights change on their way to the rollout stop before they generate with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from train_helpers import ONE_RANK, rows_of, small_keys, train

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import WorkerError
from rolepool.trainer.loop import Trainer
from rolepool.weights.receipts import WeightsDifferError

FLIPPED = "model.layers.1.mlp.down_proj.weight"
FLIPPING_ENGINE = f"""
from pathlib import Path

import torch
from rolepool.rollout.transformers_engine import TransformersEngine

LOG = Path(__file__).with_suffix(".log")


class FlippingEngine(TransformersEngine):
    '''One bit of one weight of the second step changes in the channel.'''

    def __init__(self, load_model, **kwargs):
        super().__init__(load_model(), max_num_seqs=64)

    def update_weights(self, named_tensors, version):
        return super().update_weights(self.damaged(named_tensors), version)

    def damaged(self, named_tensors):
        for name, tensor in named_tensors:
            if name == {FLIPPED!r} and self.version == 1:
                tensor = tensor.detach().clone()
                tensor.view(-1).view(torch.int32)[5] ^= 1
            yield name, tensor

    def generate(self, requests, sampling):
        with LOG.open("a") as log:
            print(self.version, file=log)
        return super().generate(requests, sampling)
"""
TWO_POOLS = [
    "trainer.n_gpus_per_node=2",
    "placement.strategy=custom",
    "placement.pools.train=[1]",
    "placement.pools.generate=[1]",
    *(f"placement.roles.{role}=train" for role in ("actor", "critic")),
    "placement.roles.rollout=generate",
]
NO_VALIDATION = ["trainer.val_before_train=false", "data.val_files=[]"]

pytestmark = pytest.mark.usefixtures("one_ray")


def test_a_run_that_sends_only_changes_has_the_rows_of_one_that_sends_all(
    demo: Demo, tmp_path: Path
) -> None:
    rows = {}
    metrics: dict[str, list[dict[str, float]]] = {}
    for weights in ("full", "delta"):
        folder = tmp_path / weights
        key = f"actor_rollout_ref.rollout.weights={weights}"
        train(demo, folder, *TWO_POOLS, key, "trainer.total_training_steps=2", *NO_VALIDATION)
        rows[weights] = rows_of(folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        metrics[weights] = [json.loads(line) for line in lines]
    assert rows["delta"] == rows["full"]
    for full, delta in zip(metrics["full"], metrics["delta"], strict=True):
        assert "perf/weights/changed" not in full
        # At this rate of learning, almost all 64-bit numbers change, except those of tokens that
        # nobody has seen.
        assert 0.2 < delta["perf/weights/changed"] < 1
        assert 0 < delta["perf/weights/bytes"] <= full["perf/weights/bytes"]


@pytest.mark.parametrize(
    ("placement", "receiver"),
    [(ONE_RANK, "global_pool rank 0"), (TWO_POOLS, "generate rank 0")],
    ids=["same process", "shared memory"],
)
def test_one_bit_that_flips_in_a_channel_stops_the_run_before_the_next_generation(
    demo: Demo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: list[str],
    receiver: str,
) -> None:
    (tmp_path / "flipping_engine.py").write_text(FLIPPING_ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    keys = small_keys(
        demo,
        tmp_path / "run",
        *placement,
        "actor_rollout_ref.rollout.name=flipping_engine:FlippingEngine",
        # The parity check would stop the run, too, but after the generation.
        "actor_rollout_ref.rollout.parity_check=false",
        "trainer.total_training_steps=5",
        *NO_VALIDATION,
    )
    # A process that has both roles compares them itself, so the error is that of a worker.
    with pytest.raises((WeightsDifferError, WorkerError)) as caught:
        Trainer(load_config([], keys)).run()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        f"weights of version 2 changed on their way to {receiver}: {FLIPPED} has digest "
    )
    versions = (tmp_path / "flipping_engine.log").read_text().split()
    assert versions == ["0", "1"], "nothing was generated with version 2"
    assert [row["training/global_step"] for row in rows_of(tmp_path / "run")] == [1]
