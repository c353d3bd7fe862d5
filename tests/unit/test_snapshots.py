"""The folders of snapshots in shared memory."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rolepool.trainer.snapshots import _lock, remove_left_behind


def hold(folder: Path, said: Connection) -> None:
    held = _lock(folder)
    said.send(held is not None)
    time.sleep(300)


def test_only_snapshots_of_drivers_that_were_killed_are_removed(tmp_path: Path) -> None:
    held, dead, other = (tmp_path / name for name in ("rolepool-1-a", "rolepool-2-b", "something"))
    for folder in (held, dead, other):
        (folder / "0").mkdir(parents=True)
    of_driver, said = multiprocessing.Pipe()
    # A fork, because a new process imports torch for several seconds.
    driver = multiprocessing.get_context("fork").Process(target=hold, args=(held, said))
    driver.start()
    try:
        assert of_driver.poll(120) and of_driver.recv() is True
        remove_left_behind(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rolepool-1-a", "something"]
    finally:
        driver.kill()
        driver.join()
    remove_left_behind(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]
