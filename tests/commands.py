"""Commands, run as a user runs them, and benchmarks, whose functions tests call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def load_benchmark(name: str) -> ModuleType:
    """A file of `benchmarks/` as a module. It may import its neighbours."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_gpu_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of `benchmarks/gpu` as a module, until the test ends."""
    folder = BENCHMARKS / "gpu"
    monkeypatch.syspath_prepend(folder)  # they import each other
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
