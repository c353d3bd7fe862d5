"""Files that are written completely or not at all, and folders that belong to a process until it
ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to `path` after the block, or removed if the
    block fails."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with suppress(OSError):
        temporary.unlink()  # a link of this name in a folder from elsewhere must not lead to another file
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, pieces: Iterable[str]) -> Path:
    """Write a text file from its pieces. If that fails, the old file stays as it was. Returns the
    path."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    return path


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a folder. The kernel releases the lock when this process ends, no matter how
    it ends.

    Raises BlockingIOError if another process holds the lock and `wait` is false.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        kind = fcntl.LOCK_EX
        if not wait:
            kind |= fcntl.LOCK_NB
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


def left_behind(folders: Iterable[Path]) -> Iterator[Path]:
    """The folders on which no process holds a lock, because their owners were killed. Each is
    locked while it is used."""
    for folder in folders:
        # It may be in use, of another user, or removed meanwhile.
        with suppress(OSError), locked(folder, wait=False):
            yield folder


@contextmanager
def owned_folder(root: Path, prefix: str, pattern: str) -> Iterator[Path]:
    """A new folder of this process in `root`, which is locked, and removed after the block. Folders
    of this pattern whose owners were killed are removed first."""
    for left in left_behind(root.glob(pattern)):
        shutil.rmtree(left, ignore_errors=True)
    # It gets its name when it is locked, because other processes remove folders without a lock.
    unnamed = Path(tempfile.mkdtemp(prefix=f".tmp-{prefix}", dir=root))
    with locked(unnamed):
        final_name = unnamed.name.removeprefix(".tmp-")
        folder = unnamed.rename(unnamed.with_name(final_name))
        try:
            yield folder
        finally:
            with suppress(OSError):
                # Who still writes to it by its old name gets an error.
                removed = folder.rename(f"{folder}-removed")
                shutil.rmtree(removed, ignore_errors=True)
