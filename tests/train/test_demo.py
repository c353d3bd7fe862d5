"""The demo as a user runs it: it learns, its pools overlap, and Ctrl-C ends it cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from train_helpers import ONE_RANK, rows_of, small_keys, train

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import PlacementError
from rolepool.metrics import Span
from rolepool.metrics.row_text import validation_score
from rolepool.metrics.spans import step_bounds
from rolepool.metrics.start_times import START_FILE, StartTimes
from rolepool.metrics.timeline import Timeline, critical_path, lanes
from rolepool.report.console_logs import read_logs
from rolepool.report.run import read_run
from rolepool.trainer.interrupt import SAME_SIGNAL_S
from rolepool.trainer.loop import Observer, Trainer
from rolepool.trainer.samples import NUM_TRAINING_SAMPLES
from span_times import extent_s, overlap_s

RECIPES = Path(__file__).parents[2] / "recipes"


def start(demo: Demo, *words: str) -> subprocess.Popen[str]:
    """`rolepool train` in a folder where the recipes find the demo's files."""
    folder = Path(demo.folder).parent
    (folder / "runs").mkdir(exist_ok=True)
    if not (folder / "runs/demo_data").exists():
        (folder / "runs/demo_data").symlink_to(demo.folder)
    return subprocess.Popen(
        [sys.executable, "-m", "rolepool", "train", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def spans_by_step(folder: Path) -> dict[int, dict[str, list[Span]]]:
    steps: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for line in (folder / "spans.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        steps[row.pop("step")][row.pop("operation")].append(Span(**row))
    return steps


def test_the_split_demo_learns_in_time_and_its_pools_overlap(demo: Demo, tmp_path: Path) -> None:
    began = time.monotonic()
    run = start(demo, str(RECIPES / "demo_split.yaml"), f"trainer.default_local_dir={tmp_path}")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    assert time.monotonic() - began < 240
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [
        value for row in rows for name, value in row.items() if name.startswith("val-core/")
    ]
    assert held_out[0] < 0.3 and held_out[-1] >= 0.9
    assert f"validation: {held_out[0]:.3f} after step 0" in output and "run folder:" in output
    assert "Token authentication" not in output, "Ray's warning asks for nothing"
    lines = output.splitlines()
    parts = [
        "starting Ray",
        "importing torch",
        "reading prompts",
        "waiting for 2 processes",
        "loading models",
        "validating",
    ]
    assert lines[0] == f"{parts[0]} ..."
    for before, part in pairwise(parts):
        assert any(
            re.fullmatch(rf"{part} \.\.\. \({before} took \d+\.\d s\)", line) for line in lines
        ), part
    short = (
        r"step (\d+)/60  reward \d\.\d{3}  KL -?\d\.\d{4}  length 4  \d+\.\d\d s  [\d,]+ tokens/s"
    )
    assert [match[1] for line in lines if (match := re.fullmatch(short, line))] == [
        str(step) for step in range(1, 61)
    ]
    assert list(read_logs([tmp_path / "train.log"])["train"]) == list(range(61))
    start_times = StartTimes.model_validate_json((tmp_path / START_FILE).read_text())
    assert [entry.what for entry in start_times.phases] == ["checking the config", *parts]
    did = {(entry.who, entry.what) for entry in start_times.processes}
    assert did >= {
        ("critic_pool rank 0", "importing"),
        ("critic_pool rank 0", "loading critic"),
        ("actor_rollout_ref_pool rank 0", "loading rollout"),
    }

    steps = spans_by_step(tmp_path)
    phases, shorter_to_longer, into_next_generation = [], [], []
    for number in range(5, 60):
        actor, critic = steps[number]["update_actor"], steps[number]["update_critic"]
        longer = max(extent_s(actor), extent_s(critic))
        phases.append(extent_s([*actor, *critic]) / longer)
        shorter_to_longer.append(min(extent_s(actor), extent_s(critic)) / longer)
        if number + 1 in steps and "testing" not in steps[number]:
            into_next_generation.append(overlap_s(critic, steps[number + 1]["gen"]))
    assert median(shorter_to_longer) >= 0.5
    assert median(phases) <= 1.15
    assert median(into_next_generation) > 0

    run_read = read_run(tmp_path)
    assert run_read.skipped == {} and run_read.monitor
    timeline = Timeline(run_read.spans)
    step_s = {row["step"]: row["timing_s/step"] for row in rows if "timing_s/step" in row}
    for number, (start_s, end_s) in step_bounds(timeline).items():
        wall_s = end_s - start_s
        assert wall_s == pytest.approx(step_s[number], rel=0.01)
        path = critical_path(timeline, start_s, end_s)
        assert sum(link.end_s - link.start_s for link in path) == pytest.approx(wall_s, rel=0.01)
        for lane in lanes(timeline, start_s, end_s).values():
            assert sum(interval.duration_s for interval in lane) == pytest.approx(wall_s, rel=0.01)


class Said(Observer):
    """Keeps the lines and the parts of the start."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_notice(self, line: str) -> None:
        self.lines.append(line)

    def on_phase(self, what: str) -> None:
        self.lines.append(what)


@pytest.mark.parametrize("save_freq", ["-1", "null", "5"])
def test_a_run_that_will_save_nothing_says_so_before_its_processes_start(
    save_freq: str, demo: Demo, tmp_path: Path, no_ray: None
) -> None:
    keys = [
        f"trainer.save_freq={save_freq}",
        "ray_kwargs.ray_init.address=127.0.0.1:1",
        "trainer.n_gpus_per_node=2",
    ]
    trainer = Trainer(load_config([], small_keys(demo, tmp_path, *keys)))
    trainer.observer = said = Said()
    with pytest.raises(PlacementError, match="no Ray cluster answers there"):
        trainer.run()
    lost = "no checkpoint will be saved (trainer.save_freq=-1): if the driver is killed, all its steps are lost"
    nothing = [lost] if save_freq == "-1" else []
    assert said.lines == [*nothing, "starting 2 processes"]


def test_the_console_of_a_run_with_a_killed_process_is_plain_text_with_responses_at_its_end(
    demo: Demo, tmp_path: Path
) -> None:
    keys = small_keys(
        demo, tmp_path, *ONE_RANK, "trainer.total_training_steps=30", "data.val_files=[]"
    )
    run = start(demo, *keys, "trainer.logger=[console]", "trainer.test_freq=null")
    assert run.stdout is not None
    output = ""
    for line in run.stdout:
        output += line
        if line.startswith("step 2/30"):
            worker_of(run).kill()
    assert run.wait(timeout=120) == 0, output
    assert "died" in output, "the line of rolepool about the death"
    assert "\x1b" not in output, "no colours, as nobody looks at a terminal"
    assert "A worker died or was killed" not in output
    assert "\nresponses of training step 30\n" in output
    assert "validation" not in output


def worker_of(run: subprocess.Popen[str]) -> psutil.Process:
    """The process of a run's only pool."""
    children = psutil.Process(run.pid).children(recursive=True)
    return next(
        child for child in children if re.search("WorkerActor|_pool/0", " ".join(child.cmdline()))
    )


def test_a_run_with_validation_data_validates_after_its_last_step(
    demo: Demo, tmp_path: Path, one_ray: None
) -> None:
    keys = [
        *ONE_RANK,
        "trainer.total_training_steps=2",
        "trainer.test_freq=null",
        "trainer.val_before_train=false",
    ]
    train(demo, tmp_path, *keys)
    steps = [row["step"] for row in rows_of(tmp_path) if validation_score(row) is not None]
    assert steps == [2]
    (file,) = (tmp_path / "validation").iterdir()
    sample = json.loads(file.read_text().splitlines()[0])
    assert sample["prompt"] == f"{sample['question']} ="
    recorded = sorted((tmp_path / "training_responses").iterdir())
    assert [file.name for file in recorded] == ["step_000001.jsonl", "step_000002.jsonl"]
    for file in recorded:
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == NUM_TRAINING_SAMPLES
        assert all(one["question"] and 0 <= one["score"] <= 1 for one in samples)
        assert any(one["response"] for one in samples)


SLOW_REWARD = "import time\n\n\ndef compute_score(*_, **__):\n    time.sleep(0.2)\n    return 0.0\n"
ONCE = (signal.SIGINT, 1)
SLOW = [
    pytest.param(*how, marks=pytest.mark.slow) for how in ((signal.SIGTERM, 1), (signal.SIGINT, 2))
]
"""test_interrupt.py and test_supervisor.py try both signals, without training."""


@pytest.mark.parametrize(("number", "presses"), [ONCE, *SLOW])
def test_ctrl_c_and_sigterm_end_or_drop_the_step_and_say_which(
    number: signal.Signals, presses: int, demo: Demo, tmp_path: Path
) -> None:
    keys = small_keys(
        demo, tmp_path, "trainer.n_gpus_per_node=1", "trainer.total_training_steps=5000"
    )
    if presses == 1:
        keys.append("trainer.resume_mode=disable")
    else:  # time for the second within the step of the first
        slow = tmp_path / "slow.py"
        slow.write_text(SLOW_REWARD)
        keys.append(f"custom_reward_function.path={slow}")
    run = start(demo, *keys, "trainer.save_freq=5000", "trainer.val_before_train=false")
    rows = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    if presses == 2:
        assert run.stdout is not None
        while "press Ctrl-C again" not in run.stdout.readline():
            assert run.poll() is None, "it ended without a word"
        time.sleep(SAME_SIGNAL_S)
        run.send_signal(number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + number, output
    assert "Traceback" not in output
    last = json.loads(rows.read_text().splitlines()[-1])["step"]
    if presses == 1:
        how = "the same command with trainer.resume_mode=auto resumes from it"
        assert f"interrupted: step {last} was finished and saved; {how}" in output
        assert (tmp_path / "checkpoints" / f"step_{last:06d}" / "trainer.json").exists()
    else:
        assert f"the steps after step {last} were dropped; there is no checkpoint" in output
        assert (
            not (tmp_path / "checkpoints").exists()
            or list((tmp_path / "checkpoints").glob("step_*")) == []
        )


@pytest.mark.slow
@pytest.mark.parametrize("key", ["trainer.val_before_train=true", "trainer.val_only=true"])
def test_ctrl_c_in_the_first_validation_ends_it_and_no_step_follows(
    key: str, demo: Demo, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(f"print('scoring', flush=True)\n{SLOW_REWARD.replace('0.2', '10')}")
    keys = small_keys(
        demo, tmp_path / "run", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=5"
    )
    run = start(demo, *keys, key, f"custom_reward_function.path={slow}")
    assert run.stdout is not None
    while "scoring" not in run.stdout.readline():
        assert run.poll() is None, "it ended without a word"
    time.sleep(5)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert (run.returncode, output.splitlines()[-1]) == (130, "interrupted"), output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads_its_output_and_records_the_baseline_of_remax(
    demo: Demo, tmp_path: Path
) -> None:
    more = [
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
    ]
    reward, scored = tmp_path / "reward.py", tmp_path / "scored.txt"
    reward.write_text(
        f"def compute_score(*_, **__):\n    open({str(scored)!r}, 'a').write('.')\n    return 0.0\n"
    )
    more.append(f"custom_reward_function.path={reward}")
    keys = small_keys(demo, tmp_path / "run", "algorithm.adv_estimator=remax", *more)
    run = start(
        demo, *keys, "trainer.logger=[verl]", "trainer.test_freq=-1", "trainer.save_freq=null"
    )
    assert run.stdout is not None
    while not run.stdout.readline().startswith("step:1 - "):
        assert run.poll() is None, "it ended before the first step"
    run.stdout.close()
    assert run.wait(timeout=120) == 0
    read = read_run(tmp_path / "run")
    assert list(read.metrics) == [1, 2, 3]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step_000003"
    ], "the last step"
    assert len(scored.read_text()) == 3 * (
        16 * 2 + 16
    )  # two samples and one greedy response for each prompt
    assert all(row["training/num_steps"] == 3 for row in read.metrics.values())
    for step in (1, 2, 3):
        spans = [
            each.span for each in read.spans if (each.step, each.operation) == (step, "baseline")
        ]
        assert {span.method for span in spans} == {"generate_sequences", "compute_scores"}
        assert read.metrics[step]["timing_s/baseline"] >= max(span.duration_s for span in spans)


def test_signal_shows_before_training_whether_responses_differ(demo: Demo, tmp_path: Path) -> None:
    words = [f"actor_rollout_ref.model.path={demo.model}", f"data.train_files={demo.train_file}"]
    words += [
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    ]
    command = [
        sys.executable,
        "-m",
        "rolepool",
        "signal",
        "--prompts",
        "6",
        "algorithm.adv_estimator=grpo",
        *words,
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    head, row, speed = ended.stdout.splitlines()
    assert head.split()[-6:] == ["best", "of", "8", "mixed", "truncated", "tokens"]
    name, num_prompts, score, best, *_ = row.split()
    assert (name, num_prompts) == ("position_match/next_letter", "6")
    assert 0 < float(score) < float(best) < 1
    assert speed.endswith("tokens/s while generating")
    assert not list(tmp_path.iterdir()), "nothing is written"
