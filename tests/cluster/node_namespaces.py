"""Nodes of a cluster on one machine: each has its own network, processes, host name and shared
memory, and they see the same files. Needs root. Whatever ends this process, also ends the nodes:
nothing of them has a name that could be left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ADDRESSES = ("10.0.0.1", "10.0.0.2")
"""Nobody outside of the namespaces can be reached from there, so all tests use the same."""
NAMESPACES = ["--net", "--pid", "--mount", "--uts"]
SOURCE = Path(__file__).parents[2] / "src"


def why_no_nodes() -> str | None:
    """What this machine lacks, if it cannot have such nodes."""
    command = ["unshare", *NAMESPACES, "--fork", "--mount-proc"]
    try:
        subprocess.run(
            [
                *command,
                "sh",
                "-ec",
                "mount -t tmpfs tmpfs /dev/shm; ip link add cable0 type veth peer name cable1",
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"namespaces are not allowed here: {error.stderr.strip()}"
    return None


class Node:
    """A node. It runs until it is ended, or until this process dies."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.address = address
        self.home = folder / f"home of {name}"
        (self.home / "bin").mkdir(parents=True)
        hosts = self.home / "hosts"
        # As Debian writes it: the host's own name is a loopback address, at which no other node can
        # reach it.
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        script = f"""
            mount --bind '{hosts}' /etc/hosts
            mount --bind /dev/null /etc/resolv.conf
            mount -t tmpfs tmpfs /dev/shm
            hostname {name}
            ip link set lo up
            echo ready
            read -r until_the_pipe_is_closed
        """
        self._first = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None and self._first.stdout.readline() == "ready\n"
        (inside,) = psutil.Process(self._first.pid).children()
        self.pid = inside.pid
        # An open file keeps the network, so that a node that is gone does not take the other end of
        # its cable with it.
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def start(self, command: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Run a shell command there, with nothing of this process's environment."""
        variables = {
            "PATH": f"{self.home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "HOME": str(self.home),
            "TMPDIR": "/dev/shm",  # sockets need a short path; and it goes away with the node
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        return subprocess.Popen(
            [
                "nsenter",
                "--target",
                str(self.pid),
                *NAMESPACES,
                "bash",
                "-ec",
                f"cd '{folder}'\n{command}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )

    def run(self, command: str, folder: Path, timeout_s: float = 120, **environment: str) -> str:
        """The output of a shell command that must end well."""
        process = self.start(command, folder, **environment)
        output = output_of(process, timeout_s)
        assert process.returncode == 0, f"{command}\n{output}"
        return output

    def in_network(self, *command: str) -> None:
        subprocess.run(
            ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._network}", *command], check=True
        )

    def hide(self, folder: Path) -> None:
        """Have the node see an empty folder there."""
        enter = ["nsenter", "--target", str(self.pid), "--mount"]
        subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)

    def end(self) -> None:
        """Kill every process of it at once. The network stays."""
        if self._first.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._first.wait(timeout=60)

    def close(self) -> None:
        self.end()
        os.close(self._network)


def output_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """All that it writes until its end, which must come in time."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(
            f"not within {timeout_s} s: {process.args}\n{process.communicate()[0]}"
        ) from None


class TwoNodes:
    """Two nodes with a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.one = Node("one", ADDRESSES[0], folder)
        try:
            self.two = Node("two", ADDRESSES[1], folder)
        except BaseException:
            self.one.close()
            raise

    def __enter__(self) -> TwoNodes:
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(self.two.pid)]
        subprocess.run(
            ["ip", "link", "add", "eth0", "netns", str(self.one.pid), *cable], check=True
        )
        for node, other in ((self.one, self.two), (self.two, self.one)):
            node.in_network("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node.in_network("ip", "link", "set", "eth0", "up")
            # Ray takes the address of the interface that would lead to the internet.
            node.in_network("ip", "route", "add", "default", "via", other.address)
        return self

    def __exit__(self, *error: Any) -> None:
        self.one.close()
        self.two.close()
