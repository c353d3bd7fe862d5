"""Rows of Parquet and JSONL files, by number, without keeping all of them as Python objects.

Owns the two formats and how error messages name a row. Of a JSONL file only the offsets of its lines are kept, and a
line is parsed when it is needed; a Parquet file is kept as Arrow columns, only those that are needed.

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

from rolepool.errors import ConfigError, DataError, explained, one_line

Row = dict[str, Any]


class JsonlRows:
    """Rows numbered from 0."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._starts = array("Q")
        self._lines = array("Q")  # line numbers, from 1; blank lines are not rows
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
        """The name of this row in error messages."""
        return f"{self._file}, line {self._lines[number]}"

    def row(self, number: int) -> Row:
        with self._file.open("rb") as lines:
            lines.seek(self._starts[number])
            text = lines.readline()
        try:
            row = json.loads(text)
        except ValueError as error:  # invalid JSON or UTF-8
            if text.lstrip().startswith(b"["):
                raise DataError(f"{self.name(number)}: starts a JSON list; write one object per line") from error
            raise DataError(f"{self.name(number)}: is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.name(number)}: is a JSON {type(row).__name__}; write one object per line")
        return row


class ParquetRows:
    """Rows numbered from 0."""

    def __init__(self, file: Path, key: str, columns: Sequence[str]) -> None:
        self._file = file
        try:
            present = pyarrow.parquet.read_schema(file).names
            wanted = [column for column in columns if column in present]
            # Not read_table, which reads `year=2024` in a folder's name as a column.
            self._table = pyarrow.parquet.ParquetFile(file, memory_map=True).read(columns=wanted)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{key}={file}: cannot be read as Parquet: {one_line(error)}") from error
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
    """The rows of one file. `key` is the config key that names the file, `columns` are the columns that are needed."""
    file = Path(path).expanduser()
    if "://" in path:
        raise ConfigError(f"{key}={path}: only local files can be read; copy it to a folder that every node can access")
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder; name the .parquet or .jsonl files in it")
    if not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file (looked in {file.absolute().parent})")
    if file.suffix == ".parquet":
        return ParquetRows(file, key, columns)
    if file.suffix in (".jsonl", ".json"):
        with explained(f"{key}={path}: cannot be read", "name a readable file"):
            return JsonlRows(file)
    raise ConfigError(f"{key}={path}: prompts must be .parquet or .jsonl files, not {file.suffix!r}")
