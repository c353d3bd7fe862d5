"""Compiled code that survives a process, in a folder for the versions of this machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rolepool.models.compile_cache import (
    INDUCTOR_VARIABLE,
    TRITON_VARIABLE,
    folder_name,
    use_compile_cache,
)

COMPILING = """
import json, os, time
import torch
import torch._inductor.compile_fx  # sets the variable to the default of torch
from torch._dynamo.utils import counters
from rolepool.models.compile_cache import use_compile_cache

folder = use_compile_cache("auto")
torch.manual_seed(1)
layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
compiled = torch.compile(layer, dynamic=True)
began_s = time.perf_counter()
loss = compiled(torch.ones(3, 8)).square().sum()
loss.backward()
seconds = time.perf_counter() - began_s
misses = counters["inductor"]["fxgraph_cache_miss"]
hits = counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps([str(folder), hits, misses, seconds, loss.item()]))
"""


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """Without variables of the compilers. Those that a test sets are removed."""
    names = (INDUCTOR_VARIABLE, TRITON_VARIABLE)
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.mark.slow  # 16 s, and it measures times
def test_a_second_process_uses_what_the_first_has_compiled(
    python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answers: list[Any] = []
    for _ in range(2):
        ended = python("-c", COMPILING)
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout.splitlines()[-1]))
    (folder, hits, misses, first_s, first_loss), (*_, second_s, second_loss) = answers
    assert Path(folder).parent == tmp_path / "rolepool" / "compiled"
    assert any(Path(folder, "inductor").rglob("*")), "the compiled code is in that folder"
    assert (hits, misses) == (0, 2), "forward and backward are compiled"
    assert answers[1][1:3] == [2, 0], "and taken from the folder by the second process"
    assert second_s < 0.7 * first_s
    assert second_loss == first_loss


def test_the_folder_is_named_after_all_versions(tmp_path: Path) -> None:
    folder = use_compile_cache(str(tmp_path))
    assert folder == tmp_path / folder_name()
    assert os.environ[INDUCTOR_VARIABLE] == f"{folder}/inductor"
    assert os.environ[TRITON_VARIABLE] == f"{folder}/triton"
    for part in (torch.__version__, transformers.__version__, "rolepool-"):
        assert part in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700


def test_null_and_the_users_own_folders_leave_the_compilers_alone(tmp_path: Path) -> None:
    assert use_compile_cache(None) is None
    assert INDUCTOR_VARIABLE not in os.environ
    os.environ[INDUCTOR_VARIABLE] = "/somewhere/inductor"
    os.environ[TRITON_VARIABLE] = "/somewhere/triton"
    use_compile_cache(str(tmp_path))
    assert os.environ[INDUCTOR_VARIABLE] == "/somewhere/inductor"
    assert os.environ[TRITON_VARIABLE] == "/somewhere/triton"


def test_a_folder_that_cannot_be_written_is_a_warning_that_names_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        assert use_compile_cache(str(file)) is None
    assert f"trainer.compile_cache_dir={file}: what is compiled is not kept" in caplog.text
    assert INDUCTOR_VARIABLE not in os.environ
