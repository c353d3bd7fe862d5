"""Rows of Parquet and JSONL files, by number, without holding them all as Python objects.

Owns the two formats and how a row is named in an error. A JSONL file is kept as the places where its lines start, and
a line is parsed when asked for; a Parquet file as Arrow columns, and only those that are needed.

Does not know what the columns mean.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from rolepool.errors import ConfigError, DataError, explained

Row = dict[str, Any]


class JsonlRows:
    """Rows numbered from 0."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._starts = array("Q")
        self._lines = array("Q")  # 1, 2, ... as editors count; blank lines are no rows
        start = 0
        with file.open("rb") as lines:
            for line, text in enumerate(lines, start=1):
                if text.strip():
                    self._starts.append(start)
                    self._lines.append(line)
                start += len(text)

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, number: int) -> str:
        """How an error names this row."""
        return f"{self._file}, line {self._lines[number]}"

    def row(self, number: int) -> Row:
        with self._file.open("rb") as lines:
            lines.seek(self._starts[number])
            text = lines.readline()
        try:
            row = json.loads(text)
        except ValueError as error:  # broken JSON, or not UTF-8
            if text.lstrip().startswith(b"["):
                raise DataError(f"{self.name(number)}: begins a JSON list; write one object per line") from error
            raise DataError(f"{self.name(number)}: is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.name(number)}: is a JSON {type(row).__name__}; every line holds one object")
        return row


class ParquetRows:
    """Rows numbered from 0."""

    def __init__(self, file: Path, key: str, columns: Sequence[str]) -> None:
        self._file = file
        try:
            present = pyarrow.parquet.read_schema(file).names
            wanted = [column for column in columns if column in present]
            # ParquetFile and not read_table, which takes `year=2024` in a folder's name for a column.
            self._table = pyarrow.parquet.ParquetFile(file, memory_map=True).read(columns=wanted)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{key}={file}: cannot be read as Parquet: {error}") from error
        if not wanted:
            raise DataError(f"{file}: has none of the columns {', '.join(columns)}; it has {', '.join(present)}")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def name(self, number: int) -> str:
        return f"{self._file}, row {number} (the first is 0)"

    def row(self, number: int) -> Row:
        (row,) = self._table.slice(number, 1).to_pylist()
        return dict(row)


def open_rows(path: str, key: str, columns: Sequence[str]) -> JsonlRows | ParquetRows:
    """The rows of one file; `key` is the config key that names it, `columns` are all that will be looked at."""
    file = Path(path).expanduser()
    if "://" in path:
        raise ConfigError(f"{key}={path}: only local files are read; copy it to a folder that every node sees")
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder; name the .parquet or .jsonl files in it")
    if not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file (looked in {file.absolute().parent})")
    if file.suffix == ".parquet":
        return ParquetRows(file, key, columns)
    if file.suffix in (".jsonl", ".json"):
        with explained(f"{key}={path}: cannot be read", "name a file that can be"):
            return JsonlRows(file)
    raise ConfigError(f"{key}={path}: prompts are read from .parquet and .jsonl files, not from {file.suffix!r}")
