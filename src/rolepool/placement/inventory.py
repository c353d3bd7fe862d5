"""The GPUs that pools are placed on: how many each node has, and the memory of one.

Owns the spelling of `--inventory` and `--gpu-memory`, and reads the memory of this machine's GPUs.
"""

from __future__ import annotations

import re

from rolepool.config.run_keys import MAX_GPUS_PER_NODE, MAX_NODES, MAX_SLOTS
from rolepool.errors import ConfigError

UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def parse_inventory(text: str) -> tuple[int, ...]:
    """`8,8,4` GPUs per node; `1024x8` is 1024 nodes of 8."""
    matches = [re.fullmatch(r"\s*(?:(\d{1,6})x)?(\d{1,6})\s*", part) for part in text.split(",")]
    groups = [(int(match[1] or 1), int(match[2])) for match in matches if match is not None]
    num_nodes, num_gpus = sum(times for times, _ in groups), sum(times * gpus for times, gpus in groups)
    too_large = num_nodes > MAX_NODES or num_gpus > MAX_SLOTS or any(gpus > MAX_GPUS_PER_NODE for _, gpus in groups)
    if None in matches or num_gpus == 0 or too_large:
        raise ConfigError(
            f"--inventory {text!r}: write GPUs per node, such as 8,8,4, or 1024x8 for 1024 nodes of 8; at least 1 GPU "
            f"and at most {MAX_SLOTS}, on at most {MAX_NODES} nodes of at most {MAX_GPUS_PER_NODE} GPUs"
        )
    return tuple(gpus for times, gpus in groups for _ in range(times))


def parse_memory(text: str) -> int:
    """Bytes from `80`, `80GiB` or `141GB`. A number without a unit is in GiB."""
    match = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS or float(match[1]) == 0:
        raise ConfigError(f"--gpu-memory {text!r}: write the memory of one GPU, such as 80 (GiB), 80GiB or 141GB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def detect_gpu_memory() -> int | None:
    """Memory of the smallest GPU of this machine; None if it has no GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
    except pynvml.NVMLError:
        return None
