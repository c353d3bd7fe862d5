"""Commands, run as a user runs them."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str
