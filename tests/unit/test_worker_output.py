"""All that a worker prints is in its file; the console gets some lines and how many it did not get."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from rolepool.cluster import process
from rolepool.cluster.process import MAX_LINES, LimitedOutput
from rolepool.errors import logger


def test_a_flood_is_cut_on_the_console_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = io.StringIO(), tmp_path / "logs" / "pool-0.log"
    stream = LimitedOutput(console, file)
    for number in range(10_000):
        print(f"line {number}", file=stream)
    print("\n".join(["in one call"] * 10_000), file=stream, flush=True)
    assert len(file.read_text().splitlines()) == 20_000
    assert len(console.getvalue().splitlines()) == MAX_LINES, "the count comes when the interval is over"
    monkeypatch.setattr(process, "INTERVAL_S", 0.0)
    stream.flush()
    stream.flush()
    assert console.getvalue().splitlines()[MAX_LINES:] == [
        f"... {20_000 - MAX_LINES} more lines are not shown here; all lines are in {file}"
    ]
    print("of the next interval", file=stream)
    assert console.getvalue().endswith("\nof the next interval\n")


def test_a_process_that_prints_nothing_has_no_file(tmp_path: Path) -> None:
    LimitedOutput(io.StringIO(), tmp_path / "logs" / "pool-0.log").flush()
    assert not (tmp_path / "logs").exists()


def test_details_are_only_in_the_file(tmp_path: Path) -> None:
    console, file = io.StringIO(), tmp_path / "logs" / "pool-0.log"
    root, before = logging.getLogger(), (logger.handlers, logger.level)
    handler = logging.StreamHandler(LimitedOutput(console, file))
    root.addHandler(handler)
    try:
        process._write_details_to(handler.stream)
        logger.debug("compiled a part")
        logger.info("loaded")
    finally:
        root.removeHandler(handler)
        logger.handlers, logger.level = before
    assert console.getvalue() == "loaded\n"
    assert file.read_text() == "DEBUG rolepool: compiled a part\nloaded\n"
