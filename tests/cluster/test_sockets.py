"""Nobody else can open the files of a run's own Ray, write the keys of a pool, or inherit what a
killed driver left."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_helpers import is_running, start, wait_until
from roles_for_tests import Place
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rolepool.cluster import Cluster
from rolepool.cluster.connection import private_folder

pytestmark = (
    pytest.mark.slow
)  # two starts of Ray; test_calls looks at the listening sockets of its own

DRIVER = Path(__file__).with_name("driver_for_cleanup.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A pool of two ranks that has already used its process group."""
    with start({"left": [2]}) as started:
        assert started.groups["left"].add_role("place", Place).meet() == [2, 2]
        yield started


def test_only_this_user_can_open_the_files_of_ray(cluster: Cluster) -> None:
    folders = {
        Path(file.path)
        for process in psutil.Process().children(recursive=True)
        for file in process.open_files()
        if file.path.endswith("raylet.out")
    }
    (log,) = folders
    private = next(folder for folder in log.parents if folder.name == f"rolepool-{os.getuid()}")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_the_keys_of_a_pool_begin_with_a_secret(cluster: Cluster) -> None:
    """So a program that knows the names of torch's keys writes others."""
    place = cluster.groups["left"].add_role("another", Place)
    where = place.environment("MASTER_ADDR", "MASTER_PORT")[0]
    stranger = TCPStore(where["MASTER_ADDR"], int(where["MASTER_PORT"]), is_master=False)
    names = [name for name in stranger.list_keys() if name != "init/"]
    (secret,) = {name.partition("/")[0] for name in names}
    assert re.fullmatch("[0-9a-f]{32}", secret)
    for name in names:
        stranger.set(name.partition("/")[2], "wrong")
    assert place.meet() == [2, 2]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path, because the paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as folder:
        yield Path(folder)


def test_what_a_killed_driver_leaves_is_removed_by_the_next_start(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(short_path))
    monkeypatch.setenv("HOME", str(short_path))  # there is no token yet
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with (short_path / "output").open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-u", str(DRIVER), "interrupt", "left"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: b"READY" in (short_path / "output").read_bytes(), timeout_s=100)
        token = short_path / ".ray" / "auth_token"
        assert len(token.read_text()) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
        (folder,) = (short_path / f"rolepool-{os.getuid()}").iterdir()
        with private_folder() as mine:
            assert mine.is_dir() and folder.is_dir(), "the driver is alive"
        assert not mine.exists()
        started = psutil.Process(driver.pid).children(recursive=True)
        agents = [process for process in started if "Agent" in "".join(process.cmdline())]
        assert agents
        for agent in agents:  # so that they cannot notice that the raylet has died
            agent.send_signal(signal.SIGSTOP)
        driver.kill()
        driver.wait()
        with private_folder():
            assert not folder.exists()
        assert not any(is_running(agent.pid) for agent in agents)
    finally:
        driver.kill()
