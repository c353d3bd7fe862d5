"""Stopped and resumed, a run goes on as if it had never stopped: bit for bit, or closely under
another placement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import ONE_RANK, SPLIT, rows_of, small_keys, train
from transformers import AutoModelForCausalLM

from rolepool.cli import main
from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import PlacementError
from rolepool.trainer.loop import Observer, Trainer

STEPS = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2"]
ADAPTIVE = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5",
    "trainer.critic_warmup=1",
]
TOO_MANY_RANKS = ["trainer.n_gpus_per_node=8", "placement.timeout_s=0.1"]
"""More than the tests' Ray has: no process starts."""

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.fixture(scope="module")
def whole(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(demo, folder, *SPLIT, *STEPS, *ADAPTIVE)
    return folder


@pytest.fixture
def used(whole: Path, tmp_path: Path) -> Path:
    """The folder of a run that has ended, for a test to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "used"))


def test_a_run_that_lost_its_last_steps_does_them_again_bit_for_bit(
    demo: Demo, whole: Path, used: Path
) -> None:
    shutil.rmtree(used / "checkpoints" / "step_000004")
    with (used / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/sc')  # cut off by a crash
    train(demo, used, *SPLIT, *STEPS, *ADAPTIVE)
    assert [row["step"] for row in rows_of(whole)] == [0, 1, 2, 2, 2, 3, 4, 4, 4]
    assert rows_of(used) == rows_of(whole)
    for role in ("actor", "critic"):
        for file in sorted((whole / "checkpoints" / "step_000004" / role).glob("*.safetensors")):
            before, after = (
                load_file(file),
                load_file(used / "checkpoints" / "step_000004" / role / file.name),
            )
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_learning_rate_of_the_actor_spans_its_own_steps(whole: Path) -> None:
    """Three of four: one of warm-up, int(0.5 * 3), and two of a cosine."""
    rates = {row["step"]: row["actor/lr"] for row in rows_of(whole) if "actor/lr" in row}
    assert rates == pytest.approx({2: 1e-3, 3: 1e-3, 4: 0.5e-3})


@pytest.mark.slow
def test_a_run_goes_on_from_an_earlier_step_under_another_placement_to_tolerance(
    demo: Demo, whole: Path, used: Path
) -> None:
    start = used / "checkpoints" / "step_000002"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    train(demo, used, *ONE_RANK, *STEPS, *ADAPTIVE, *resume)
    expected, found = rows_of(whole), rows_of(used)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    abandoned = used / "earlier" / "1"
    assert rows_of(abandoned) == [row for row in expected if row["step"] > 2]
    assert [path.name for path in (abandoned / "checkpoints").iterdir()] == ["step_000004"]
    positions = [run / "checkpoints" / "step_000004" / "trainer.json" for run in (whole, used)]
    first, second = (json.loads(path.read_text())["data"] for path in positions)
    assert first == second


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
    assert (
        error.startswith(f"error: {tmp_path}/file/model: cannot be written (")
        and error.count("\n") == 1
    )


def test_a_new_run_in_a_used_folder_sets_the_old_one_aside(
    demo: Demo, whole: Path, used: Path
) -> None:
    (used / "notes.txt").write_text("mine")
    train(demo, used, *ONE_RANK, "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    assert [row["step"] for row in rows_of(used)] == [0, 1]
    assert rows_of(used / "earlier" / "1") == rows_of(whole)
    assert (used / "notes.txt").read_text() == "mine"
    assert not (used / "checkpoints").exists()


@pytest.mark.parametrize("resume", ["auto", "disable"])
def test_a_start_that_fails_leaves_the_earlier_run_as_it_was(
    demo: Demo, used: Path, resume: str
) -> None:
    shutil.rmtree(used / "checkpoints" / "step_000004")
    before = files_of(used)
    with pytest.raises(PlacementError):
        train(demo, used, *STEPS, *TOO_MANY_RANKS, f"trainer.resume_mode={resume}")
    assert files_of(used) == before


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_start_that_fails_leaves_no_new_folder(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlacementError):
        train(demo, tmp_path / "run", *STEPS, *TOO_MANY_RANKS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", *small_keys(demo, tmp_path / "run", "trainer.logger=[wandb]")]) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_with_nothing_left_to_do_says_so_and_starts_nothing(
    demo: Demo, whole: Path, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *small_keys(demo, used, *STEPS, *TOO_MANY_RANKS)]) == 0
    out = capsys.readouterr().out
    assert "nothing left to do: " in out
    assert "trainer.total_training_steps=4 ends with step 4; raise it to continue" in out
    assert rows_of(used) == rows_of(whole)


def test_a_validation_of_something_else_does_not_set_a_run_aside(
    demo: Demo, whole: Path, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["trainer.val_only=true", "trainer.resume_mode=disable", *TOO_MANY_RANKS]
    assert main(["train", *small_keys(demo, used, *STEPS, *keys)]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")
    ]
    assert (
        line.startswith("error: trainer.val_only=true: ")
        and f"trainer.default_local_dir={used} holds a run" in line
    )
    assert rows_of(used) == rows_of(whole)


def test_a_checkpoint_without_the_critic_that_is_wanted_is_not_passed_over(
    demo: Demo, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = used / "checkpoints" / "step_000004"
    shutil.rmtree(newest / "critic")
    assert main(["train", *small_keys(demo, used, *STEPS, *TOO_MANY_RANKS)]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")
    ]
    assert line.startswith(
        f"error: trainer.resume_mode=auto: the newest checkpoint, {newest}, has no critic; "
    )


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(
    demo: Demo, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hashes in used.glob("checkpoints/*/trainer.sha256"):
        hashes.write_text("")
    before = files_of(used)
    assert main(["train", *small_keys(demo, used, *STEPS, *SPLIT)]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")
    ]
    assert lines[0].startswith(
        f"error: trainer.resume_mode=auto: all 2 checkpoints of {used} cannot be used"
    )
    damaged = [used / "checkpoints" / f"step_{step:06d}" / "trainer.json" for step in (4, 2)]
    for line, file in zip(lines[1:], damaged, strict=True):
        assert f"{file}: damaged, because no list has its hash" in line
    assert files_of(used) == before


def test_a_save_that_fails_leaves_nothing_behind(demo: Demo, tmp_path: Path) -> None:
    class InTheWay(Observer):
        def on_row(self, step: int, metrics: dict[str, float]) -> None:
            """A file is where the save, which comes next, moves an older folder of the same
            step."""
            (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            (tmp_path / "checkpoints" / f".tmp-replaced-step_{step:06d}").touch()

    keys = [
        *ONE_RANK,
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
    ]
    trainer = Trainer(load_config([], small_keys(demo, tmp_path, *keys)))
    trainer.observer = InTheWay()
    with pytest.raises(NotADirectoryError):
        trainer.run()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".tmp-replaced-step_000001", "step_000001"], (
        "nothing that the failed save wrote"
    )
    assert list((tmp_path / "checkpoints" / "step_000001").iterdir()) == []
