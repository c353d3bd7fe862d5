"""What a worker prints: all of it in a file, and at most some lines per second on the console.

Ray shows on the driver's console what a worker writes to its standard output and standard error.
"""

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

MAX_LINES = 50
INTERVAL_S = 5.0
"""So many lines are shown in each interval of this length."""
MIN_NOTICE_S = 1.0


class LimitedOutput:
    """Replaces a text stream of this process. After `MAX_LINES` lines, the rest of an interval is only in the file."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._path = stream, path
        self._file: TextIO | None = None
        self._num_lines = self._num_hidden = 0
        self._since_s = self._told_s = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):  # the code that prints must not fail on a full disk
            if self._file is None:  # a process that prints nothing needs no file
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
            self._file.write(text)
        if time.monotonic() > self._since_s + INTERVAL_S:
            self._tell()
            self._since_s, self._num_lines = time.monotonic(), 0
        for line in text.splitlines(keepends=True):
            ends = line.endswith(("\n", "\r"))
            if self._num_lines < MAX_LINES:
                self._stream.write(line)
                self._num_lines += ends
            else:
                self._num_hidden += ends
        return len(text)

    def flush(self) -> None:
        if time.monotonic() > self._told_s + MIN_NOTICE_S:  # because print() can flush after every line
            self._tell()
        self._stream.flush()

    def _tell(self) -> None:
        if self._num_hidden:
            self._stream.write(f"... {self._num_hidden} more lines are not shown here; all lines are in {self._path}\n")
            self._num_hidden, self._told_s = 0, time.monotonic()


def limit_output(path: Path) -> None:
    """Limit what this process shows from now on, and write all of it to the file."""
    sys.stdout, sys.stderr = LimitedOutput(sys.stdout, path), LimitedOutput(sys.stderr, path)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
