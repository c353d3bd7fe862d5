"""CUDA MPS on one node: kernels of processes that share a GPU run side by side instead of in turns.

Owns the daemon: that it runs before a process uses the GPU, and that it ends with the process that started it, however
that one ends. Knows neither pools nor Ray.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from rolepool.errors import PlacementError

CONTROL = "nvidia-cuda-mps-control"
START_TIMEOUT_S = 30.0
"""For the daemon and its server to start."""
ASK_TIMEOUT_S = 10.0

# Reads until the process that started it is gone, then ends the daemon, with the servers that are its children, and
# removes its folder. It runs in the background of a shell that is over at once, for Ray kills the children of a worker
# that ends, but not theirs.
KEEPER = f"""
exec 3<&0
(
    read -r _ <&3
    daemon=$(cat "$CUDA_MPS_PIPE_DIRECTORY/{CONTROL}.pid")
    echo quit -t 5 | timeout 20 {CONTROL} || {{ pkill -9 -P "$daemon"; kill -9 "$daemon"; }}
    rm -rf "$1"
) >/dev/null 2>&1 &
"""


class MpsDaemon:
    """A running daemon of our own, beside any other on the node. It ends when this process does."""

    def __init__(self) -> None:
        if shutil.which(CONTROL) is None:
            _refuse(f"{CONTROL} is not on the PATH")
        # Not the system's choice of a folder: the paths of sockets must be short.
        folder = Path(tempfile.mkdtemp(prefix="rolepool-mps-", dir="/tmp"))
        pipes, self._logs = folder / "pipe", folder / "log"
        pipes.mkdir()
        self._logs.mkdir()
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
        # The daemon must see every GPU: clients count the GPUs that it sees, and a worker has the node's own numbers.
        others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._full_environment = others | self.environment
        self._keep(folder)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the keeper end the daemon now."""
        os.close(self._held)

    def _keep(self, folder: Path) -> None:
        watched, self._held = os.pipe()
        keeper = ["sh", "-c", KEEPER, "sh", str(folder)]
        subprocess.run(keeper, stdin=watched, env=self._full_environment, start_new_session=True, timeout=ASK_TIMEOUT_S)
        os.close(watched)

    def _start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        if self._control("", "-d") is None:
            _refuse(f"{CONTROL} -d failed: {self._last_words()}")
        # The server starts now, and not with its first client, so that what hinders it is known at once.
        while self._control(f"start_server -uid {os.getuid()}") is None:
            self._wait(deadline, "the daemon to answer")
        while not self._control("get_server_list"):
            self._wait(deadline, "its server to start")

    def _wait(self, deadline: float, awaited: str) -> None:
        if time.monotonic() > deadline:
            _refuse(f"waited {START_TIMEOUT_S:g} s for {awaited}, and its last words were: {self._last_words()}")
        time.sleep(0.1)

    def _control(self, command: str, *options: str) -> str | None:
        """What it answers; None when it fails. Through a file, since a daemon may hold on to a pipe it inherits."""
        output = self._logs / "output"
        with output.open("w") as file:
            try:
                subprocess.run(
                    [CONTROL, *options],
                    input=f"{command}\n".encode(),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._full_environment,
                    timeout=ASK_TIMEOUT_S,
                    check=True,
                )
            except subprocess.SubprocessError:
                return None
        return output.read_text().strip()

    def _last_words(self) -> str:
        """The last line of the first log that has one."""
        logs = [self._logs / name for name in ("server.log", "control.log", "output")]
        texts = [log.read_text(errors="replace").strip() for log in logs if log.exists()]
        return next((text.splitlines()[-1] for text in texts if text), "nothing")


def _refuse(what: str) -> NoReturn:
    raise PlacementError(
        f"placement.mps=true: CUDA MPS does not start on {socket.gethostname()}: {what}; set placement.mps=false, "
        "or make MPS work there"
    )
