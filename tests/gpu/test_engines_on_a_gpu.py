"""The parity check on a real GPU, where the rollout engines compute in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from rolepool.config import load_config
from rolepool.data.demo import Demo, make_demo
from rolepool.trainer.loop import Trainer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(scope="module")
def one_ray() -> Any:
    options: dict[str, Any] = {
        "include_dashboard": False,
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    ray.init(address="local", num_cpus=8, num_gpus=int(DEVICE == "cuda"), **options)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("demo") / "data")


def trained_rows(demo: Demo, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    words = f"""
    data.train_batch_size=32 data.max_prompt_length=8 data.max_response_length=8 data.val_files=null
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=2 trainer.device={DEVICE}
    actor_rollout_ref.rollout.calculate_log_probs=true actor_rollout_ref.rollout.parity_check=true
    trainer.n_gpus_per_node=1 trainer.logger=[] trainer.save_freq=-1 trainer.total_training_steps=2
    trainer.default_local_dir={folder} actor_rollout_ref.model.path={demo.model} data.train_files={demo.train_file}
    """
    Trainer(load_config([], [*words.split(), *overrides])).run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/updates" in row]


@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_the_parity_check_passes_in_16_bits(engine: str, demo: Demo, tmp_path: Path) -> None:
    rows = trained_rows(demo, tmp_path, f"actor_rollout_ref.rollout.name={engine}")
    print(
        f"{engine}: probabilities differ by {rows[-1]['training/rollout_probs_diff_mean']:.1e} (mean)"
    )
    assert len(rows) == 2 and all(row["actor/updates"] == 2 for row in rows)
