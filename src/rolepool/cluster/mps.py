"""CUDA MPS on one node: kernels of processes that share a GPU run at the same time instead of one
after another.

Owns the daemon. It ends with the process that started it, no matter how that process ends. This
module knows neither pools nor Ray.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rolepool.errors import PlacementError

CONTROL = "nvidia-cuda-mps-control"
START_TIMEOUT_S = 30.0
"""The time in which the daemon and its server must start, unless somebody says something else."""
ASK_TIMEOUT_S = 10.0


class MpsDaemon:
    """Our own running daemon, separate from any other on the node. It ends when this process
    ends."""

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        if shutil.which(CONTROL) is None:
            _refuse(f"{CONTROL} is not on the PATH")
        # Always in /tmp, not in the system's default folder, because the paths of sockets must be
        # short.
        folder = Path(tempfile.mkdtemp(prefix="rolepool-mps-", dir="/tmp"))
        pipes = folder / "pipe"
        self._logs = folder / "log"
        pipes.mkdir()
        self._logs.mkdir()
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self._logs),
        }
        # The daemon must see every GPU: clients count the GPUs that it sees, and a worker has the
        # node's own numbers.
        self._full_environment = os.environ | self.environment
        self._full_environment.pop("CUDA_VISIBLE_DEVICES", None)
        watched, self._held = os.pipe()
        script = Path(__file__).with_name("mps_keeper.sh")
        subprocess.run(
            ["sh", str(script), str(folder)],
            stdin=watched,
            env=self._full_environment,
            start_new_session=True,
            timeout=ASK_TIMEOUT_S,
        )
        os.close(watched)
        self._start_timeout_s = start_timeout_s
        deadline = time.monotonic() + start_timeout_s
        try:
            if self._control("", "-d") is None:
                _refuse(f"{CONTROL} -d failed: {self._last_log_line()}")
            # The server starts now, not with its first client, so that a problem is known at once.
            while self._control(f"start_server -uid {os.getuid()}") is None:
                self._wait(deadline, "the daemon to answer")
            while not self._control("get_server_list"):
                self._wait(deadline, "its server to start")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the daemon now: the keeper notices that the pipe is closed."""
        os.close(self._held)

    def _wait(self, deadline: float, awaited: str) -> None:
        if time.monotonic() > deadline:
            _refuse(
                f"waited {self._start_timeout_s:g} s for {awaited}; "
                f"the last line of its log: {self._last_log_line()}"
            )
        time.sleep(0.1)

    def _control(self, command: str, *options: str) -> str | None:
        """The answer to a command; None if it fails. Read from a file, because the daemon may keep
        a pipe open."""
        output = self._logs / "output"
        with output.open("w") as file, suppress(subprocess.SubprocessError):
            subprocess.run(
                [CONTROL, *options],
                input=f"{command}\n".encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._full_environment,
                timeout=ASK_TIMEOUT_S,
                check=True,
            )
            return output.read_text().strip()
        return None

    def _last_log_line(self) -> str:
        """The last line of the first log that is not empty."""
        for name in ("server.log", "control.log", "output"):
            log = self._logs / name
            if not log.exists():
                continue
            text = log.read_text(errors="replace").strip()
            if text:
                return text.splitlines()[-1]
        return "nothing"


def _refuse(what: str) -> NoReturn:
    fix = "set placement.mps=false, or fix MPS there"
    raise PlacementError(
        f"placement.mps=true: CUDA MPS does not start on {socket.gethostname()}: {what}; {fix}"
    )
