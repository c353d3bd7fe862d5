"""The benchmarks that measure the rows of docs/performance.md, as far as a CPU can try them."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from commands import load_gpu_benchmark
from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import Part, Recorded, Span
from rolepool.metrics.start_times import START_FILE, Entry, StartTimes
from rolepool.report.run import read_run

Python = Callable[..., "subprocess.CompletedProcess[str]"]

STALLING = """
import json, subprocess, sys, time
from pathlib import Path
file, child_file = map(Path, sys.argv[1:])
file.write_text(json.dumps({"update_actor": {"share_of_matmul_rate": 0.7}}))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
child_file.write_text(str(child.pid))
time.sleep(300)
"""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_gpu_benchmark("all_rows", monkeypatch)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def part(step_s: float, **more: object) -> dict[str, object]:
    seconds = {"step": step_s, "update_weights": 0.01, "old_log_prob": 0.2}
    return {"seconds": seconds, "gpu_gib": None, **more}


def test_a_row_that_stalls_is_stopped_with_its_children_and_keeps_its_figures(
    rows: ModuleType, tmp_path: Path
) -> None:
    script, child_file = tmp_path / "stalling.py", tmp_path / "child"
    script.write_text(STALLING)
    command = (str(script), "{json}", str(child_file))
    row = rows.Row("a row", command, 60, rows.read_update)
    outcome = rows.run_row("row", row, 5.0, tmp_path, argparse.Namespace(tiny=False))
    assert "stopped after 5 s" in outcome.problem
    (figure,) = outcome.figures
    assert (figure.text, figure.reached) == ("70.0%", True)
    child = int(child_file.read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(child)


def test_a_row_that_writes_nothing_has_a_problem_and_no_figures(
    rows: ModuleType, tmp_path: Path
) -> None:
    script = tmp_path / "failing.py"
    script.write_text("raise SystemExit(3)")
    row = rows.Row("a row", (str(script),), 60, rows.read_update)
    outcome = rows.run_row("row", row, 60.0, tmp_path, argparse.Namespace(tiny=False))
    assert outcome.problem.startswith("exit code 3; no figures: FileNotFoundError")
    assert outcome.figures == ()


def test_a_row_is_reached_only_beside_trl_in_the_same_run(rows: ModuleType) -> None:
    work = {"num_samples": 8}
    standard = part(1.0, prefilled=0.125, first={"actor/pg_loss": 0.5})
    content = {"work": work, "parts": {"standard": standard, "trl": part(7.0)}}
    against_trl, prefill = rows.read_grpo(content)
    assert (against_trl.text, against_trl.reached) == ("1.000 s against 7.00 s: 7.0x", True)
    assert (prefill.text, prefill.reached) == ("1.00 times", True)
    del content["parts"]["trl"]
    alone, _ = rows.read_grpo(content)
    assert (alone.text, alone.reached) == ("1.000 s, no TRL", None)
    standard["prefilled"] = 1.0
    _, prefill = rows.read_grpo(content)
    assert (prefill.text, prefill.reached) == ("8.00 times", False)


def test_chosen_micro_batches_are_compared_with_those_of_the_recipe(rows: ModuleType) -> None:
    content = {"parts": {"standard": part(1.0), "defaults": part(1.02)}}
    figures = {figure.what: figure for figure in rows.read_ppo(content)}
    assert figures["chosen micro-batches"].text == "98.0% of the speed of the recipe's sizes"
    assert figures["chosen micro-batches"].reached
    content["parts"]["defaults"] = part(1.1)
    figures = {figure.what: figure for figure in rows.read_ppo(content)}
    assert not figures["chosen micro-batches"].reached


def test_a_later_call_keeps_the_rows_that_it_does_not_run(python: Python, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    figure = {"what": "7B", "text": "kept", "goal": "within 15%", "reached": True}
    kept = {"what": "7B", "command": "python it.py", "seconds": 3.0, "figures": [figure]}
    file.write_text(json.dumps({"seven": kept}))
    script = "benchmarks/gpu/all_rows.py"
    ended = python(script, "--tiny", "--rows", "long-rows", "--json", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads(file.read_text())
    assert outcomes["seven"] == kept
    tokens_per_s = outcomes["long-rows"]["content"]["update_actor"]["tokens_per_s"]
    assert f"{tokens_per_s:,.0f} tokens/s" in ended.stdout
    assert "| seven | 7B | kept | within 15% | reached | 3 | `python it.py` |" in ended.stdout


def test_unknown_rows_are_one_line(python: Python) -> None:
    ended = python("benchmarks/gpu/all_rows.py", "--rows", "grpo,warp")
    assert ended.returncode == 2
    assert "--rows: no row warp; there are grpo, ppo, start" in ended.stderr


def test_the_first_step_is_compared_with_later_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    lengths_s = {1: 30.0, 2: 12.0, 3: 10.0, 4: 10.0}
    start_s = 100.0
    for step, length_s in lengths_s.items():
        parts = (Part("compile", 15.0), Part("capture", 2.0)) if step == 1 else ()
        span = Span("pool", "actor", 0, "update_actor", start_s, start_s, start_s + length_s)
        folder.add_spans([Recorded(step, "update_actor", span._replace(parts=parts))])
        folder.add_metrics(step, {"timing_s/step": length_s, "timing_s/update_actor": length_s})
        start_s += length_s
    phases = [Entry("driver", "starting Ray", 91.0, 95.0)]
    processes = [Entry("pool rank 0", "importing", 93.0, 96.0)]
    times = StartTimes(phases=phases, processes=processes)
    (tmp_path / START_FILE).write_text(times.model_dump_json())

    benchmark = load_gpu_benchmark("first_step", monkeypatch)
    turn = benchmark.read_turn(read_run(tmp_path), began_s=90.0)
    assert (turn.to_training_s, turn.to_first_step_s) == (10.0, 40.0)
    assert turn.ratio == 3.0
    assert turn.phases == [("before the first phase", 1.0), ("starting Ray", 4.0)]
    assert turn.processes == [("pool rank 0: importing", 3.0)]
    update = turn.operations["update_actor"]
    assert (update.first_s, update.later_s) == (30.0, 10.0)
    assert (update.compile_s, update.capture_s) == (15.0, 2.0)
