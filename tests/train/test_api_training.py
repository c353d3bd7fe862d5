"""Training from Python, as in a script or a notebook: `rp.train` in the user's own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from train_helpers import ONE_RANK, small_keys
from transformers import AutoModelForCausalLM

import rolepool as rp
from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import WorkerError


def rows_of(file: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:number]]


def test_rows_and_a_function_of_this_process_train_and_the_run_is_returned(
    demo: Demo, tmp_path: Path, one_ray: None
) -> None:
    bonus = 0.5

    def reward(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> dict[str, float]:
        return {"score": bonus, "num_letters": len(solution_str.split())}

    steps: list[tuple[int, float]] = []
    validations: list[tuple[int, float, int]] = []
    train_rows, val_rows = rows_of(demo.train_file, 64), rows_of(demo.val_file, 5)
    small = load_config([], small_keys(demo, tmp_path / "run", *ONE_RANK))
    run = rp.train(
        data=train_rows,
        val_data=datasets.Dataset.from_list(val_rows),
        reward=reward,
        config=small,
        on_step=lambda step, metrics: steps.append((step, metrics["critic/score/mean"])),
        on_validation=lambda step, metrics, samples: validations.append(
            (step, min(metrics.values()), len(samples))
        ),
        trainer={"total_training_steps": 2, "save_freq": 2},
        **{"trainer.test_freq": 2},
    )
    assert run.folder == tmp_path / "run"
    assert steps == [(1, 0.5), (2, 0.5)]
    assert [(step, num_samples) for step, _, num_samples in validations] == [(0, 5), (2, 5)]
    assert set(run.metrics()["reward/num_letters/mean"].dropna().index) == {1, 2}
    (train_file,), (val_file,) = run.config.data.train_files, run.config.data.val_files
    assert rows_of(Path(train_file), 100) == train_rows
    assert rows_of(Path(val_file), 100) == val_rows
    assert run.config.custom_reward_function.name == "reward"
    assert [path.name for path in tmp_path.rglob(".tmp*")] == []
    AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "model"))
    assert run.plan.plan.pools.keys() == {"global_pool"}

    again = rp.train(config=run.folder / "config.yaml", data=train_rows, reward=reward)
    assert again.metrics().index.max() == 2, "nothing was left to do"


@pytest.mark.slow
def test_an_error_in_the_function_names_its_line_and_the_row(
    demo: Demo, tmp_path: Path, one_ray: None
) -> None:
    def broken(**inputs: Any) -> float:
        return 1 / 0

    small = load_config(
        [], small_keys(demo, tmp_path / "run", *ONE_RANK, "trainer.val_before_train=false")
    )
    with pytest.raises(WorkerError) as raised:
        rp.train(data=demo.train_file, reward=broken, config=small)
    where = f"{Path(__file__).name}:{broken.__code__.co_firstlineno + 1}"
    assert (
        f"reward=broken: ZeroDivisionError at {where}: division by zero, for {demo.train_file}"
        in str(raised.value)
    )


PROGRAM = """
import sys, time
import rolepool as rp

def slow_reward(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return 0.5

def show(step, metrics):
    print("trained", step, metrics["critic/score/mean"], flush=True)

if __name__ == "__main__":
    config, folder = sys.argv[1:]
    for placement, num_slots in (("standard", 1), ("split", 2)):
        keys = {"default_local_dir": f"{folder}/{placement}", "n_gpus_per_node": num_slots, "total_training_steps": 2}
        run = rp.train(config=config, reward=slow_reward, placement=placement, trainer=keys)
        print("run", len(run.plan.plan.pools), run.metrics().index.max(), flush=True)
    try:
        rp.train(config=config, reward=slow_reward, on_step=show, **{"trainer.default_local_dir": f"{folder}/long"})
    except KeyboardInterrupt as interrupt:
        print("interrupted:", interrupt, flush=True)
    print("still alive", len(rp.Run(f"{folder}/long").metrics()), flush=True)
"""


@pytest.mark.slow
def test_one_process_trains_several_times_and_ctrl_c_ends_a_run_but_not_the_process(
    demo: Demo, tmp_path: Path
) -> None:
    words = small_keys(
        demo,
        tmp_path,
        *ONE_RANK,
        "trainer.val_before_train=false",
        "trainer.total_training_steps=5000",
    )
    (tmp_path / "config.yaml").write_text(
        load_config([], [*words, "trainer.save_freq=5000"]).to_yaml()
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py", "config.yaml", "runs"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert program.stdout is not None
    lines: list[str] = []
    while "trained 2 0.5" not in (lines or [""])[-1]:
        lines.append(program.stdout.readline())
        assert program.poll() is None, "".join(lines)
    program.send_signal(signal.SIGINT)
    output = "".join(lines) + program.communicate(timeout=120)[0]
    assert program.returncode == 0, output
    assert "run 1 2\n" in output and "run 2 2\n" in output
    rows = (tmp_path / "runs/long/metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])["step"]
    assert (
        f"interrupted: step {last} was finished and saved; the same command resumes from it"
        in output
    )
    assert f"still alive {last}\n" in output
