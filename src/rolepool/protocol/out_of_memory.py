"""Errors of allocations that failed: how they are recognized, and what the user reads about them.

Owns how much memory a process can still allocate, too. Which settings would help is known to the
roles.
"""

import re
from collections.abc import Sequence

import psutil
import torch

from rolepool.units import show_bytes

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Texts in a RuntimeError of torch's CPU allocator and of CUDA libraries with their own
allocators."""
_WANTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def explain_out_of_memory(
    who: str, error: BaseException, device: str, remedies: Sequence[str]
) -> list[str]:
    """Two lines for the user: who asked for how much and how much was free; and what to change, the
    best first."""
    wanted = wanted_bytes(error)
    amount = "more memory" if wanted is None else show_bytes(wanted)
    place = "in host memory" if device == "cpu" else "on its GPU"
    if remedies:
        advice = f"try {' or '.join(remedies)}; more advice is"
    else:
        advice = "advice is"
    problem = f"it asked for {amount}, and {show_bytes(free_bytes(device))} are free {place}"
    return [
        f"{who} is out of memory: {problem}",
        f"{advice} in docs/troubleshooting.md, under Memory",
    ]


def wanted_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    match = _WANTED.search(str(error))
    if match is None:
        return None
    power = "bkmgtpe".index(match[2][0].lower())
    return int(float(match[1]) * 1024**power)


def free_bytes(device: str) -> int:
    """What this process can still allocate. On a GPU it includes what the allocator caches, within
    its share."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - held
    return max(0, min(free, allowed)) + held - torch.cuda.memory_allocated()
