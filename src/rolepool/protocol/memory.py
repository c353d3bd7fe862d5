"""The memory of a worker's device: how much is free, and the message when there is not enough.

Roles know which settings would need less memory (`Worker.less_memory`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

_SIGNS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in a RuntimeError of torch's CPU allocator and of CUDA libraries with their own allocators."""
_WANTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain_out_of_memory(who: str, error: BaseException, device: str, remedies: Sequence[str]) -> list[str]:
    """Two lines for the user: who asked for how much and how much was free; and what to change, the best first."""
    wanted = wanted_bytes(error)
    amount = "more memory" if wanted is None else show_bytes(wanted)
    where = "in host memory" if device == "cpu" else "on its GPU"
    advice = f"try {' or '.join(remedies)}; more advice is" if remedies else "advice is"
    return [
        f"{who} is out of memory: it asked for {amount}, and {show_bytes(free_bytes(device))} are free {where}",
        f"{advice} in docs/troubleshooting.md, under Memory",
    ]


def wanted_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    found = _WANTED.search(str(error))
    if found is None:
        return None
    number, unit = found.groups()
    return int(float(number) * 1024 ** [name.lower() for name in _UNITS].index(unit.lower()))


def free_bytes(device: str) -> int:
    """What this process can still allocate. On a GPU it includes what the allocator caches, within its share."""
    if device == "cpu":
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - held
    return max(0, min(free, allowed)) + held - torch.cuda.memory_allocated()


def show_bytes(amount: int) -> str:
    power = min(max(0, amount.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{amount / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
