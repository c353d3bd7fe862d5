"""Defaults that fit the machine, the model and the batch size.

Owns counting this machine's GPUs and CPU cores. Only keys that the user did not set get such a default.
"""

import os
from collections.abc import Container
from contextlib import suppress

from rolepool.config.model_files import num_positions, read_model_file
from rolepool.config.schema import Config, divisor_near

MAX_CPU_SLOTS = 8
"""Most CPU processes that are used if the user does not set a number."""
HIDDEN = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES that are no GPU."""


def gpu_memories() -> list[int]:
    """The bytes of memory of each GPU of this machine, in the order of their numbers."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []


def num_gpus() -> int:
    """Number of GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    count, visible = len(gpu_memories()), os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, sum(name.strip() not in HIDDEN for name in visible.split(",")))


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_slots(device: str) -> int:
    """The default of trainer.n_gpus_per_node. On CPUs it is a power of two, because most batch sizes are divisible by
    one."""
    gpus = 0 if device == "cpu" else num_gpus()
    return gpus or 2 ** (min(num_cores(), MAX_CPU_SLOTS).bit_length() - 1)


def fitted_defaults(config: Config, set_keys: Container[str]) -> dict[str, int]:
    """Other defaults for the keys that are not in `set_keys` and whose defaults do not fit the other keys.

    The policy must have positions for both lengths. If neither is set, the prompt gets at most half of the positions.
    """
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    prompt_key, response_key = "data.max_prompt_length", "data.max_response_length"
    model, prompt, response = config.actor_rollout_ref.model, config.at(prompt_key), config.at(response_key)
    with suppress(ValueError, TypeError, AttributeError):  # not on disk, or it does not say how many positions it has
        positions = num_positions(read_model_file(model.path, model.override_config))
        room = positions - response if response_key in set_keys else positions // 2
        if prompt_key not in set_keys and room > 0:
            prompt = min(prompt, room)
        if positions > prompt:
            response = min(response, positions - prompt)
    fitted = {prompt_key: prompt, response_key: response}
    fitted[mini_batch] = divisor_near(config.data.train_batch_size, config.at(mini_batch))
    return {key: value for key, value in fitted.items() if key not in set_keys and value != config.at(key)}
