"""Defaults that fit the machine, the model and the batch size.

Owns counting this machine's GPUs and CPU cores. Only keys that the user did not set get such a
default.
"""

import os
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any

from rolepool.config.model_files import num_positions, read_model_file
from rolepool.config.rollout_correction import PRESETS
from rolepool.config.rules import divisor_near

MAX_CPU_SLOTS = 8
"""Most CPU processes that are used if the user does not set a number."""
PROMPT_KEY = "data.max_prompt_length"
RESPONSE_KEY = "data.max_response_length"
MODEL_KEYS = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.override_config")
MINI_BATCH_KEY = "actor_rollout_ref.actor.ppo_mini_batch_size"
CORRECTION = "algorithm.rollout_correction"
PRESET_KEY = f"{CORRECTION}.preset"
SET_BY_PRESETS = tuple(
    f"{CORRECTION}.{name}" for name in sorted({key for keys in PRESETS.values() for key in keys})
)
FITTED_TO = {
    PROMPT_KEY: (*MODEL_KEYS, RESPONSE_KEY),
    RESPONSE_KEY: (*MODEL_KEYS, PROMPT_KEY),
    MINI_BATCH_KEY: ("data.train_batch_size",),
    "trainer.n_gpus_per_node": ("trainer.device",),
    **dict.fromkeys(SET_BY_PRESETS, (PRESET_KEY,)),
}
"""The keys that have such a default, and the keys that it depends on."""
HIDDEN = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES that are no GPU."""


def gpu_memories() -> list[int]:
    """The bytes of memory of each GPU of this machine, in the order of their numbers."""
    import pynvml

    try:
        pynvml.nvmlInit()
        memories = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memories.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
        return memories
    except pynvml.NVMLError:
        return []


def num_gpus() -> int:
    """Number of GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    count = len(gpu_memories())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    num_visible = sum(name.strip() not in HIDDEN for name in visible.split(","))
    return min(count, num_visible)


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_slots(device: str) -> int:
    """The default of trainer.n_gpus_per_node. On CPUs it is a power of two, because most batch
    sizes are divisible by one."""
    if device != "cpu":
        num_devices = num_gpus()
        if num_devices:
            return num_devices
    num_processes = min(num_cores(), MAX_CPU_SLOTS)
    return int(2 ** (num_processes.bit_length() - 1))


def fitted_defaults(
    read: Callable[[str], Any],
    set_keys: Container[str],
) -> dict[str, object]:
    """Other defaults for the keys that are not in `set_keys` and whose defaults do not fit the
    other keys. `read` returns the value of a key, which nobody has checked yet: nothing is fitted
    to a wrong one."""
    fitted: dict[str, object] = {}
    with suppress(ValueError, TypeError, AttributeError):
        # The model may not be on disk, or not say how many positions it has.
        fitted.update(_fitted_lengths(read, set_keys))
    with suppress(ValueError, TypeError):
        batch_size = read("data.train_batch_size")
        mini_batch_size = read(MINI_BATCH_KEY)
        fitted[MINI_BATCH_KEY] = divisor_near(batch_size, mini_batch_size)
    preset = PRESETS.get(str(read(PRESET_KEY)), {})
    for name, value in preset.items():
        fitted[f"{CORRECTION}.{name}"] = value
    changed: dict[str, object] = {}
    for key, value in fitted.items():
        if key not in set_keys and value != read(key):
            changed[key] = value
    return changed


def _fitted_lengths(
    read: Callable[[str], Any],
    set_keys: Container[str],
) -> dict[str, int]:
    """The policy must have positions for both lengths. If neither is set, the prompt gets at most
    half of the positions."""
    path, override_config = map(read, MODEL_KEYS)
    model_file = read_model_file(path, override_config)
    positions = num_positions(model_file)
    prompt: int = read(PROMPT_KEY)
    response: int = read(RESPONSE_KEY)
    room = positions // 2
    if RESPONSE_KEY in set_keys:
        room = positions - response
    if PROMPT_KEY not in set_keys and room > 0:
        prompt = min(prompt, room)
    if positions > prompt:
        response = min(response, positions - prompt)
    return {PROMPT_KEY: prompt, RESPONSE_KEY: response}
