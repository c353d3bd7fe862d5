"""Rows that a Python program gives become files of the run, and none stays behind if the run does
not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolepool.config import Config, load_config
from rolepool.data.given import DataFiles
from rolepool.errors import DataError

ROWS = [{"prompt": "a"}, {"prompt": "b"}]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config([], [f"trainer.default_local_dir={tmp_path / 'runs' / 'mine'}"]).config


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_files_stay_as_they_are_and_rows_become_a_file(config: Config, tmp_path: Path) -> None:
    with DataFiles(config) as files:
        assert files.of("a.jsonl", "train") == ["a.jsonl"]
        assert files.of([Path("a.jsonl"), "b.parquet"], "train") == ["a.jsonl", "b.parquet"]
        (written,) = files.of(ROWS, "train")
        assert files.of(iter(ROWS), "train") == [written], "the same rows are the same file"
    assert Path(written).read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert Path(written).is_relative_to(tmp_path / "runs" / "mine" / "data")


def test_nothing_stays_of_a_run_that_does_not_start(config: Config, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised, DataFiles(config) as files:
        (written,) = files.of(ROWS, "train")
        files.of(ROWS, "val")
        raise DataError(f"{written}, line 2: is wrong")
    assert raised.value.problems == ("train data, line 2: is wrong",)
    assert files_in(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), DataFiles(config) as files:
        files.of(ROWS, "train")
        raise KeyboardInterrupt
    assert files_in(tmp_path) == []


def test_what_was_there_before_and_what_a_run_uses_stays(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    with pytest.raises(DataError) as raised, DataFiles(config) as files:
        (first,) = files.of(ROWS, "train")
        (run / "config.yaml").write_text(f"data: {{train_files: [{first}]}}")
        raise DataError(f"{first}: the run had started")
    assert raised.value.problems == (f"{first}: the run had started",)
    assert Path(first).exists()
    before = files_in(tmp_path)
    with pytest.raises(DataError), DataFiles(config) as files:
        assert files.of(ROWS, "train") == [first]
        (second,) = files.of(ROWS[:1], "train")
        assert second != first
        raise DataError("the next run does not start")
    assert files_in(tmp_path) == before
