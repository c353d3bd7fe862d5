"""The benchmark of predictions, tried out at a tiny shape: profile run, predictions, real runs,
errors."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_all_cases_are_predicted_before_they_run_and_errors_are_printed(
    python: Python, tmp_path: Path
) -> None:
    ended = python(
        "benchmarks/prediction.py", "--tiny", "--steps", "5", "--runs", str(tmp_path), timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(
        r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[+-][\d.]+%  ",
        ended.stdout,
        re.MULTILINE,
    )
    assert [number for number, *_ in rows] == ["1", "2", "3"]
    for _, predicted, low, high, measured in rows:
        assert 0 <= float(low) <= float(predicted) <= float(high)
        assert float(measured) > 0
    written = tmp_path / "predicted.json"
    assert len(json.loads(written.read_text(encoding="utf-8"))) == 3
    for number in (1, 2, 3):
        first_file = tmp_path / f"case{number}" / "plan.json"
        assert first_file.stat().st_mtime > written.stat().st_mtime, (
            "the case ran before it was predicted"
        )
    (profiled,) = json.loads((tmp_path / "profile1" / "plan.json").read_text(encoding="utf-8"))[
        "plans"
    ]
    assert profiled["schedule"]["calls"][0]["operation"] == "gen"
    assert re.search(r"3 cases: median error [\d.]+%, worst [\d.]+%", ended.stdout)
    assert "placements of the same work, the chosen one takes" in ended.stdout
