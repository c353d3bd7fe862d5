"""Key lists of verl's launch scripts train here: models, data and sizes are the demo's, everything
else is theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolepool.data.demo import Demo
from rolepool.trainer import main_ppo

SCRIPTS: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "verl_scripts.json").read_text()
)


def scaled_down(demo: Demo, folder: Path) -> list[str]:
    """What must be other words because the model, the data or the machine is smaller."""
    return [
        f"data.train_files={demo.train_file}",
        f"data.val_files={demo.val_file}",
        f"actor_rollout_ref.model.path={demo.model}",
        f"critic.model.path={demo.model}",
        f"reward_model.model.path={demo.reward_model}",
        "data.train_batch_size=16",
        "data.val_max_samples=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.fallback=native",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}",
    ]


@pytest.mark.parametrize(
    ("script", "logged"),
    [
        pytest.param("split_placement__run_deepseek7b_llm", "critic/vf_loss"),
        pytest.param("grpo_trainer__run_deepseek7b_llm_seq_balance", "actor/kl_loss", marks=pytest.mark.slow),
        pytest.param("remax_trainer__run_qwen2.5-3b_seq_balance", "timing_s/baseline", marks=pytest.mark.slow),
        pytest.param("rollout_correction__run_qwen2_5_7b_fsdp", "rollout_corr/rollout_is_mean", marks=pytest.mark.slow),
        pytest.param("rollout_correction__run_qwen2_5_7b_fsdp_multi_rs", "rollout_corr/k3_kl", marks=pytest.mark.slow),
        pytest.param("reinforce_plus_plus_trainer__run_qwen2-7b_math_rf", "actor/entropy", marks=pytest.mark.slow),
        pytest.param("ppo_trainer__run_qwen2-7b_rm_seq_balance_nsys", "timing_s/reward", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("one_ray")
def test_a_script_trains_two_steps_after_replacing_the_launcher(
    demo: Demo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    logged: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main_ppo.main([*SCRIPTS[script], *scaled_down(demo, tmp_path / "run")])
    assert code == 0, capsys.readouterr().err[-3000:]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if logged in row]
    assert [row["training/global_step"] for row in steps] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in steps)
