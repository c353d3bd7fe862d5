"""What the tests on a GPU share: trainings in the background, a process group of one rank, and the
reasons to skip."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainings import DEVICE, Outcome, Training, Trainings, why_not_several_ranks

HERE = Path(__file__).parent
REPORT = "ROLEPOOL_GPU_TESTS_REPORT"
"""Names a file for the metrics of all trainings."""
LOG_CHARACTERS = 20_000


def pytest_configure(config: pytest.Config) -> None:
    text = "trains(*names): looks at these trainings of its module's TRAININGS"
    config.addinivalue_line("markers", text)
    if not config.pluginmanager.hasplugin("timeout"):  # some machines have plain pytest only
        config.addinivalue_line("markers", "timeout(seconds): has no effect here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for trainings come last, so that the others run meanwhile."""
    if DEVICE not in ("cuda", "cpu"):
        raise pytest.UsageError(f"ROLEPOOL_GPU_TESTS_ON={DEVICE}: must be cuda or cpu")
    for item in items:
        if item.path.parent == HERE and (reason := _why_skipped(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: bool(_trainings_of(item)))


def _trainings_of(item: pytest.Item) -> dict[str, Training]:
    names = [name for marker in item.iter_markers("trains") for name in marker.args]
    return {name: item.module.TRAININGS[name] for name in names}  # type: ignore[attr-defined]


def _why_skipped(item: pytest.Item) -> str | None:
    """None if it is to run. A module with a fixture `gpu` of its own decides itself."""
    needed = _trainings_of(item)
    if hasattr(item.module, "gpu"):  # type: ignore[attr-defined]
        return None
    if not (needed and DEVICE == "cpu") and not torch.cuda.is_available():
        return "needs a CUDA device"
    if DEVICE == "cpu" and any(one.compiles for one in needed.values()):
        return "nothing is compiled for a CPU"
    if any(training.ranks > 1 for training in needed.values()):
        return why_not_several_ranks()
    return None


@pytest.fixture(autouse=True, scope="session")
def background(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainings]:
    """All trainings that tests of this session look at. They start with the first test."""
    wanted: dict[str, Training] = {}
    for item in request.session.items:
        if item.path.parent != HERE or item.get_closest_marker("skip") is not None:
            continue
        for name, training in _trainings_of(item).items():
            assert wanted.setdefault(name, training) == training, f"two trainings named {name!r}"
    for name, training in wanted.items():
        assert training.replays is None or training.replays in wanted, (
            f"{name}: mark what it replays"
        )
    started = Trainings(wanted, tmp_path_factory.mktemp("trainings"))
    request.config.stash[BACKGROUND] = started
    yield started
    started.stop()


BACKGROUND = pytest.StashKey[Trainings]()


@pytest.fixture
def trained(background: Trainings, request: pytest.FixtureRequest) -> Callable[[str], Outcome]:
    """The outcome of a training that the test's marker names. One that failed fails the test."""
    named = _trainings_of(request.node)

    def wait_for(name: str) -> Outcome:
        assert name in named, f"add {name!r} to the marker `trains`"
        outcome = background.outcome(name)
        if outcome.error is not None:
            pytest.fail(outcome.failure(), pytrace=False)
        return outcome

    return wait_for


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """How long each training took, from the start of its process or the end of the one before."""
    background = config.stash.get(BACKGROUND, None)
    outcomes = [] if background is None else background.finished()
    if not outcomes:
        return
    terminalreporter.section(f"trainings on {DEVICE}")
    for one in outcomes:
        steps = [row["timing_s/step"] for row in _metrics_of(one).values()]
        times = " ".join(f"{seconds:.2f}" for seconds in steps)
        line = f"{one.start_s:6.1f} s +{one.seconds:6.1f} s  {one.log.stem:<12} {one.name:<34}"
        terminalreporter.write_line(f"{line} {one.error or f'steps {times} s'}"[:200])
    if REPORT in os.environ:
        Path(os.environ[REPORT]).write_text(
            json.dumps({one.name: _report_of(one) for one in outcomes}, indent=1)
        )


def _metrics_of(outcome: Outcome) -> dict[int, dict[str, float]]:
    return outcome.metrics if (outcome.folder / "run" / "metrics.jsonl").exists() else {}


def _report_of(outcome: Outcome) -> dict[str, object]:
    return {
        "error": outcome.error,
        "start_s": outcome.start_s,
        "seconds": outcome.seconds,
        **outcome.more,
        "log": outcome.log.read_text(errors="replace")[-LOG_CHARACTERS:],
        "metrics": _metrics_of(outcome),
    }


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
