"""Snapshots of models in training: copies in shared memory, which stay if the process dies.

Owns writing them. A complete snapshot looks like a role's folder of a checkpoint, so `load_trained`
reads it, with any number of ranks. Its files are written again for every snapshot, because new
pages of shared memory take longer than the copy itself. The first snapshot is written by a thread
while the first responses are generated, and then the memory of the second one is allocated.
Therefore all snapshots have the same tensors, also before the first update: optimizer states that
do not exist yet are 0, which means the same to AdamW.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rolepool.errors import logger, one_line
from rolepool.files import write_atomically
from rolepool.models.checkpoint import (
    all_tensors,
    future_states,
    rank_state_text,
    snapshot_files,
)
from rolepool.models.ranks import rank_and_count
from rolepool.models.shared_files import SharedFile, form_of
from rolepool.models.training import TrainedModel


class SnapshotWriter:
    """Writes the snapshots of one rank. A GPU continues with other work while its memory is
    copied."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained
        self._files: dict[Path, SharedFile] = {}
        self._has_warned = False
        """Whether there was a warning since the last snapshot that could be written."""

    def write(self, folder: Path, number: int, next_folder: Path | None = None) -> bool:
        """Write the state. The snapshot is complete when the own files of all ranks have its
        number. Until then, the memory of the snapshot in `next_folder` is allocated, if it has
        none.

        Returns False if it cannot be written. Then there is one warning, and the next snapshot is
        tried again.
        """
        try:
            self._write(folder, number)
        except OSError as error:
            self._warn(folder, error)
            return False
        if next_folder is not None:
            with suppress(OSError):  # the next snapshot tries it again, and says what is wrong
                self._prepare(next_folder)
        return True

    def _write(self, folder: Path, number: int) -> None:
        self._trained.wait_for_copies()
        for file in list(self._files.values()):
            if not file.is_current:
                self._close(file)
        rank, num_ranks = rank_and_count()
        shard, own_file = snapshot_files(folder, rank, num_ranks)
        # From now on, the earlier snapshot in this folder is not complete.
        own_file.unlink(missing_ok=True)
        existing = all_tensors(self._trained)
        # All snapshots have the same tensors, because another file would need other memory.
        tensors = {**existing, **future_states(self._trained)}
        file = self._file_at(shard, tensors)
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        for name, part in own_parts(tensors).items():
            if name in existing:
                sources.append(part)
                copies.append(file.copies[name])
                file.blank.discard(name)
            else:
                file.zero(name)
        text = rank_state_text(self._trained, tensors, number)
        unpublished = own_file.with_suffix(".new")
        ready = write_atomically(unpublished, [text])

        def publish() -> None:
            with suppress(OSError):  # the folder is removed if its keeper dies or the run ends
                ready.replace(own_file)
                self._has_warned = False

        prepare = None if self._is_ready(file) else partial(self._make_ready, file, folder)
        self._trained.copy_later(sources, copies, publish, prepare)

    def _prepare(self, folder: Path) -> None:
        """Allocate the memory of a snapshot in this folder in the background."""
        shard, _ = snapshot_files(folder, *rank_and_count())
        if shard not in self._files:
            tensors = {**all_tensors(self._trained), **future_states(self._trained)}
            self._file_at(shard, tensors).allocate_in_background()

    def _file_at(self, path: Path, tensors: Mapping[str, Tensor]) -> SharedFile:
        """The file for this rank's parts of tensors. If it is for other parts, it is replaced."""
        parts = own_parts(tensors)
        form = form_of(parts)
        file = self._files.get(path)
        if file is not None and file.form == form:
            return file
        if file is not None:
            self._close(file)
        # Not the folders above these two, which are removed when the run ends.
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        offsets: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in parts:
            offsets[name] = {"saved_offsets": _offset(tensors[name])}
        # As torch.distributed.checkpoint reads it.
        metadata = {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
        file = SharedFile(path, form, metadata)
        self._files[path] = file
        return file

    def _is_ready(self, file: SharedFile) -> bool:
        """Whether copying can begin at once."""
        # A GPU that continues with other work can copy to pinned memory only.
        return file.is_allocated and (file.is_registered or self._trained.device == "cpu")

    def _make_ready(self, file: SharedFile, folder: Path) -> bool:
        """Allocate what the file still needs. Returns whether there was room."""
        try:
            file.allocate()
        except OSError as error:
            # A part of a file would take the room that the next snapshot needs.
            file.remove()
            self._warn(folder, error)
            return False
        if self._trained.device != "cpu":
            memory = file.memory
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            file.is_registered = True
        return True

    def _warn(self, folder: Path, error: OSError) -> None:
        """Say once that a snapshot is missing."""
        # Because the run ends, or by somebody; its keeper sees that.
        is_removed = not folder.parents[1].exists()
        if self._has_warned or is_removed:
            return
        logger.warning(
            "a snapshot is missing, because %s cannot be written: %s", folder, one_line(error)
        )
        self._has_warned = True

    def _close(self, file: SharedFile) -> None:
        """Release the memory of a file that is not written any more."""
        del self._files[file.path]
        file.close()
        if file.is_registered:
            torch.cuda.cudart().cudaHostUnregister(file.memory.data_ptr())


@torch.no_grad()
def own_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank writes: its shards, if it is the first of its replicas, and on rank 0 what is
    not sharded."""
    parts: dict[str, Tensor] = {}
    rank, _ = rank_and_count()
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if rank == 0:
                parts[name] = tensor
            continue
        if not _is_first_replica(tensor):
            continue
        local = tensor.to_local()
        if local.numel():
            parts[name] = local
    return parts


def _is_first_replica(tensor: DTensor) -> bool:
    """Whether no rank before this one has the same part of a tensor."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() or [0] * mesh.ndim
    for coordinate, placement in zip(place, tensor.placements, strict=True):
        is_replicated = isinstance(placement, Replicate)
        if is_replicated and coordinate > 0:
            return False
    return True


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """Where the part of a tensor that this rank holds begins in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,
        tensor.placements,
    )
    return tuple(offset)
