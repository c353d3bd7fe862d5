"""Reading files that another program, or another person, may have written: a run folder can come
from anywhere.

Owns the limits on the size, depth and number of values of such files. Everything that goes over a
limit, and everything that cannot be parsed, raises a ValueError or an OSError, so that the caller
can name the file. Nothing that is read here is ever imported or executed.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field
from pydantic_core import from_json

MAX_FILE_BYTES = 2**26
"""The size of a file that is read as a whole, such as plan.json."""
MAX_YAML_BYTES = 2**20
MAX_YAML_VALUES = 10_000
MAX_YAML_DEPTH = 40
MAX_LINE_BYTES = 2**24
"""The length of a line of a file with one JSON value in each line."""

Number = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
"""A number that a run may have written. Computing with much larger ones fails."""
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""An integer that a run may have written."""
LARGEST = 1e100
"""A metric that is larger counts as infinite."""


class LimitError(ValueError):
    """A file is larger, or has more in it, than any run writes."""


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError for a pipe or a device, because reading one may never
    end."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    opened = os.fdopen(handle, "rb")
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return opened
    opened.close()
    raise OSError(errno.EINVAL, "not a regular file", str(file))


def read_small(file: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file. Raises ValueError if it has more bytes than `most`."""
    with open_regular(file) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise LimitError(f"has more than {most} bytes")
    return content


def parse_json(text: bytes) -> Any:
    """The JSON value in a text. Raises ValueError if there is none, or if it is nested too
    deeply."""
    return from_json(text)


def parse_yaml(text: bytes) -> object:
    """The texts, numbers, lists and mappings in a YAML text. Raises ValueError if it is not valid
    or over a limit, or if there are other values in it.

    Aliases are refused, because a few lines of them can stand for more values than fit in memory.
    No run writes them.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_yaml(yaml.parse(text, loader))
        content: object = yaml.load(text, loader)
        # Fails for dates, bytes and very long numbers.
        json.dumps(content, ensure_ascii=False).encode()
        return content
    except (
        yaml.YAMLError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        ValueError,
    ) as error:
        # PyYAML raises many kinds of errors for keys that are lists, and for some numbers and
        # dates.
        reason = str(error) if isinstance(error, LimitError) else f"not valid YAML: {error}"
        raise ValueError(" ".join(reason.split())) from None


def _check_yaml(events: Iterator[yaml.Event]) -> None:
    depth = 0
    num_values = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise LimitError("has YAML aliases, which no run writes")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent):
            num_values += 1
        if depth > MAX_YAML_DEPTH:
            raise LimitError(f"is nested more than {MAX_YAML_DEPTH} levels deep")
        if num_values > MAX_YAML_VALUES:
            raise LimitError(f"has more than {MAX_YAML_VALUES} values")


def lines_within(file: BufferedReader) -> Iterator[bytes]:
    """The lines of an open file. If a line is too long, only its beginning is returned, which
    cannot be parsed."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)  # it is skipped
