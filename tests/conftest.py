"""What all tests share: the environment they run in, and two ways to call `rolepool`."""

import os

os.environ["OMP_WAIT_POLICY"] = (
    "PASSIVE"  # before anything starts OpenMP threads, which spin while they wait
)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # for small tensors the fastest; whoever tests more threads sets it
os.environ["HF_HUB_OFFLINE"] = (
    "1"  # no test needs a hub; a name that is no folder is to fail at once
)

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import Outcome

if TYPE_CHECKING:
    from rolepool.data.demo import Demo

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> "Demo":
    """The demo's models and prompts, which tests only read."""
    from rolepool.data.demo import make_demo

    return make_demo(tmp_path_factory.mktemp("demo") / "data")


@pytest.fixture(scope="session")
def model(demo: "Demo") -> Path:
    """The demo's policy."""
    return demo.model


@pytest.fixture
def rolepool(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """`rolepool ARGUMENTS` in this process, in the checkout, without colour and with an empty model
    cache."""
    from rolepool.cli import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty_cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def python() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`python ARGUMENTS` in a process of its own, in the checkout, on the checkout's source."""

    def call(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        environment.pop("PYTHONUNBUFFERED", None)
        defaults = {
            "capture_output": True,
            "text": True,
            "cwd": ROOT,
            "env": environment,
            "timeout": 120,
        }
        return subprocess.run([sys.executable, *arguments], **{**defaults, **options})  # type: ignore[call-overload]

    return call
