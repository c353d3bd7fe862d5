"""A run that diverges ends and says why, and it saves no checkpoint of a step without a finite
update."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from train_helpers import ONE_RANK, SPLIT, rows_of, small_keys

from rolepool.cli import main
from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.loop import Observer, Trainer

DIVERGES = "actor_rollout_ref.actor.optim.lr=1e30"
"""The first of a step's two mini-batches updates the weights. No gradient is finite after that."""
QUICK = ["trainer.val_before_train=false", "trainer.total_training_steps=9"]

pytestmark = pytest.mark.usefixtures("one_ray")


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_a_diverged_run_ends_with_one_error_and_keeps_its_good_checkpoint(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = [
        *QUICK,
        "trainer.save_freq=3",
        "trainer.test_freq=3",
        "trainer.max_actor_ckpt_to_keep=1",
    ]
    assert (
        main(
            [
                "train",
                *small_keys(demo, tmp_path, *ONE_RANK, *keys, "trainer.total_training_steps=3"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert saved_in(tmp_path) == ["step_000003"]
    assert main(["train", *small_keys(demo, tmp_path, *ONE_RANK, *keys, DIVERGES)]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "error: actor made no finite update in the last 3 steps, up to step 7 (trainer.max_bad_steps=3): training has "
        "diverged; lower actor_rollout_ref.actor.optim.lr=1e+30 or actor_rollout_ref.actor.grad_clip=1.0, or look for "
        f"rewards that are too large; the last checkpoint is {tmp_path}/checkpoints/step_000003"
    )
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("rolepool")
    ] == [
        f"step {step}: skipped {number} of 2 updates of actor because the gradients are not finite"
        for step, number in [(4, 1), (5, 2), (6, 2), (7, 2)]
    ]
    assert "step 6 is not saved because actor made no finite update in it\n" in captured.out
    assert saved_in(tmp_path) == ["step_000003"]
    steps = [row for row in rows_of(tmp_path) if "actor/updates" in row]
    counts = [(row["step"], row["actor/updates"], row["actor/skipped_updates"]) for row in steps]
    assert counts == [
        *((step, 2, 0) for step in (1, 2, 3)),
        (4, 1, 1),
        (5, 0, 2),
        (6, 0, 2),
        (7, 0, 2),
    ]
    assert all(row["critic/updates"] == 2 and row["critic/skipped_updates"] == 0 for row in steps)
    assert [
        row["step"] for row in rows_of(tmp_path) if any(name.startswith("val-core") for name in row)
    ] == [3, 6]


class Notices(Observer):
    """Keeps what is said, and presses Ctrl-C after a step."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.lines: list[str] = []
        self.interrupt_after = interrupt_after

    def on_notice(self, line: str) -> None:
        self.lines.append(line)

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_does_not_save_a_bad_step(demo: Demo, tmp_path: Path) -> None:
    keys = [*QUICK, "trainer.save_freq=9", "trainer.max_bad_steps=9", DIVERGES]
    trainer = Trainer(load_config([], small_keys(demo, tmp_path, *ONE_RANK, *keys)))
    trainer.observer = Notices(interrupt_after=2)
    words = r"^step 3 was finished and not saved because actor made no finite update in it; there is no checkpoint$"
    with pytest.raises(KeyboardInterrupt, match=words):
        trainer.run()
    assert saved_in(tmp_path) == []


@pytest.mark.slow
def test_a_bad_last_step_of_a_critic_that_warms_up_is_not_saved_and_the_actor_is_not_blamed(
    demo: Demo, tmp_path: Path
) -> None:
    keys = [
        *QUICK,
        "trainer.total_training_steps=2",
        "trainer.critic_warmup=2",
        "trainer.save_freq=2",
    ]
    trainer = Trainer(
        load_config([], small_keys(demo, tmp_path, *SPLIT, *keys, "critic.optim.lr=1e30"))
    )
    trainer.observer = notices = Notices()
    trainer.run()
    assert notices.lines == ["step 2 is not saved because critic made no finite update in it"]
    assert saved_in(tmp_path) == []
    assert not any("actor/updates" in row for row in rows_of(tmp_path))
