"""The checkpoint folders of a run: written atomically, finding the newest, removing old ones.

Owns the folders under `checkpoints/`. A name that begins with `.tmp-` belongs to a save, an export or a removal that
did not finish, and is never read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from rolepool.errors import ConfigError
from rolepool.models.checkpoint.state import read_saved

_logger = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d{6,})")


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of a step's complete checkpoint."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def temporary_folder(final_folder: Path) -> Path:
    """A new, empty folder next to the final one, to write into before `publish`; leftovers are removed."""
    folder = final_folder.parent / f".tmp-{final_folder.name}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish(tmp_folder: Path, final_folder: Path) -> None:
    """Rename a written folder to its final name, after all of it is on disk.

    An existing folder of that name is replaced; if the process is killed in between, neither folder is left.
    """
    for path in sorted(tmp_folder.rglob("*")):
        sync(path)
    sync(tmp_folder)
    replaced = final_folder.parent / f".tmp-replaced-{final_folder.name}"
    if replaced.exists():
        shutil.rmtree(replaced)
    if final_folder.exists():
        final_folder.rename(replaced)
    tmp_folder.rename(final_folder)
    sync(final_folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_checkpoint(run_dir: Path, parts: Collection[str] = ()) -> Path | None:
    """The complete checkpoint of the highest step that has these parts. Damaged ones are skipped with a warning."""
    for folder in _newest_first(run_dir):
        if problem := _problem(folder):
            _logger.warning("skipping %s: %s", folder, problem)
        elif all((folder / part).is_dir() for part in parts):
            return folder
    return None


def remove_old(run_dir: Path, part: str, keep: int) -> None:
    """Remove a part (such as `actor`) from all checkpoints except the `keep` newest complete ones that have it.

    A checkpoint is removed with its last part. Damaged ones are not counted, so the newest complete one always stays.
    """
    assert keep >= 1
    remove_unfinished(run_dir)
    num_kept = 0
    for folder in _newest_first(run_dir):
        if not (folder / part).is_dir():
            continue
        if num_kept < keep:
            num_kept += _problem(folder) is None
        elif [path.name for path in _parts(folder)] == [part]:
            _remove(folder, folder.parent / f".tmp-removed-{folder.name}")
        else:
            _remove(folder / part, folder.parent / f".tmp-removed-{folder.name}-{part}")


def remove_unfinished(run_dir: Path) -> None:
    """Remove what unfinished saves and removals have left."""
    for leftover in (run_dir / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _newest_first(run_dir: Path) -> list[Path]:
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    steps = {int(match[1]): path for path in found if (match := _STEP.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def _parts(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith("."))


def _problem(folder: Path) -> str | None:
    """Why a checkpoint is not complete; None if it is."""
    try:
        json.loads((folder / "trainer.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"{folder / 'trainer.json'}: {error}"
    parts = list(_parts(folder))
    if not parts:
        return "it is empty"
    try:
        for part in parts:
            read_saved(part)
    except ConfigError as error:
        return error.problems[0]
    return None


def _remove(folder: Path, aside: Path) -> None:
    """Rename first, so that an interrupted removal does not leave a partial checkpoint."""
    shutil.rmtree(folder.rename(aside))
