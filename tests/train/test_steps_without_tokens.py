"""Steps in which no response has a token, as an engine of the user may return them: nothing is
learned from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_helpers import ONE_RANK, rows_of, small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.trainer.loop import Trainer

SILENT_ENGINE = """
import numpy as np

from rolepool.rollout.engine import Completion
from rolepool.rollout.transformers_engine import TransformersEngine

class SilentEngine(TransformersEngine):
    def __init__(self, load_model, **kwargs):
        super().__init__(load_model(), max_num_seqs=64)

    def generate(self, requests, sampling):
        if self.version != 1:
            return super().generate(requests, sampling)
        # With the weights after step 1 it answers nothing to all prompts.
        nothing = Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop", self.version)
        return [nothing] * len(requests)
"""

pytestmark = pytest.mark.usefixtures("one_ray")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_epochs=2"],
        pytest.param(
            ["trainer.n_gpus_per_node=2", "algorithm.adv_estimator=grpo"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gae", "two ranks", "penalty in the reward"],
)
def test_a_run_goes_on_after_a_step_in_which_no_response_has_a_token(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    (tmp_path / "silent_engine.py").write_text(SILENT_ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [*ONE_RANK, "actor_rollout_ref.rollout.name=silent_engine:SilentEngine", *more]
    words += [
        "trainer.total_training_steps=3",
        "trainer.max_bad_steps=1",
        "trainer.val_before_train=false",
    ]
    words += ["data.val_files=[]", "actor_rollout_ref.rollout.calculate_log_probs=true"]
    Trainer(load_config([], small_keys(demo, tmp_path / "run", *words))).run()
    before, silent, after = rows_of(tmp_path / "run")
    num_epochs = 2 if "actor_rollout_ref.actor.ppo_epochs=2" in more else 1
    counts = [(row["actor/updates"], row["actor/empty_updates"]) for row in (before, silent, after)]
    assert counts == [(2 * num_epochs, 0), (0, 2 * num_epochs), (2 * num_epochs, 0)]
    assert [row["actor/skipped_updates"] for row in (before, silent, after)] == [0, 0, 0]
    assert (silent["response/aborted_ratio"], silent["response_length/mean"]) == (1, 0)
    assert "critic/score/mean" in before and "critic/score/mean" not in silent
    assert "actor/grad_norm" in before and "actor/grad_norm" not in silent
    assert all(value == value for row in (before, silent, after) for value in row.values()), (
        "no metric is NaN"
    )
