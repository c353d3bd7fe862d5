"""The folders of snapshots in shared memory."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rolepool.cluster.keepers import Keeper
from rolepool.files import locked


def hold(folder: Path, said: Connection) -> None:
    with locked(folder):
        said.send(True)
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
        Keeper(number_in, tmp_path).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rolepool-1-a", "something"]
    finally:
        driver.kill()
        driver.join()
    Keeper(number_in, tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def number_in(files: Sequence[Path]) -> int | None:
    return int(files[-1].read_text()) if files[-1].exists() else None


def test_a_keeper_owns_a_private_folder_and_tells_which_files_are_complete(tmp_path: Path) -> None:
    (tmp_path / "rolepool-1-killed").mkdir()
    keeper = Keeper(number_in, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert (folder.stat().st_mode & 0o777, keeper.where()[0]) == (0o700, folder)
    (folder / "marker").write_text("3")
    marker = Path("marker")
    assert [keeper.number_of([path]) for path in (marker, Path("missing"))] == [3, None]
    assert (keeper.read(marker, 0), keeper.read(marker, 1)) == (b"3", b"")
    assert keeper.fetch(3, [[marker]], []) and not keeper.fetch(4, [[marker]], [])
    Keeper(number_in, tmp_path).close()
    assert folder.exists()
    keeper.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        (folder / "late").write_text("4")


def test_a_folder_that_was_removed_is_made_again_as_soon_as_that_is_possible(
    tmp_path: Path,
) -> None:
    shared_memory = tmp_path / "shared"
    keeper = Keeper(number_in, shared_memory)  # it starts although there is no shared memory
    with pytest.raises(OSError, match="No such file"):
        keeper.where()
    assert keeper.number_of([Path("marker")]) is None
    shared_memory.mkdir()
    first, _ = keeper.where()
    assert keeper.where()[0] == first
    shutil.rmtree(first)
    second, _ = keeper.where()
    assert list(shared_memory.iterdir()) == [second]
    Keeper(number_in, shared_memory).close()
    assert second.is_dir(), "the new folder is locked, too"
    keeper.close()
    assert not list(shared_memory.iterdir())
