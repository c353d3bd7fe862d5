"""Ctrl-C during training: the first lets the step end, the second drops it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Interrupt:
    """Whether the user asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take Ctrl-C for the time of the block; in the main thread only, as Python hands out signals nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        logger.warning("interrupted: finishing this step; press Ctrl-C again to drop it")
