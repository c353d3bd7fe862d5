"""The checkpoints of a run: whole or absent, the newest, and those no longer kept.

Owns the folders under `checkpoints/`. A name that begins with `.tmp-` is work of a save, an export or a removal that
did not end, and is never read.
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
    """Where the checkpoint of a step is, once it is whole."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def temporary_folder(final_folder: Path) -> Path:
    """A new, empty folder beside the final one, to write into before `publish`; what an earlier try left is removed."""
    folder = final_folder.parent / f".tmp-{final_folder.name}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish(tmp_folder: Path, final_folder: Path) -> None:
    """Make a written folder appear under its final name, all of it at once and only when it is on disk.

    One that has this name already is replaced; a kill between its going and the new one's coming leaves neither.
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
    """Have a file, or a folder's list of names, on disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest_checkpoint(run_dir: Path, parts: Collection[str] = ()) -> Path | None:
    """The checkpoint of the highest step that is whole and has these parts. Damaged ones are passed over and logged."""
    for folder in _newest_first(run_dir):
        if problem := _problem(folder):
            _logger.warning("%s is passed over: %s", folder, problem)
        elif all((folder / part).is_dir() for part in parts):
            return folder
    return None


def remove_old(run_dir: Path, part: str, keep: int) -> None:
    """Remove a part (such as `actor`) from all checkpoints but the `keep` newest whole ones that have it.

    A checkpoint goes when its last part does. As damaged ones do not count, the newest whole one always stays.
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
    """Remove what saves and removals that did not end have left."""
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
    """Why a checkpoint is not whole."""
    try:
        json.loads((folder / "trainer.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"{folder / 'trainer.json'}: {error}"
    parts = list(_parts(folder))
    if not parts:
        return "nothing is saved in it"
    try:
        for part in parts:
            read_saved(part)
    except ConfigError as error:
        return error.problems[0]
    return None


def _remove(folder: Path, aside: Path) -> None:
    """Out of sight at once, so that a removal that is cut short leaves no half of it."""
    shutil.rmtree(folder.rename(aside))
