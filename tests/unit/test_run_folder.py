"""A run folder has one writer at a time; what an earlier run wrote is neither mixed with the next
nor lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolepool.errors import ConfigError
from rolepool.metrics.run_folder import RunFolder
from rolepool.report.run import read_run

HOLD = (
    "import sys, time; from rolepool.metrics.run_folder import RunFolder\n"
    "with RunFolder(sys.argv[1]).hold(): print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of four steps with checkpoints and samples of the even ones."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for name in ("plan.json", "config.yaml"):
        run.write(name, "{}")
    for step in (1, 2, 3, 4):
        run.add_metrics(step, {"reward": step})
    for step in (2, 4):
        run.add_samples(step, [])
        run.add_samples(step, [], "training_responses")
        (run.path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    return run


def steps_of(folder: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path: Path, root: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-c", HOLD, folder.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root / "src") as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        words = (
            rf"trainer.default_local_dir={folder.path}: another run is writing there "
            rf"\(process {first.pid} on .*; wait"
        )
        with pytest.raises(ConfigError, match=words), folder.hold():
            pass
        first.send_signal(signal.SIGKILL)
    with (
        folder.hold(),
        pytest.raises(ConfigError, match="another run is writing there"),
        folder.hold(),
    ):
        pass
    assert names_in(folder.path) == []


@pytest.mark.parametrize("place", ["a_file", "a_file/run", "n" * 300])
def test_a_place_that_cannot_be_a_run_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").write_text("mine")
    words = (
        f"trainer.default_local_dir={tmp_path / place}: cannot be written .*; name another folder"
    )
    with pytest.raises(ConfigError, match=words), RunFolder(tmp_path / place).hold():
        pass
    assert names_in(tmp_path) == ["a_file"]


def test_files_that_no_run_wrote_are_not_in_a_runs_way(tmp_path: Path, folder: RunFolder) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    RunFolder(mine).check_is_ours()
    (mine / "config.yaml").write_text("mine")
    with pytest.raises(
        ConfigError,
        match=f"trainer.default_local_dir={mine}: the run would overwrite config.yaml.*; name a new folder",
    ):
        RunFolder(mine).check_is_ours()
    folder.check_is_ours()


def test_each_run_is_set_aside_under_a_number_of_its_own(folder: RunFolder) -> None:
    (folder.path / "earlier" / "3").mkdir(parents=True)
    (folder.path / "earlier" / "of mine").mkdir()
    (folder.path / "notes.txt").write_text("mine")
    aside = folder.path / "earlier" / "4"
    assert folder.begin(after_step=None) == aside
    assert steps_of(aside) == [1, 2, 3, 4]
    assert names_in(aside / "checkpoints") == ["step_000002", "step_000004"]
    assert names_in(folder.path) == ["earlier", "notes.txt"]
    assert folder.begin(after_step=None) is None


def test_what_came_after_the_step_that_a_run_goes_on_from_is_set_aside_as_a_run(
    folder: RunFolder,
) -> None:
    aside = folder.begin(after_step=2)
    assert aside == folder.path / "earlier" / "1"
    assert (steps_of(folder.path), steps_of(aside)) == ([1, 2], [3, 4])
    assert (folder.path / "train.log").read_text() == "step:1 - reward:1\nstep:2 - reward:2\n"
    for kind in ("checkpoints", "validation", "training_responses"):
        assert (len(names_in(folder.path / kind)), len(names_in(aside / kind))) == (1, 1)
    assert names_in(folder.path / "checkpoints") == ["step_000002"]
    assert list(read_run(aside).metrics) == [3, 4]
    assert folder.begin(after_step=2) is None
    assert names_in(folder.path / "earlier") == ["1"]


BAD_ENDS = [
    b'{"step": 1, "rew',
    b"\xff\xfe\x00",
    b'{"step": 1, "a": "\xc3',
    b'{"step": 1e999}',
    b"[" * 100_000,
    b"step:9e9",
]


@pytest.mark.parametrize("end", BAD_ENDS, ids=lambda end: repr(end[:20]))
def test_the_end_that_a_crash_left_is_set_aside_and_keeps_no_run_from_going_on(
    folder: RunFolder, end: bytes
) -> None:
    for name in ("metrics.jsonl", "train.log"):
        with (folder.path / name).open("ab") as file:
            file.write(end)
    aside = folder.begin(after_step=4)
    assert aside is not None
    assert steps_of(folder.path) == [1, 2, 3, 4]
    assert (
        (aside / "metrics.jsonl").read_bytes() == (aside / "train.log").read_bytes() == end + b"\n"
    )


def test_a_restart_that_is_not_utf_8_keeps_no_run_from_going_on(folder: RunFolder) -> None:
    restart = b'{"step": 3, "restart": {"what": "\xff"}}\n'
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(restart)
    aside = folder.begin(after_step=2)
    assert aside is not None
    assert (folder.path / "metrics.jsonl").read_bytes().endswith(restart)
    assert restart not in (aside / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["metrics.jsonl", "spans.jsonl", "train.log"])
def test_nothing_is_moved_if_a_file_cannot_be_read(folder: RunFolder, name: str) -> None:
    file = folder.path / name
    file.unlink(missing_ok=True)
    file.mkdir()
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(OSError, match=name):
        folder.begin(after_step=2)
    assert sorted(folder.path.rglob("*")) == before


def test_a_second_run_is_refused_even_if_the_lock_is_damaged(folder: RunFolder) -> None:
    with folder.hold():
        folder.lock_file.write_bytes(b"\xff\x00")
        with (
            pytest.raises(ConfigError, match="another run is writing there"),
            RunFolder(folder.path).hold(),
        ):
            pass
