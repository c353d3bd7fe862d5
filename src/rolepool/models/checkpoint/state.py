"""A model in training, saved by all ranks of its pool and read back by any number of them.

Owns which tensors are saved under which names, and what must fit before anything is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rolepool.errors import ConfigError
from rolepool.models.checkpoint.index import RankIndex, SavedRole, SavedTensor, rank_name, read_saved
from rolepool.models.checkpoint.rng import RngStates
from rolepool.models.checkpoint.shards import (
    dtype_called,
    dtype_name,
    header_problems,
    local_rows,
    read_rows,
    sync,
    write_rows,
)
from rolepool.models.training import TrainedModel

FILE_BYTES = 2**30
"""Size of a shard file: what a rank holds in host memory besides a model on a GPU."""

_SHOWN_PROBLEMS = 8
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_trained(trained: TrainedModel, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write weights, optimizer states, number of updates and random states into a new folder.

    Called by all ranks of the pool, each of which writes its own shards; replicas and tied weights are written once.
    The folder is whole when the last rank has returned, which the caller waits for before it is published.
    """
    rank, num_ranks = _rank_and_count()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder}: not empty; a checkpoint is saved into a new folder")
    if dist.is_initialized():
        dist.barrier()  # nobody writes before all have looked
    name = rank_name(rank, num_ranks)
    if rank == 0 and isinstance(trained.model, PreTrainedModel):
        _write(folder / "config.json", _hf_config(trained.model))
    index = RankIndex(
        rank=rank,
        num_ranks=num_ranks,
        num_updates=trained.num_updates,
        rng=RngStates.now(),
        model=write_rows(folder, f"model_{name}", _weights(trained.model), file_bytes),
        optimizer=write_rows(folder, f"optimizer_{name}", _optimizer_tensors(trained), file_bytes),
    )
    _write(folder / f"{name}.json", index.model_dump_json())
    sync(folder)


def load_trained(trained: TrainedModel, folder: Path) -> None:
    """Take over a saved state, whatever number of ranks and sharding it was saved under; each reads only its rows.

    Weights, optimizer states and number of updates are exact. Random states are restored when as many ranks load as
    saved; otherwise they stay as they were seeded. Everything is checked before anything is changed.
    """
    saved = read_saved(folder)
    weights, states = saved.tensors("model"), saved.tensors("optimizer")
    problems = [*header_problems(saved, "model"), *header_problems(saved, "optimizer")]
    problems = problems or [*_weight_problems(saved, weights, trained.model), *_state_problems(saved, states, trained)]
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        raise ConfigError([*problems[:_SHOWN_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])])

    trained.optimizer.state.clear()
    with trained.on_device(training=True), torch.no_grad():
        read_rows(saved, "model", {name: local_rows(tensor) for name, tensor in _weights(trained.model).items()})
        _make_states(trained, states)
        read_rows(saved, "optimizer", {name: local_rows(value) for name, value in _optimizer_tensors(trained).items()})
    trained.num_updates = saved.num_updates
    rank, num_ranks = _rank_and_count()
    if len(saved.ranks) == num_ranks:
        saved.ranks[rank].rng.restore()


def _rank_and_count() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by Hugging Face name; of names for the same parameter, the first."""
    # Reading the state dict also brings FSDP2 back to shards, where a forward pass left parameters whole.
    tensors = model.state_dict()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = names - {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def _parameters(trained: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters as the optimizer has them, and their names. It was given all of them, in order."""
    given = [parameter for group in trained.optimizer.param_groups for parameter in group["params"]]
    names = [name for name, _ in trained.model.named_parameters()]
    return zip(names, given, strict=True)


def _optimizer_tensors(trained: TrainedModel) -> dict[str, Tensor]:
    return {
        f"{name}/{state}": value
        for name, parameter in _parameters(trained)
        for state, value in trained.optimizer.state.get(parameter, {}).items()
    }


def _make_states(trained: TrainedModel, saved: Mapping[str, SavedTensor]) -> None:
    """Room for the saved states, as AdamW makes it: moments like the parameter, the step where it is computed."""
    for name, parameter in _parameters(trained):
        if (step := saved.get(f"{name}/step")) is not None:
            trained.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=dtype_called(step.dtype), device=trained.device),
                **{moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in _MOMENTS},
            }


def _weight_problems(saved: SavedRole, weights: Mapping[str, SavedTensor], model: nn.Module) -> Iterator[str]:
    tensors = _weights(model)
    for name, tensor in tensors.items():
        if name not in weights:
            yield f"{saved.folder}: {name} is missing; the model has it"
        else:
            yield from _misfit(saved, name, weights[name], tensor)
    yield from (_unexpected(saved, name, weights[name]) for name in weights if name not in tensors)


def _state_problems(saved: SavedRole, states: Mapping[str, SavedTensor], trained: TrainedModel) -> Iterator[str]:
    expected: set[str] = set()
    for name, parameter in _parameters(trained):
        of_this = {state: f"{name}/{state}" for state in ("step", *_MOMENTS)}
        expected.update(of_this.values())
        present = [state for state, key in of_this.items() if key in states]
        if not present:  # a parameter that has never had a gradient
            continue
        for state, key in of_this.items():
            if key not in states:
                yield f"{saved.folder}: {key} is missing; {', '.join(present)} of it is there"
            elif state != "step":
                yield from _misfit(saved, key, states[key], parameter)
            elif states[key].shape:
                yield f"{saved.folder / states[key].parts[0].file}: {key} is not one number"
    yield from (_unexpected(saved, key, states[key]) for key in states if key not in expected)


def _misfit(saved: SavedRole, name: str, there: SavedTensor, here: Tensor) -> Iterator[str]:
    shape, dtype = tuple(here.shape), dtype_name(here.dtype)
    if (there.shape, there.dtype) != (shape, dtype):
        path = saved.folder / there.parts[0].file
        yield f"{path}: {name} is {list(there.shape)} {there.dtype}, and the model has {list(shape)} {dtype}"


def _unexpected(saved: SavedRole, name: str, there: SavedTensor) -> str:
    return f"{saved.folder / there.parts[0].file}: {name} is saved, and the model has no such tensor"


def _hf_config(model: PreTrainedModel) -> str:
    """The model's configuration as it was built, the user's overrides and the class of the head included."""
    config = json.loads(model.config.to_json_string())
    own_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    return json.dumps({**config, "architectures": [own_class.__name__]}, indent=2)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
