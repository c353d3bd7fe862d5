"""Ctrl-C and SIGTERM: what they do to a run, which depends on whether it is making a step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rolepool.errors import Terminated, logger

SAME_SIGNAL_S = 0.3
"""Signals within this time count as one. `timeout` sends two: to its child, and to the child's
process group."""


class Interrupt:
    """Ctrl-C or SIGTERM. In a step, the first lets the step finish and the second drops it. Outside
    of steps, the first one ends the run."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the run is asked to end after the present step."""
        self.in_steps = False
        """Whether the run makes steps. Before that there is nothing to finish."""
        self._last_s = 0.0
        self._error = KeyboardInterrupt

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Handle signals in the block; in the main thread only, because Python delivers them
        nowhere else."""
        handled: tuple[signal.Signals, ...] = ()
        if threading.current_thread() is threading.main_thread():
            handled = (signal.SIGINT, signal.SIGTERM)
        with ExitStack() as restored:
            for number in handled:
                before = signal.signal(number, self._ask)
                restored.callback(signal.signal, number, before)
            try:
                yield
            except KeyboardInterrupt as interrupt:  # the only kind that Ray passes on
                raise self._error(*interrupt.args) from None

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        since_last_s = now_s - self._last_s
        self._last_s = now_s
        if since_last_s < SAME_SIGNAL_S:
            return
        self._error = Terminated if signum == signal.SIGTERM else KeyboardInterrupt
        if self.asked or not self.in_steps:
            raise KeyboardInterrupt
        self.asked = True
        logger.warning("interrupted: finishing this step; press Ctrl-C again to drop it")
