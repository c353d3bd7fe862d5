"""The start of a run from the command line: what is refused while its processes start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from train_helpers import SPLIT, small_keys

from rolepool.data.demo import Demo


def test_data_that_is_refused_while_processes_start_ends_them_and_writes_nothing(
    demo: Demo, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Only the tokenizer, which needs transformers, finds that the prompts are too long.
    keys = small_keys(demo, run, *SPLIT, "data.max_prompt_length=2", "data.truncation=error")
    command = [sys.executable, "-m", "rolepool", "train", *keys]
    # A short path, because the paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=environment
        )
        left_behind = list(Path(folder).glob("rolepool-*/*"))
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1, ended.stderr
    assert "data.max_prompt_length=2" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not run.exists()
    assert "starting Ray" in ended.stdout
    assert left_behind == [], "Ray's folder is removed"
