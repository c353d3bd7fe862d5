"""The files in examples/, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def outputs_of(cell: Any) -> str:
    """The text that a cell of a notebook has printed or returned."""
    return "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


@pytest.mark.slow
def test_the_notebook_runs_and_its_file_has_its_outputs(root: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(root / "examples" / "first_curve.ipynb", as_version=4)
    kept = [outputs_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3", resources=place).execute()
    now = [outputs_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    for printed in (kept, now):
        text = "".join(printed)
        rewards = [
            float(number)
            for number in re.findall(r"validation after step 40: mean reward ([\d.]+)", text)
        ]
        assert len(rewards) == 2 and min(rewards) > 0.7, "both placements learn the task"
        assert "2 pools on 2 of 2 CPU slots" in text and "<Figure size" in text
    assert (tmp_path / "runs" / "first_model" / "config.json").exists()
    assert (tmp_path / "runs" / "first_split" / "report.html").exists()


@pytest.mark.slow
def test_an_algorithm_of_ones_own_takes_less_than_60_lines_and_learns(
    root: Path, tmp_path: Path
) -> None:
    file = root / "examples" / "own_algorithm.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60
    ended = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rewards = [float(number) for number in re.findall(r"mean reward ([\d.]+)", ended.stdout)]
    assert len(rewards) == 6 and rewards[-1] > 0.8
