"""Pythons of environments with vLLM: a real one, or one with the substitute for it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REAL_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
"""The Python of an environment with vLLM, which may not exist."""
NO_REAL_PYTHON = (
    f"there is no {REAL_PYTHON}: run scripts/setup_vllm.sh, or name vLLM's Python in VLLM_PYTHON"
)


def substitute_python(folder: Path, **variables: object) -> str:
    """A Python that has tests/gpu/vllm_substitute in place of vLLM. `variables` are those of its
    environment; the substitute says what they do."""
    paths = ":".join(map(str, (ROOT / "tests/gpu/vllm_substitute", ROOT / "src", *sys.path)))
    settings = {"PYTHONPATH": paths, **variables}
    words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items())
    script = folder / "python"
    script.write_text(f'#!/bin/sh\n{words} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)
