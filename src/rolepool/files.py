"""Files that are written completely or not at all."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to `path` after the block, or removed if the block fails."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, pieces: Iterable[str]) -> Path:
    """Write a text file from its pieces. If that fails, the old file stays as it was. Returns the path."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    return path
