"""The process in which vLLM runs, as the rollout sees it: its start, calls to it, and its end.

Owns the process and the socket to it. What runs in the process is `vllm_process`. Does not know
what the calls mean.
"""

import os
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rolepool.errors import RolepoolError, one_line

_SCRIPT = Path(__file__).with_name("vllm_process.py")
_MISLEADING_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)
"""Variables of this process that would mislead vLLM."""
_DEFAULT_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Variables that vLLM gets unless this process has them."""
START_TIMEOUT_S = 1800.0
"""How long vLLM may take to start, unless `actor_rollout_ref.rollout.vllm_start_timeout_s` says
something else."""
END_TIMEOUT_S = 10.0
"""How long it may take to end by itself."""

PlainDigests = dict[str, tuple[str, tuple[int, ...], int]]
"""The digests of tensors as they come from the process: dtype, shape and number."""


class VllmClient:
    """A process that `python`, the Python of vLLM's environment, runs. It is started at once, and
    vLLM starts in it while this process does other things.

    `arguments` are those of vLLM's class LLM. `group` is the rank in a tensor-parallel group, its
    size, and a port of this node at which its ranks meet.
    """

    def __init__(
        self,
        python: str,
        arguments: Mapping[str, object],
        group: tuple[int, int, int] = (0, 1, 0),
        start_timeout_s: float = START_TIMEOUT_S,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self.arguments = dict(arguments)
        self._timeout_s = start_timeout_s
        self._end_timeout_s = end_timeout_s
        self._began_s = time.monotonic()
        self._has_started = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _run(python, theirs)
        self._connection: Any = Connection(ours.detach())
        self.close = weakref.finalize(
            self,
            _end,
            self._connection,
            self.process,
            end_timeout_s,
        )
        with suppress(OSError):  # it has ended already, which `await_start` reports
            self._connection.send(("start", (self.arguments, *group)))

    def await_start(self, wait_s: float) -> str | None:
        """Wait at most so long for vLLM's start. Returns what is waited for, or None if vLLM has
        started. Raises RolepoolError if it could not start, or takes too long."""
        if self._has_started:
            return None
        left_s = self._began_s + self._timeout_s - time.monotonic()
        longest_wait_s = max(0.0, min(wait_s, left_s))
        if self._connection.poll(longest_wait_s):
            _, problem = self._receive()
            if problem is not None:
                summary, _ = problem
                raise RolepoolError(
                    f"vLLM could not start: {summary}; its output has the traceback"
                )
            self._has_started = True
            return None
        took_s = time.monotonic() - self._began_s
        if took_s >= self._timeout_s:
            self.close()
            key = f"actor_rollout_ref.rollout.vllm_start_timeout_s={self._timeout_s:g}"
            raise RolepoolError(
                f"{key}: vLLM has not started in this time; look at its output, or raise the limit"
            )
        return f"waiting for vLLM to start ({took_s:.0f} s)"

    def ask(self, name: str, *arguments: object) -> Any:
        """The answer to a call. The first call waits until vLLM has started."""
        while self.await_start(self._timeout_s) is not None:
            pass
        with suppress(OSError):  # it has ended, which `_receive` reports
            self._connection.send((name, arguments))
        answer, problem = self._receive()
        if problem is not None:
            _, details = problem
            raise RuntimeError(f"vLLM failed in `{name}`:\n{details}")
        return answer

    def _receive(self) -> Any:
        """The next answer: a value, and a problem in one line and in detail or None."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self._end_timeout_s)
            code = self.process.poll()
            raise RolepoolError(
                f"vLLM's process ended with exit code {code}; its output says why"
            ) from None


def _run(python: str, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process with its end of the socket."""
    variables = dict(_DEFAULT_VARIABLES)
    for name, value in os.environ.items():
        if name not in _MISLEADING_VARIABLES:
            variables[name] = value
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    program = str(Path(python).expanduser())
    fd = theirs.fileno()
    try:
        return subprocess.Popen(
            [program, "-P", str(_SCRIPT), str(fd)],
            pass_fds=[fd],
            env=variables,
        )
    except OSError as error:
        raise RolepoolError(
            f"actor_rollout_ref.rollout.vllm_python={python}: cannot be run ({one_line(error)}); "
            "run scripts/setup_vllm.sh on this node, or name vLLM's Python"
        ) from None


def _end(connection: Any, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """End the process, which stops by itself when the connection closes."""
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=timeout_s)
    process.kill()
