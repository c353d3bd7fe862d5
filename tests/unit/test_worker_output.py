"""All that a worker prints is in its file; the console gets some lines and how many it did not
get."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolepool.cluster import output
from rolepool.cluster.output import MAX_LINES, LimitedOutput
from rolepool.errors import logger


def test_a_flood_is_cut_on_the_console_and_counted(tmp_path: Path) -> None:
    console, file = io.StringIO(), tmp_path / "logs" / "pool-0.log"
    time_s = 100.0
    stream = LimitedOutput(console, file, now_s=lambda: time_s)
    for number in range(10_000):
        print(f"line {number}", file=stream)
    print("\n".join(["in one call"] * 10_000), file=stream, flush=True)
    assert len(file.read_text().splitlines()) == 20_000
    assert len(console.getvalue().splitlines()) == MAX_LINES, (
        "the count comes when the interval is over"
    )
    time_s += output.INTERVAL_S
    stream.flush()
    assert len(console.getvalue().splitlines()) == MAX_LINES
    time_s += 0.1
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


@pytest.fixture
def console_and_file(tmp_path: Path) -> Iterator[tuple[io.StringIO, Path]]:
    """The console and the file of a process that writes details only to the file."""
    console, file = io.StringIO(), tmp_path / "logs" / "pool-0.log"
    root = logging.getLogger()
    handlers, level, own_level = root.handlers, root.level, logger.level
    handler = logging.StreamHandler(LimitedOutput(console, file))
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    try:
        output._write_details_to(handler.stream)
        yield console, file
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logger.setLevel(own_level)


def test_details_are_only_in_the_file(console_and_file: tuple[io.StringIO, Path]) -> None:
    console, file = console_and_file
    logger.debug("compiled a part")
    logger.info("loaded")
    assert console.getvalue() == "loaded\n"
    assert file.read_text() == "DEBUG rolepool: compiled a part\nloaded\n"


@pytest.mark.parametrize("name", ["httpx", "urllib3.connectionpool", "openai._base_client"])
def test_a_line_for_each_request_is_only_in_the_file_and_warnings_are_shown(
    console_and_file: tuple[io.StringIO, Path], name: str
) -> None:
    console, file = console_and_file
    library = logging.getLogger(name)
    library.info("HTTP Request: POST http://localhost:8000 200 OK")
    library.warning("Retrying")
    logging.getLogger("my_reward").info("asked")
    assert console.getvalue() == "Retrying\nasked\n"
    assert "HTTP Request: POST" in file.read_text()
