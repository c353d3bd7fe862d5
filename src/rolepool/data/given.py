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
            folder = config.trainer.default_local_dir
        except UnknownValue:  # the run will not start
            folder = self._cleanup.enter_context(TemporaryDirectory())
        self._run_folder = Path(folder).expanduser()
        self._new_files: list[Path] = []
        self._new_folders: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def of(self, data: Data, split: str) -> list[str]:
        """The files of a data set."""
        if isinstance(data, str | Path):
            return [str(data)]
        rows = _rows_of(data)
        if isinstance(data, list | tuple) and rows:
            are_paths = all(isinstance(row, str | Path) for row in rows)
            if are_paths:
                return [str(row) for row in rows]
        lines: list[str] = []
        for number, row in enumerate(rows, start=1):
            line = _as_json(row, split, number)
            lines.append(f"{line}\n")
        file = self._write("".join(lines), split)
        return [str(file)]

    def _write(self, text: str, split: str) -> Path:
        """The file with this text, in a folder that is named after it."""
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        path = self._run_folder / "data" / digest / f"{split}.jsonl"
        problem = f"trainer.default_local_dir={self._run_folder}: cannot be written"
        with explained(problem, "name another folder"):
            if not path.exists():
                self._new_files.append(path)
                for folder in path.parents:
                    if not folder.exists():
                        self._new_folders.add(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            return write_atomically(path, [text])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        *_: object,
    ) -> None:
        with self._cleanup:
            if error is None or self._has_started():
                return
            self._remove()
        if isinstance(error, ConfigError | DataError):
            problems = map(self._without_paths, error.problems)
            raise type(error)(problems) from None

    def _has_started(self) -> bool:
        """Whether the run has written its config, which names the files."""
        config = self._run_folder / "config.yaml"
        if not config.is_file():
            return False
        text = config.read_text(encoding="utf-8", errors="replace")
        digests = [path.parent.name for path in self._new_files]
        return any(digest in text for digest in digests)

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


def _rows_of(data: Any) -> list[Any]:
    if hasattr(data, "to_list"):  # a dataset
        return list(data.to_list())
    if isinstance(data, Iterable):
        return list(data)
    return [data]


def _as_json(row: object, split: str, number: int) -> str:
    if not isinstance(row, Mapping):
        what = f"{split} data: row {number} is of type {type(row).__name__}, not a dict"
        raise DataError(f"{what}; give files, a list of dicts or a datasets.Dataset")
    what = f"{split} data: row {number} cannot be written as JSON"
    with explained(what, "use texts, numbers, lists and dicts", TypeError, ValueError):
        return json.dumps(dict(row))
