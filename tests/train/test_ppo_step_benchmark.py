"""The benchmark of a PPO step, tried out on the CPU."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig, AutoTokenizer

from commands import load_gpu_benchmark
from rolepool.metrics.run_folder import RunFolder
from rolepool.metrics.spans import Part, Recorded, Span

ROOT = Path(__file__).parent.parent.parent
BENCHMARK = "benchmarks/gpu/ppo_step.py"

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_gpu_benchmark("ppo_step_profile", monkeypatch)


def test_a_part_that_fails_says_why_and_does_not_stop_the_others(
    python: Python, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").touch()
    folders = ("--data", str(tmp_path), "--runs", str(tmp_path / "runs"))
    ended = python(BENCHMARK, "--tiny", "--parts", "standard,split", *folders, "trainer.nodes=2")
    assert ended.returncode == 1
    for part in ("standard", "split"):
        assert f"{part} ended with 2; the end of {tmp_path}/runs/{part}.txt:" in ended.stdout
    assert ended.stdout.count("error: trainer.nodes=2: unknown key") == 2


def test_times_and_shares_are_those_of_the_steps_after_the_first_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4, 5):
        start_s = 10.0 * step
        gen = Span(
            "pool",
            "rollout",
            0,
            "generate",
            start_s,
            start_s,
            start_s + 6,
            parts=(Part("fetch", 1.5), Part("prefill", 1.0, num_tokens=8)),
        )
        update = Span("pool", "actor", 0, "update_actor", start_s, start_s + 7, start_s + 10)
        if step == 1:
            update = update._replace(parts=(Part("compile", 60.0), Part("capture", 5.0)))
        folder.add_spans([Recorded(step, "gen", gen), Recorded(step, "update_actor", update)])
        seconds = {"timing_s/step": 100.0 if step < 3 else 10.0, "timing_s/gen": 6.0}
        folder.add_metrics(
            step,
            {**seconds, "pool/pool/peak_memory_gb": float(step), "pool/pool/utilization": 50.0},
        )
    benchmark = load_gpu_benchmark("step_parts", monkeypatch)
    work = benchmark.Work("shape", num_prompts=2, prompt_tokens=4, new_tokens=4, num_samples=2)
    measured = benchmark.read_rolepool(tmp_path, 7.5, work)
    assert measured.steps_s == (35.0, 100.0, 10.0, 10.0, 10.0)  # without compiling and capturing
    assert measured.prefilled == 0.5  # of 2 x 2 prompts of 4 tokens
    assert measured.seconds == {"step": 10.0, "gen": 6.0}
    assert (measured.torch_gib, measured.gpu_gib) == (5.0, 7.5)
    assert (measured.shares.controller, measured.shares.fetch) == (
        pytest.approx(0.1),
        pytest.approx(0.15),
    )
    assert measured.shares.kernels == 0.5


def test_no_kernel_runs_between_overlapping_ones_and_before_and_after_all(
    profile: ModuleType,
) -> None:
    times = [(-5, 2), (10, 20), (12, 15), (18, 30), (30, 31), (50, 70)]
    kernels = [
        profile.Activity(start, end, "kernel", f"k{number}")
        for number, (start, end) in enumerate(times)
    ]
    gaps = list(profile.find_gaps(kernels, 100.0))
    assert [(gap.start_us, gap.end_us) for gap in gaps] == [(2, 10), (31, 50), (70, 100)]
    assert [(gap.after, gap.before) for gap in gaps[:2]] == [("k0", "k1"), ("k4", "k5")]
    assert profile.within(gaps, 5.0, 40.0) == 5 + 9
    assert profile.within(gaps, 20.0, 25.0) == 0
    assert list(profile.find_gaps(kernels, 60.0))[-1].end_us == 50  # a kernel runs on at the end


def test_traces_are_read_on_the_clock_of_spans(profile: ModuleType, tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 2500.0, "dur": 10.0},
        {"ph": "X", "cat": "cpu_op", "name": "early", "ts": 1500.0, "dur": 2000.0},
        {"ph": "X", "cat": "ac2g", "name": "an arrow", "ts": 1500.0, "dur": 1.0},
        {"ph": "i", "cat": "kernel", "name": "a moment", "ts": 1500.0},
    ]
    (tmp_path / "trace.json").write_text(
        json.dumps({"baseTimeNanoseconds": 7_000_000_000, "traceEvents": events})
    )
    early, late = profile.read_trace(tmp_path / "trace.json", start_s=7.001)
    assert (early.name, late.name) == ("early", "late")
    assert (late.start_us, late.end_us) == pytest.approx((1500.0, 1510.0))
    assert profile.meanwhile(profile.Gap(600.0, 700.0, "", ""), [early, late]) == "early"
    assert (
        profile.meanwhile(profile.Gap(2600.0, 2700.0, "", ""), [early, late])
        == "no operator of torch's"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_placements_train_and_are_compared_and_a_step_is_profiled(
    python: Python, tmp_path: Path
) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    options = (
        "--tiny",
        "--parts",
        "standard,split,idle",
        "--steps",
        "4",
        "--data",
        str(data),
        "--runs",
        str(runs),
    )
    ended = python(BENCHMARK, *options, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    config, tokenizer = (
        AutoConfig.from_pretrained(data / "model"),
        AutoTokenizer.from_pretrained(data / "model"),
    )
    assert (len(tokenizer), str(config.dtype)) == (config.vocab_size, "torch.bfloat16")

    words = [line.split() for line in ended.stdout.splitlines() if line]
    by_operation = words.index(["seconds", "standard", "split"])
    table = {name: list(map(float, values)) for name, *values in words[by_operation + 1 :]}
    assert {"gen", "update_actor", "update_critic", "step"} <= table.keys()
    for column, placement in enumerate(("standard", "split")):
        lines = (runs / placement / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4
        step_s = statistics.median(row["timing_s/step"] for row in rows[2:])
        assert table["step"][column] == pytest.approx(step_s, abs=1e-4)
        assert {row["response_length/mean"] for row in rows} == {16.0}
        (summary,) = [line for line in words if line[0] == placement]
        assert float(summary[2]) == pytest.approx(64 / step_s, rel=0.01)  # prompts of the tiny work

    share = re.search(r"no kernel runs in ([\d.]+)%", ended.stdout)
    assert share is not None and 0 < float(share[1]) < 100
    assert {"gen", "values", "update_actor", "between"} <= {line[0] for line in words}
