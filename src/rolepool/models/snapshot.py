"""Snapshots of models in training: copies in shared memory, which stay if the process dies.

Owns writing them. A complete snapshot looks like a role's folder of a checkpoint, so `load_trained`
reads it, with any number of ranks. Its files are written again for every snapshot, because new
pages of shared memory take longer than the copy itself.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rolepool.errors import logger, one_line
from rolepool.files import write_atomically
from rolepool.models.checkpoint import all_tensors, rank_state_text, snapshot_files
from rolepool.models.ranks import rank_and_count
from rolepool.models.training import TrainedModel


@dataclass(frozen=True)
class OpenFile:
    """A file in shared memory that stays open for the next snapshots."""

    path: Path
    shapes: dict[str, torch.Size]
    """The names and shapes of the parts of tensors that the file is for."""
    memory: Tensor
    """The bytes of the file."""
    copies: dict[str, Tensor]
    """The copies of the parts, as views of that memory."""
    inode: int

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file. Somebody may have removed or replaced it."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False


class SnapshotWriter:
    """Writes the snapshots of one rank. A GPU continues with other work while its memory is
    copied."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained
        self._files: dict[Path, OpenFile] = {}
        self._has_warned = False
        """Whether there was a warning since the last snapshot that could be written."""

    def write(self, folder: Path, number: int) -> bool:
        """Write the state. The snapshot is complete when the own files of all ranks have its
        number.

        Returns whether it could be written. If not, there is one warning, and the next snapshot is
        tried again.
        """
        try:
            self._write(folder, number)
        except (OSError, SafetensorError) as error:
            # Because the run ends, or by somebody; its keeper sees that.
            folder_of_run = folder.parents[1]
            is_removed = not folder_of_run.exists()
            if not (self._has_warned or is_removed):
                logger.warning(
                    "a snapshot is missing, because %s cannot be written: %s",
                    folder,
                    one_line(error),
                )
                self._has_warned = True
            return False
        self._has_warned = False
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
        tensors = all_tensors(self._trained)
        parts = own_parts(tensors)
        copies = self._copies_in(shard, tensors, parts)
        text = rank_state_text(self._trained, tensors, number)
        unpublished = own_file.with_suffix(".new")
        ready = write_atomically(unpublished, [text])

        def publish() -> None:
            with suppress(OSError):  # the folder is removed if its keeper dies or the run ends
                ready.replace(own_file)

        self._trained.copy_later(
            sources=list(parts.values()),
            copies=[copies[name] for name in parts],
            then=publish,
        )

    def _copies_in(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        parts: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The copies of these parts of tensors in a file, as views of its memory. If the file is
        for other parts, it is replaced."""
        shapes = {name: part.shape for name, part in parts.items()}
        file = self._files.get(path)
        if file is not None and file.shapes != shapes:
            self._close(file)
            file = None
        if file is None:
            file = self._new_file(path, tensors, parts)
            self._files[path] = file
        return file.copies

    def _new_file(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        parts: dict[str, Tensor],
    ) -> OpenFile:
        # Not the folders above these two, which are removed when the run ends.
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        offsets: dict[str, dict[str, tuple[int, ...]]] = {}
        copies: dict[str, Tensor] = {}
        for name, part in parts.items():
            offsets[name] = {"saved_offsets": _offset(tensors[name])}
            copies[name] = torch.empty(part.shape, dtype=part.dtype)
        # As torch.distributed.checkpoint reads it.
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
        try:
            save_file(copies, path, metadata=metadata)
        except BaseException:
            # A part of a file would take the room that the next snapshot needs.
            path.unlink(missing_ok=True)
            raise
        memory, views = _map_tensors(path, copies)
        # A GPU that continues with other work can copy to pinned memory only.
        if self._trained.device != "cpu":
            torch.cuda.cudart().cudaHostRegister(
                memory.data_ptr(),
                memory.numel(),
                0,
            )
        return OpenFile(
            path,
            shapes={name: part.shape for name, part in parts.items()},
            memory=memory,
            copies=views,
            inode=path.stat().st_ino,
        )

    def _close(self, file: OpenFile) -> None:
        """Release the memory of a file that is not written any more."""
        del self._files[file.path]
        if self._trained.device != "cpu":
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


def _map_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The memory of a safetensors file, and its tensors as views of that memory."""
    num_bytes = path.stat().st_size
    memory = torch.from_file(
        str(path),
        shared=True,
        size=num_bytes,
        dtype=torch.uint8,
    )
    # The file begins with the size of its header in 8 bytes. Then come the header and the tensors,
    # whose offsets count from the end of the header.
    header_size = int(memory[:8].view(torch.int64))
    start = 8 + header_size
    header_bytes = bytes(memory[8:start].numpy())
    header = json.loads(header_bytes)
    data = memory[start:]
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first, end = header[name]["data_offsets"]
        numbers = data[first:end].view(tensor.dtype)
        views[name] = numbers.view(tensor.shape)
    return memory, views
