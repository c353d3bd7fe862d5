"""Rows of tensors in safetensors files: a rank writes those it has, and reads those it needs.

Owns which rows of a sharded tensor are a rank's own. Sharding is on the first dimension; replicas are written once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rolepool.models.checkpoint.index import Kind, Rows, SavedRole, SavedTensor, ShardFile, num_rows_of

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Element types as a safetensors header and as torch calls them."""


class LocalRows(NamedTuple):
    """The rows of a tensor that are on this rank, sharing its memory, and whether it is this rank that writes them."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    writes: bool


def local_rows(tensor: Tensor) -> LocalRows:
    """This rank's rows of a tensor. One that is not sharded is on every rank, and rank 0 writes it."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    start, stop, writes = 0, num_rows_of(shape), True
    if not isinstance(tensor, DTensor):
        return LocalRows(tensor, shape, start, stop, writes=not dist.is_initialized() or dist.get_rank() == 0)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert sum(isinstance(placement, Shard) for placement in tensor.placements) <= 1
    for dim, (placement, place) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            # As torch.chunk cuts: equal pieces rounded up, so that the last may be short or empty.
            num_rows = -(-shape[0] // mesh.size(dim))
            start, stop = min(place * num_rows, shape[0]), min((place + 1) * num_rows, shape[0])
        else:
            assert placement.is_replicate()
            writes = writes and place == 0
    local = tensor.to_local()
    assert local.shape[0] == stop - start
    return LocalRows(local, shape, start, stop, writes=writes)


def write_rows(folder: Path, prefix: str, tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, ShardFile]:
    """This rank's rows into files of at most `max_bytes` or one tensor, which is what is copied to the host at once."""
    rows = {name: local_rows(tensor) for name, tensor in tensors.items()}
    mine = {name: part for name, part in rows.items() if part.writes and part.start < part.stop}
    files: dict[str, ShardFile] = {}
    for number, names in enumerate(by_bytes({name: part.tensor.nbytes for name, part in mine.items()}, max_bytes)):
        path = folder / f"{prefix}_{number:03d}.safetensors"
        save_file({name: mine[name].tensor.cpu().contiguous() for name in names}, path)
        sync(path)
        contents = {name: _rows_of(mine[name]) for name in names}
        files[path.name] = ShardFile(num_bytes=path.stat().st_size, tensors=contents)
    return files


def _rows_of(part: LocalRows) -> Rows:
    return Rows(shape=part.shape, dtype=dtype_name(part.tensor.dtype), start=part.start, stop=part.stop)


def by_bytes(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `max_bytes`, or of one."""
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + size > max_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def header_problems(saved: SavedRole, kind: Kind) -> Iterator[str]:
    """Where a file does not hold what its rank's index says."""
    for path, file in saved.files(kind):
        try:
            with safe_open(path, framework="pt") as handle:
                names = set(handle.keys())
                headers = {name: handle.get_slice(name) for name in file.tensors if name in names}
                found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in headers.items()}
        except (SafetensorError, OSError) as error:
            yield f"{path}: not a whole safetensors file ({error})"
            continue
        for name, rows in file.tensors.items():
            if name not in found:
                yield f"{path}: {name} is missing"
                continue
            shape, dtype = found[name]
            wanted = (rows.stop - rows.start, *rows.shape[1:]) if rows.shape else ()
            if shape != wanted or _DTYPES.get(dtype) != rows.dtype:
                yield f"{path}: {name} is {list(shape)} {dtype}, and the index says {list(wanted)} {rows.dtype}"


def read_rows(saved: SavedRole, kind: Kind, into: Mapping[str, LocalRows]) -> None:
    """Fill rows from the files that have them, reading no others."""
    for path, file in saved.files(kind):
        overlaps = {
            name: (max(rows.start, into[name].start), min(rows.stop, into[name].stop))
            for name, rows in file.tensors.items()
            if name in into
        }
        overlaps = {name: (start, stop) for name, (start, stop) in overlaps.items() if start < stop}
        if not overlaps:
            continue
        with safe_open(path, framework="pt") as handle:
            for name, (start, stop) in overlaps.items():
                rows, target = file.tensors[name], into[name]
                if not rows.shape:
                    target.tensor.copy_(handle.get_tensor(name))
                    continue
                source = handle.get_slice(name)[start - rows.start : stop - rows.start]
                target.tensor[start - target.start : stop - target.start].copy_(source)


def read_whole(saved: SavedRole, name: str, tensor: SavedTensor) -> Tensor:
    """A tensor put together."""
    whole = torch.empty(tensor.shape, dtype=dtype_called(tensor.dtype))
    for part in tensor.parts:
        with safe_open(saved.folder / part.file, framework="pt") as handle:
            rows = whole[part.start : part.stop] if tensor.shape else whole
            rows.copy_(handle.get_tensor(name))
    return whole


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """The dtype of a name in an index whose files were checked, so that there is one."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
