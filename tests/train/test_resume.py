"""Stopped and resumed, a run goes on as if it had never stopped: bit for bit, or closely under another placement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import ONE_RANK, SPLIT, rows_of, train
from transformers import AutoModelForCausalLM

from rolepool.cli import main
from rolepool.data.demo import Demo

STEPS = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2"]
ADAPTIVE = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
]

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.fixture(scope="module")
def whole(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(demo, folder, *SPLIT, *STEPS, *ADAPTIVE)
    return folder


def test_a_run_that_lost_its_last_steps_does_them_again_bit_for_bit(demo: Demo, whole: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/sc')  # cut off by a crash
    train(demo, resumed, *SPLIT, *STEPS, *ADAPTIVE)
    assert [row["step"] for row in rows_of(whole)] == [0, 1, 2, 2, 2, 3, 4, 4, 4]
    assert rows_of(resumed) == rows_of(whole)
    for role in ("actor", "critic"):
        for file in sorted((whole / "checkpoints" / "step_000004" / role).glob("*.safetensors")):
            before, after = load_file(file), load_file(resumed / "checkpoints" / "step_000004" / role / file.name)
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_goes_on_under_another_placement_to_tolerance(demo: Demo, whole: Path, tmp_path: Path) -> None:
    start = whole / "checkpoints" / "step_000002"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    train(demo, tmp_path / "other", *ONE_RANK, *STEPS, *ADAPTIVE, *resume)
    expected = [row for row in rows_of(whole) if row["step"] > 2]
    found = rows_of(tmp_path / "other")
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    positions = [json.loads((start.parent / "step_000004" / "trainer.json").read_text())["data"]]
    positions += [json.loads((tmp_path / "other/checkpoints/step_000004/trainer.json").read_text())["data"]]
    assert positions[0] == positions[1]


def test_an_exported_checkpoint_is_a_model_that_transformers_loads(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(whole), str(tmp_path / "model"), "--step", "2"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = load_file(next((whole / "checkpoints/step_000002/actor").glob("*.safetensors")))
    weights = {name: tensor for name, tensor in saved.items() if "/" not in name}
    assert weights.keys() == model.state_dict().keys()
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert main(["export", str(whole), str(tmp_path / "none"), "--step", "3"]) == 2
    assert "there are step_000002, step_000004" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    assert main(["export", str(whole), str(tmp_path / "file" / "model")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/file/model: cannot be made (") and error.count("\n") == 1


def test_a_new_run_in_a_used_folder_sets_the_old_one_aside(demo: Demo, whole: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(whole, used)
    (used / "notes.txt").write_text("mine")
    train(demo, used, *ONE_RANK, "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    assert [row["step"] for row in rows_of(used)] == [0, 1]
    assert rows_of(used / "earlier" / "1") == rows_of(whole)
    assert (used / "notes.txt").read_text() == "mine"
    assert not (used / "checkpoints").exists()
