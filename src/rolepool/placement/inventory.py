"""What there is to place on: GPUs per node, and the memory of one.

Owns the spelling of `--inventory` and `--gpu-memory` and asking the driver library of this machine's GPUs.
"""

from __future__ import annotations

import re

from rolepool.config.run_keys import MAX_GPUS_PER_NODE, MAX_NODES, MAX_SLOTS
from rolepool.errors import ConfigError

UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def parse_inventory(text: str) -> tuple[int, ...]:
    """`8,8,4` GPUs per node; `1024x8` is 1024 nodes of 8."""
    nodes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,6})x)?(\d{1,6})\s*", part)
        if match is None:
            raise ConfigError(
                f"--inventory {text!r}: write GPUs per node, such as 8,8,4, or 1024x8 for 1024 nodes of 8"
            )
        times, num_gpus = int(match[1] or 1), int(match[2])
        if num_gpus > MAX_GPUS_PER_NODE or len(nodes) + times > MAX_NODES:
            raise ConfigError(f"--inventory {text!r}: at most {MAX_NODES} nodes of at most {MAX_GPUS_PER_NODE} GPUs")
        nodes.extend([num_gpus] * times)
    if sum(nodes) > MAX_SLOTS:
        raise ConfigError(f"--inventory {text!r}: holds {sum(nodes)} GPUs; at most {MAX_SLOTS}")
    if not any(nodes):
        raise ConfigError(f"--inventory {text!r}: holds no GPU; write GPUs per node, such as 8,8,4")
    return tuple(nodes)


def parse_memory(text: str) -> int:
    """Bytes from `80`, `80GiB` or `141GB`. A bare number is in GiB."""
    match = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS or float(match[1]) == 0:
        raise ConfigError(f"--gpu-memory {text!r}: write the memory of one GPU, such as 80 (GiB), 80GiB or 141GB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def detect_gpu_memory() -> int | None:
    """Memory of the smallest GPU of this machine; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
