"""Waits of this process that another thread can end.

A rank that waits for a rank of another pool would wait for ever if that one has died. What waits
like this is registered here, and `rolepool.cluster` aborts it in all processes that live before it
replaces dead ones.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Abortable(Protocol):
    """Something whose waits can be ended."""

    def abort(self, reason: str) -> None:
        """End all waits with an error, now and in the future. May be called by any thread, and more
        than once."""


_lock = threading.Lock()
_registered: list[Abortable] = []


def register_abortable(waits: Abortable) -> None:
    """From now on `abort_all` ends the waits of this object."""
    with _lock:
        _registered.append(waits)


def unregister_abortable(waits: Abortable) -> None:
    """The object does not wait any more."""
    with _lock:
        if waits in _registered:
            _registered.remove(waits)


def abort_all(reason: str) -> None:
    """End all registered waits of this process."""
    with _lock:
        registered = list(_registered)
        _registered.clear()
    for waits in registered:
        waits.abort(reason)
