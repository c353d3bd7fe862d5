"""Data that a Python program gives: files, or rows, which are written to files.

Owns what may be given, where its rows are written, and that nothing is left of a run that did not
start.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from rolepool.config import Config
from rolepool.config.base import UnknownValue
from rolepool.errors import ConfigError, DataError, explained
from rolepool.files import write_atomically

Data = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""One or several files, or rows: a list of dicts, or a `datasets.Dataset`."""


class DataFiles:
    """The data of a run as files. Rows are written to a folder that is named after their content,
    so that an earlier run keeps its rows.

    If the block ends with an error before the run has started, the files that were written are
    removed.
    """

    def __init__(self, config: Config) -> None:
        """The config may be that of a draft."""
        self._cleanup = ExitStack()
        try:
            self._run_folder = Path(config.trainer.default_local_dir).expanduser()
        except UnknownValue:  # the run will not start
            self._run_folder = Path(self._cleanup.enter_context(TemporaryDirectory()))
        self._new_files: list[Path] = []
        self._new_folders: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def of(self, given: Data, split: str) -> list[str]:
        """The files of a data set."""
        if isinstance(given, str | Path):
            return [str(given)]
        rows = _rows_of(given)
        if (
            rows
            and isinstance(given, list | tuple)
            and all(isinstance(row, str | Path) for row in rows)
        ):
            return [str(row) for row in rows]
        text = "".join(f"{_as_json(row, split, number)}\n" for number, row in enumerate(rows, 1))
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        path = self._run_folder / "data" / digest / f"{split}.jsonl"
        with explained(
            f"trainer.default_local_dir={self._run_folder}: cannot be written",
            "name another folder",
        ):
            if not path.exists():
                self._new_files.append(path)
                self._new_folders.update(folder for folder in path.parents if not folder.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            return [str(write_atomically(path, [text]))]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        with self._cleanup:
            if error is None or self._has_started():
                return
            self._remove()
        if isinstance(error, ConfigError | DataError):
            raise type(error)(map(self._without_paths, error.problems)) from None

    def _has_started(self) -> bool:
        """Whether the run has written its config, which names the files."""
        config = self._run_folder / "config.yaml"
        if config.is_file():
            text = config.read_text(encoding="utf-8", errors="replace")
        else:
            text = ""
        return any(path.parent.name in text for path in self._new_files)

    def _remove(self) -> None:
        for path in self._new_files:
            path.unlink(missing_ok=True)
        for folder in sorted(self._new_folders, reverse=True):  # those inside of others come first
            with suppress(OSError):  # something else is in it, or it is gone
                folder.rmdir()

    def _without_paths(self, problem: str) -> str:
        """The problem without the names of the removed files: `train data, line 3: ...`."""
        for path in self._new_files:
            problem = problem.replace(str(path), f"{path.stem} data")
        return problem


def _rows_of(given: Any) -> list[Any]:
    if hasattr(given, "to_list"):  # a dataset
        return list(given.to_list())
    if isinstance(given, Iterable):
        return list(given)
    return [given]


def _as_json(row: Any, split: str, number: int) -> str:
    if not isinstance(row, Mapping):
        what = f"{split} data: row {number} is of type {type(row).__name__}, not a dict"
        raise DataError(f"{what}; give files, a list of dicts or a datasets.Dataset")
    what = f"{split} data: row {number} cannot be written as JSON"
    with explained(what, "use texts, numbers, lists and dicts", TypeError, ValueError):
        return json.dumps(dict(row))
