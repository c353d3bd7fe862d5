"""What a worker process prints: all of it goes to a file, and only some of it to the console.

Owns which log records are details, which only the file gets.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rolepool.errors import logger

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
HTTP_LIBRARIES = (
    "aiohttp",
    "anthropic",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "openai",
    "requests",
    "urllib3",
)
MAX_LINES = 50
INTERVAL_S = 5.0
"""So many lines of output are shown in each interval of this length."""


def write_output_to(path: Path) -> None:
    """From now on, write all that this process prints to this file, and show only some of it on
    the console."""
    output = LimitedOutput(sys.stderr, path)
    sys.stdout = LimitedOutput(sys.stdout, path)
    sys.stderr = output
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(output)
    _write_details_to(output)


class LimitedOutput:
    """Replaces a text stream of this process. Ray shows on the driver's console what is written to
    the stream. After `MAX_LINES` lines, the rest of an interval is only in the file. The first
    output after the interval tells how many lines that were."""

    def __init__(
        self, stream: TextIO, path: Path, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`now_s` is the clock that the intervals are measured with."""
        self._stream = stream
        self._path = path
        self._now_s = now_s
        self._file: TextIO | None = None
        self._num_lines = 0
        self._since_s = now_s()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write_to_file(self, text: str) -> None:
        """Write to the file and not to the console."""
        with suppress(OSError):  # the code that prints must not fail on a full disk
            if self._file is None:  # a process that prints nothing needs no file
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
            self._file.write(text)

    def write(self, text: str) -> int:
        self.write_to_file(text)
        self._end_interval()
        for line in text.splitlines(keepends=True):
            if self._num_lines < MAX_LINES:
                self._stream.write(line)
            self._num_lines += line.endswith(("\n", "\r"))
        return len(text)

    def flush(self) -> None:
        self._end_interval()
        self._stream.flush()

    def _end_interval(self) -> None:
        """If the interval is over, begin the next one."""
        now_s = self._now_s()
        if now_s <= self._since_s + INTERVAL_S:
            return
        num_hidden = self._num_lines - MAX_LINES
        if num_hidden > 0:
            self._stream.write(
                f"... {num_hidden} more lines are not shown here; all lines are in {self._path}\n"
            )
        self._num_lines = 0
        self._since_s = now_s


class _Details(logging.Handler):
    """Writes log records that are not for the console to the file of the process."""

    def __init__(self, output: LimitedOutput) -> None:
        super().__init__()
        self._output = output
        self.setFormatter(logging.Formatter(LOG_FORMAT))
        self.addFilter(_is_detail)

    def emit(self, record: logging.LogRecord) -> None:
        self._output.write_to_file(f"{self.format(record)}\n")


def _is_detail(record: logging.LogRecord) -> bool:
    """Whether a log record is of use only if somebody looks for a cause. Libraries for HTTP write
    one for each request, such as those of a reward function that asks a server."""
    library, _, _ = record.name.partition(".")
    is_of_requests = library in HTTP_LIBRARIES
    lowest_shown = logging.WARNING if is_of_requests else logging.INFO
    return record.levelno < lowest_shown


def _write_details_to(output: LimitedOutput) -> None:
    """Write details, such as rolepool's log records below INFO, to the file of this output, and not
    to the console."""
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(lambda record: not _is_detail(record))
    root.addHandler(_Details(output))
    logger.setLevel(logging.DEBUG)
