"""The GPUs that a plan may use, as the command line writes them and as this machine has them.

Owns the form of `--inventory` and `--gpu-memory`.
"""

import re

from rolepool.config.fitting import gpu_memories
from rolepool.config.run_keys import MAX_GPUS_PER_NODE, MAX_NODES, MAX_SLOTS
from rolepool.errors import ConfigError

MEMORY_UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}


def parse_inventory(text: str) -> tuple[int, ...]:
    """`8,8,4` GPUs per node; `1024x8` is 1024 nodes of 8."""
    num_nodes = 0
    num_gpus = 0
    groups: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,6})x)?(\d{1,6})\s*", part)
        if match is None:
            raise _bad_inventory(text)
        times = int(match[1] or 1)
        gpus = int(match[2])
        if gpus > MAX_GPUS_PER_NODE:
            raise _bad_inventory(text)
        num_nodes += times
        num_gpus += times * gpus
        groups.append((times, gpus))
    if num_gpus == 0 or num_nodes > MAX_NODES or num_gpus > MAX_SLOTS:
        raise _bad_inventory(text)
    # The nodes are listed only now, because there may be far too many of them.
    gpus_per_node: list[int] = []
    for times, gpus in groups:
        gpus_per_node += [gpus] * times
    return tuple(gpus_per_node)


def _bad_inventory(text: str) -> ConfigError:
    form = "write GPUs per node, such as 8,8,4, or 1024x8 for 1024 nodes of 8; at least 1 GPU"
    limits = (
        f"at most {MAX_SLOTS}, on at most {MAX_NODES} nodes of at most {MAX_GPUS_PER_NODE} GPUs"
    )
    return ConfigError(f"--inventory {text!r}: {form} and {limits}")


def parse_memory(text: str) -> int:
    """Bytes from `80`, `80GiB` or `141GB`. A number without a unit is in GiB."""
    number = 0.0
    unit = ""
    match = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    if match is not None:
        number = float(match[1])
        unit = match[2].lower()
    if number == 0 or unit not in MEMORY_UNITS:
        raise ConfigError(
            f"--gpu-memory {text!r}: write the memory of one GPU, such as 80 (GiB), 80GiB or 141GB"
        )
    return int(number * MEMORY_UNITS[unit])


def detect_gpu_memory() -> int | None:
    """Memory of the smallest GPU of this machine; None if it has no GPU."""
    return min(gpu_memories(), default=None)
