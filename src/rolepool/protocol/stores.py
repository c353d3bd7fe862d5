"""Stores through which the ranks of a process group find each other."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def listening_store(address: str, num_ranks: int) -> TCPStore:
    """A store that listens only on this address of its node. A store that opens its port itself
    would listen on all addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Port 0 lets the system choose a free one.
    listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
