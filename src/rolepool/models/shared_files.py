"""Files of tensors in shared memory, which are written again and again in place.

Owns their format, which is that of safetensors, and how their memory is allocated. New pages of
shared memory take several times as long as a copy to pages that are there, so they are allocated in
pieces, which another thread can do beforehand. Does not know what the tensors are.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rolepool.errors import RolepoolError

PIECE_BYTES = 16 * 2**20
"""How much is allocated at once. A thread needs the interpreter's lock only between two pieces."""
_ALIGNMENT = 8
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of weights and buffers, as safetensors calls them."""

Form = dict[str, tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of tensors by name."""


def form_of(tensors: Mapping[str, Tensor]) -> Form:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


class SharedFile:
    """A file that stays open. Its numbers are 0 until they are written."""

    def __init__(self, path: Path, form: Form, metadata: Mapping[str, str]) -> None:
        """Make the file with its header. Its memory is not allocated yet. A file at this path is
        replaced."""
        header, places, data_bytes = _header_of(form, metadata)
        self.path = path
        self.form = form
        self.num_bytes = len(header) + data_bytes
        self.is_registered = False
        """Whether a GPU may copy to the memory while it continues with other work."""
        self._num_allocated = 0
        self._is_closed = False
        path.unlink(missing_ok=True)
        # Kept open, because memory is allocated for the open file, also if its name is removed.
        self._file = path.open("x+b", buffering=0)
        described = os.fstat(self._file.fileno())
        self._inode = described.st_ino
        self._file.write(header)
        self._file.truncate(self.num_bytes)
        self.memory = torch.from_file(
            str(path),
            shared=True,
            size=self.num_bytes,
            dtype=torch.uint8,
        )
        self.copies: dict[str, Tensor] = {}
        """The tensors, as views of the memory."""
        data = self.memory[len(header) :]
        for name, (shape, dtype) in form.items():
            first, end = places[name]
            numbers = data[first:end].view(dtype)
            self.copies[name] = numbers.view(shape)
        self.blank = set(form)
        """The names of tensors that are 0, because nobody has written them."""

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file. Somebody may have removed or replaced it."""
        try:
            return not self._is_closed and self.path.stat().st_ino == self._inode
        except OSError:
            return False

    @property
    def is_allocated(self) -> bool:
        return self._num_allocated >= self.num_bytes

    def allocate(self, *, with_pauses: bool = False) -> None:
        """Allocate the memory that is not allocated yet. Raises OSError if there is no room. With
        pauses, each piece is followed by a pause of the same length.

        Two threads may do so at the same time, and neither waits for the other: a piece that is
        allocated twice does not change.
        """
        while not (self.is_allocated or self._is_closed):
            began_s = time.monotonic()
            start = self._num_allocated
            size = min(PIECE_BYTES, self.num_bytes - start)
            # Not by writing to the memory, which would kill the process if there is no room, and not
            # by madvise, which stops other threads that allocate or free memory.
            os.posix_fallocate(self._file.fileno(), start, size)
            self._num_allocated = start + size
            if with_pauses:
                time.sleep(time.monotonic() - began_s)

    def allocate_in_background(self) -> None:
        """The same in a thread that takes at most half of a CPU. Without room, it gives back what
        it has."""

        def work() -> None:
            try:
                self.allocate(with_pauses=True)
            except OSError:
                self.remove()

        # The thread has pauses, and not a low priority. On a machine with too much work, a thread
        # of low priority would be stopped while it has the lock of the interpreter, and the whole
        # process would wait for it.

        # The process does not wait for it when it ends.
        threading.Thread(target=work, name="allocate shared memory", daemon=True).start()

    def zero(self, name: str) -> None:
        """Set a tensor to 0, if it is not."""
        if name not in self.blank:
            self.copies[name].zero_()
            self.blank.add(name)

    def close(self) -> None:
        """Stop allocating. The memory is released when nobody uses it any more."""
        self._is_closed = True

    def remove(self) -> None:
        """Remove the file, unless another one has taken its place."""
        if self.is_current:
            with suppress(OSError):
                self.path.unlink()
        self.close()


class _Header(NamedTuple):
    """The beginning of a file."""

    content: bytes
    places: dict[str, tuple[int, int]]
    """Where each tensor begins and ends, counted from the end of the header."""
    data_bytes: int
    """The size of all tensors."""


def _header_of(form: Form, metadata: Mapping[str, str]) -> _Header:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    places: dict[str, tuple[int, int]] = {}
    # Tensors of wide dtypes come first, so that all are aligned.
    by_width = sorted(form, key=lambda name: -form[name][1].itemsize)
    start = 0
    for name in by_width:
        shape, dtype = form[name]
        if dtype not in _DTYPE_NAMES:
            raise RolepoolError(f"{name} has the dtype {dtype}, which a snapshot cannot hold")
        end = start + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        places[name] = (start, end)
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    # The header begins with its own size.
    size = len(text).to_bytes(8, "little")
    return _Header(size + text, places, data_bytes=start)
