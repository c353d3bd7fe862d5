"""`pip install rolepool`: the wheel, installed outside the checkout, has all that the first
commands need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def run(*command: str | Path, cwd: Path) -> str:
    """What a command printed, without the checkout on the path of Python."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def program(root: Path, tmp_path: Path) -> Path:
    """`rolepool` of an environment that has the wheel, and sees all other packages of this
    environment."""
    source, wheels, environment = tmp_path / "source", tmp_path / "wheels", tmp_path / "environment"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "recipes"):
        shutil.copytree(root / folder, source / folder, symlinks=True, ignore=skipped)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / file, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        wheels,
        source,
        cwd=tmp_path,
    )
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # Paths from a .pth file come after the environment's own packages, and their own .pth files are
    # not read.
    (site_packages / "other_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = wheels.glob("rolepool-*.whl")
    run(
        *pip,
        "--python",
        environment / "bin/python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    return environment / "bin" / "rolepool"


@pytest.mark.slow
def test_an_installed_wheel_plans_and_trains_the_demo_in_an_empty_folder(
    program: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    shown = run(
        program.parent / "python", "-c", "import rolepool; print(rolepool.__file__)", cwd=folder
    )
    assert Path(shown.strip()).is_relative_to(tmp_path)
    assert "demo_split " in run(program, "recipes", cwd=folder)
    assert "2 pools on 2 of 2 CPU slots" in run(program, "plan", "demo_split", cwd=folder)
    assert list(folder.iterdir()) == [], "plan writes nothing"
    two_steps = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1")
    trained = run(program, "train", "demo_split", *two_steps, cwd=folder)
    assert "run folder: runs/demo_split" in trained
    assert (folder / "runs" / "demo_data" / "train.jsonl").exists()
    assert run(program, "report", "runs/demo_split", cwd=folder) == "runs/demo_split/report.html\n"
