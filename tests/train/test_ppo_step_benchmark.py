"""The benchmark of the one-GPU recipe, tried out on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

BENCHMARK = "benchmarks/gpu/train_recipe.py"

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_placement_that_fails_says_why_and_does_not_stop_the_other(python: Python, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    folders = ("--data", str(tmp_path), "--runs", str(tmp_path / "runs"))
    ended = python(BENCHMARK, "--tiny", *folders, "trainer.nodes=2")
    assert ended.returncode == 1
    for placement in ("standard", "split"):
        assert f"{placement} ended with 2; the end of {tmp_path}/runs/{placement}/output.txt:" in ended.stdout
    assert ended.stdout.count("error: trainer.nodes=2: unknown key") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_placements_train_and_are_compared_step_by_step(python: Python, tmp_path: Path) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    ended = python(BENCHMARK, "--tiny", "--steps", "3", "--data", str(data), "--runs", str(runs), timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    config, tokenizer = AutoConfig.from_pretrained(data / "model"), AutoTokenizer.from_pretrained(data / "model")
    assert (len(tokenizer), str(config.dtype)) == (config.vocab_size, "torch.bfloat16")

    table = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("timing_s/")}
    assert {"timing_s/gen", "timing_s/update_actor", "timing_s/update_critic", "timing_s/step"} <= table.keys()
    for column, placement in enumerate(("standard", "split")):
        lines = (runs / placement / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        times = [row["timing_s/step"] for row in map(json.loads, lines)]
        assert len(times) == 3
        assert float(table["timing_s/step"][column]) == pytest.approx(sum(times[1:]) / 2, abs=1e-4)
    standard, split, ratio = map(float, table["timing_s/step"])
    assert ratio == pytest.approx(standard / split, rel=0.02)
    assert re.search(r"^ +standard +split +ratio$", ended.stdout, flags=re.MULTILINE)
