"""docs/quickstart.md, from_trl.md and from_verl.md: their files and commands, as they stand on the
page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMED_BLOCK = re.compile(r"```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)
MODEL = "recipes/shapes/qwen2.5-0.5b"


def page_files(root: Path, page: str, folder: Path) -> str:
    """Write the page's named blocks as files into the folder. Returns the text of the page."""
    text = (root / "docs" / page).read_text(encoding="utf-8")
    for name, content in NAMED_BLOCK.findall(text):
        (folder / name).write_text(content, encoding="utf-8")
    return text


def shell(
    commands: str, folder: Path, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run commands as a user does, with `python` and `rolepool` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
def test_the_quickstart_learns(root: Path, tmp_path: Path) -> None:
    text = page_files(root, "quickstart.md", tmp_path)
    config = (tmp_path / "my_run.yaml").read_text(encoding="utf-8")
    assert len(config.splitlines()) <= 15
    for commands in COMMANDS.findall(text):
        ended = shell(commands, tmp_path)
        assert ended.returncode == 0, ended.stderr
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/my_run/metrics.jsonl").read_text().splitlines()
    ]
    scores = [score for row in rows for name, score in row.items() if name.startswith("val-core/")]
    assert scores[0] < 0.2
    assert scores[-1] > 0.5
    assert (tmp_path / "runs/my_run/report.html").is_file()
    assert (tmp_path / "my_model/model.safetensors").is_file()


def test_the_quickstart_trains_two_steps(root: Path, tmp_path: Path) -> None:
    page_files(root, "quickstart.md", tmp_path)
    short = "trainer.total_training_steps=2 data.val_max_samples=16 trainer.n_gpus_per_node=1"
    ended = shell(
        f"python make_data.py; rolepool demo demo_data; rolepool plan my_run.yaml; rolepool train my_run.yaml {short}",
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/my_run/checkpoints/step_000002").is_dir(), "the last step is saved"


def test_the_configs_beside_those_of_trl_and_verl_can_be_planned(
    root: Path, tmp_path: Path
) -> None:
    page_files(root, "from_trl.md", tmp_path)
    model = f"actor_rollout_ref.model.path={root / MODEL}"
    ended = shell(
        f"rolepool plan grpo.yaml {model} --inventory 1 --gpu-memory 80 --strict", tmp_path
    )
    assert ended.returncode == 0, ended.stderr

    page = page_files(root, "from_verl.md", tmp_path)
    theirs, ours = (commands.split() for commands in COMMANDS.findall(page))
    words = [word for word in ours if "=" in word]
    assert set(words) - set(theirs) == {
        "actor_rollout_ref.rollout.fallback=native",
        "placement.strategy=split",
    }
    assert {word for word in theirs if "=" in word} <= set(words)
    shape = root / "recipes/shapes/deepseek-llm-7b-chat"
    paths = f"actor_rollout_ref.model.path={shape} critic.model.path={shape}"
    ended = shell(
        f"rolepool plan {' '.join(words)} {paths} --inventory 8 --gpu-memory 80 --strict", tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert "critic_pool" in ended.stdout
