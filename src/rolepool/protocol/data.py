"""DataProto: the batch that moves between the driver, the workers and their roles.

Owns one class with three parts that have the same rows: `batch` (tensors), `non_tensor_batch` (numpy arrays, mostly
of Python objects) and `meta_info` (about the batch as a whole). The names and their meaning are those of verl's
`verl.protocol`, so that code written for it keeps working; the code is ours.

What is shared and what is copied, for all operations: containers (the TensorDict, the two dicts) are new in every
result, so adding or removing a key of a result never changes its source. Tensors and arrays are shared with the
source by `select`, `slice`, `chunk`, `split` and integer indexing, and copied if rows are gathered or joined
(`select_idxs`, `repeat`, `concat`, `padding`). `union`, `pop`, `rename`, `reorder`, `padding` and `to` change the batch
they are called on.

Columns with a number per token are ragged (see `ragged`); `to_padded` makes the padded columns that verl's code reads.

Does not know processes: `encoding` turns a batch into shared-memory buffers, `storage` into a file.
"""

from __future__ import annotations

import builtins
import copy
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase
from torch.utils.data import DataLoader

from rolepool.errors import DataError
from rolepool.protocol import storage
from rolepool.protocol.columns import (
    Arrays,
    Column,
    Columns,
    RowIndex,
    common_size,
    describe,
    join_rows,
    merge_meta_info,
    new_batch,
    only_in_second,
    rows_of,
    take_rows,
    union_numpy_dict,
    union_tensor_dict,
    wrong_tensors,
)
from rolepool.protocol.encoding import Encoded, encode, object_array
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, flat_values, is_ragged, num_bytes, pad_ragged, padded_tokens

logger = logging.getLogger(__name__)

AUTO_PADDING_KEY = "_rolepool_auto_padding"

Keys = str | Sequence[str] | None


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto: tensors without the batch dimension, the objects themselves, the batch's meta_info."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    ragged_keys: frozenset[str] = frozenset()  # so that `collate_fn` makes these ragged again

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore, (type(self), encode((self.batch, self.non_tensor_batch, self.meta_info, self.ragged_keys)))


@dataclass(eq=False)
class DataProto:
    """Rows of tensors (`batch`, a flat TensorDict or None) and arrays (`non_tensor_batch`), with `meta_info`."""

    batch: Any = None  # TensorDict | None; Any spares every reader the None check
    non_tensor_batch: Arrays = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    auto_padding: ClassVar[bool] = False  # True: every batch may be padded to what the ranks divide

    def __post_init__(self) -> None:
        self.check_consistency()

    # --- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """A batch of these tensors and arrays; the first `num_batch_dims` dimensions of all tensors are equal.

        Non-tensors that are not arrays (lists, mostly) become 1-d object arrays, one entry per row.
        """
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise DataError(
                f"num_batch_dims is {num_batch_dims}; it is at least 1, and 1 with {list(non_tensors or ())}"
            )
        arrays = {
            key: value if isinstance(value, np.ndarray) else object_array(list(value))
            for key, value in (non_tensors or {}).items()
        }
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[AUTO_PADDING_KEY] = True
        batch = new_batch(tensors, common_size(tensors, num_batch_dims)) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], batch_size: Sequence[int] | None, meta_info: dict[str, Any], device: Any = None
    ) -> DataProto:
        """A batch of tensors and arrays; without a `batch_size` it has no tensors."""
        tensors = {key: column for key, column in columns.items() if isinstance(column, torch.Tensor)}
        arrays = {key: column for key, column in columns.items() if key not in tensors}
        return cls(None if batch_size is None else new_batch(tensors, batch_size, device), arrays, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """A batch of one dict of tensors and numpy arrays."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        if wrong := {k: type(v).__name__ for k, v in data.items() if k not in tensors and k not in arrays}:
            raise DataError(f"from_single_dict takes tensors and numpy arrays, not {wrong}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """A batch of a TensorDict: its NonTensorStacks become non_tensor_batch, its NonTensorData meta_info."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: Arrays = {}
        meta = dict(meta_info or {})
        for key, value in tensor_dict.items() if tensor_dict is not None else ():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorStack):
                arrays[key] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                meta |= only_in_second(meta, {key: value.data})
            else:
                raise DataError(f"{key!r} is a {type(value).__name__}; a batch is flat: tensor_dict.flatten_keys('.')")
        return cls.from_dict(tensors, arrays, meta, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: arrays as NonTensorStack (of objects, once back), meta_info as NonTensorData.

        Shares the tensors.
        """
        if clash := sorted(self.columns().keys() & self.meta_info.keys()):
            raise DataError(f"a TensorDict has one value per key, but these are in meta_info too: {clash}")
        result = TensorDict({}, [len(self)]) if self.batch is None else self.batch.clone(recurse=False)
        for key, array in self.non_tensor_batch.items():
            rows = [NonTensorData(row) for row in array]
            result.set(key, NonTensorStack(*rows) if rows else NonTensorStack(batch_size=[]))
        for key, value in self.meta_info.items():
            result.set_non_tensor(key, value)
        return result

    # --- size, checks -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def columns(self) -> Columns:
        """The tensors and arrays by key, in a new dict."""
        tensors: Columns = {} if self.batch is None else dict(self.batch.items())
        if clash := sorted(tensors.keys() & self.non_tensor_batch.keys()):
            raise DataError(f"these keys are both in batch and in non_tensor_batch: {clash}")
        return {**tensors, **self.non_tensor_batch}

    def like(self, columns: Mapping[str, Column], num_rows: int, meta_info: dict[str, Any] | None = None) -> DataProto:
        """A batch with other columns and that many rows. Its type, device and meta_info are those of this batch."""
        meta_info = dict(self.meta_info) if meta_info is None else meta_info
        if self.batch is None:
            return type(self).from_columns(columns, None, meta_info)
        batch_size = [num_rows, *self.batch.batch_size[1:]]
        return type(self).from_columns(columns, batch_size, meta_info, self.batch.device)

    def check_consistency(self) -> None:
        """Raise a DataError that names the keys if the parts do not have the same rows or hold the wrong types."""
        problems: list[str] = []
        if self.batch is not None:
            if not isinstance(self.batch, TensorDictBase):
                raise DataError(f"batch is a {type(self.batch).__name__}; it must be a TensorDict (see from_dict)")
            if not self.batch.batch_size:
                raise DataError(f"batch has no dimension of rows: batch_size is [] (keys {sorted(self.batch.keys())})")
            problems += wrong_tensors(dict(self.batch.items()))
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                problems.append(f"non_tensor_batch[{key!r}] is a {type(array).__name__}, not an array with rows")
            elif len(array) != len(self):
                first = "batch" if self.batch is not None else f"{next(iter(self.non_tensor_batch))!r}"
                problems.append(f"non_tensor_batch[{key!r}] has {len(array)} rows, but {first} has {len(self)}")
        if problems:
            raise DataError(problems)
        self.columns()

    def print_size(self, prefix: str = "") -> str:
        """Log, and return, how many bytes the tensors and arrays take (objects count as their references)."""
        parts = ({} if self.batch is None else self.batch, self.non_tensor_batch)
        sizes = [sum(map(num_bytes, part.values())) for part in parts]
        text = f"{len(self)} rows, batch {sizes[0] / 2**20:.2f} MiB, non_tensor_batch {sizes[1] / 2**20:.2f} MiB"
        text = f"{prefix}, {text}" if prefix else text
        logger.info(text)
        return text

    def is_padding_enabled(self) -> bool:
        """Whether a call may pad this batch to a size that its ranks divide (enabled for this batch, or for all)."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY)) or type(self).auto_padding

    # --- rows ---------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> Any:
        """An int gives a DataProtoItem; a slice, list, array, tensor or bool mask of rows gives a DataProto."""
        if isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 0:
            item = item.item()
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            (row,) = torch.arange(len(self))[rows_of([int(item)], len(self))].tolist()
            return self._item(row)
        return self._take(rows_of(item, len(self)))

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def select_idxs(self, idxs: Any) -> DataProto:
        """The rows with these numbers (list, array, tensor), or where this bool mask is True; copied."""
        return self._take(rows_of(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows from `start` to before `end`, sharing memory with this batch when `step` is 1."""
        return self._take(rows_of(builtins.slice(start, end, step), len(self)))

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` parts, in order. They are equal, or if padding is enabled, their sizes differ by at most one."""
        if chunks < 1:
            raise DataError(f"a batch cannot be split into {chunks} chunks")
        size, rest = divmod(len(self), chunks)
        if rest and not self.is_padding_enabled():
            raise DataError(
                f"{len(self)} rows cannot be split into {chunks} equal parts (see pad_dataproto_to_divisor)"
            )
        edges = [i * size + min(i, rest) for i in range(chunks + 1)]
        return [self.slice(start, end) for start, end in itertools.pairwise(edges)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, in order; the last one may be smaller."""
        if split_size < 1:
            raise DataError(f"a batch cannot be split into parts of {split_size} rows")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: 0 0 1 1 when interleaved, else 0 1 0 1."""
        if repeat_times < 0:
            raise DataError(f"rows cannot be repeated {repeat_times} times")
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Row i `repeat_times[i]` times, copies side by side (list, tuple, array or tensor of counts)."""
        counts = torch.as_tensor(repeat_times).cpu()
        if counts.shape != (len(self),) or counts.is_floating_point() or bool((counts < 0).any()):
            shape = tuple(counts.shape)
            raise DataError(f"sample_level_repeat takes {len(self)} counts, one per row, not {counts.dtype} of {shape}")
        return self._take(torch.arange(len(self)).repeat_interleave(counts.to(torch.int64)))

    def reorder(self, indices: Any) -> None:
        """Put the rows in this order, a permutation of the row numbers. Changes this batch."""
        rows = torch.arange(len(self))[rows_of(indices, len(self))]
        if not torch.equal(rows.sort().values, torch.arange(len(self))):
            raise DataError(f"reorder needs every one of {len(self)} rows once; got {len(rows)} row numbers")
        self._replace_with(self._take(rows))

    def padding(self, padding_size: int, padding_candidate: str = "first") -> None:
        """Append `padding_size` copies of the "first" or the "last" row. Changes this batch. See also `pad_rows`."""
        if padding_candidate not in ("", "first", "last"):  # verl's default is ""
            raise DataError(f"padding_candidate is {padding_candidate!r}; it must be 'first' or 'last'")
        if padding_size < 0:
            raise DataError(f"padding_size is {padding_size}; it must not be negative")
        if padding_size and len(self) == 0:
            raise DataError(f"an empty batch (keys {self._keys()}) has no row to pad with")
        candidate = len(self) - 1 if padding_candidate == "last" else 0
        rows = torch.cat([torch.arange(len(self)), torch.full((padding_size,), candidate)])
        self._replace_with(self._take(rows))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all batches, one after another; they need the same keys.

        `meta_info` entries must be equal in all batches that have them, except `metrics`: those dicts (or lists of
        dicts), one per rank, become one dict of lists.
        """
        if not data:
            raise DataError("nothing to concatenate: the list of batches is empty")
        first = data[0]
        for i, other in enumerate(data):
            if other._keys() != first._keys() or (other.batch is None) != (first.batch is None):
                raise DataError(f"batches 0 and {i} have different keys: {first._keys()} and {other._keys()}")
        inner = {tuple(part.batch.batch_size[1:]) for part in data if part.batch is not None}
        if len(inner) > 1:
            raise DataError(f"the batches differ in the batch dimensions after the first: {sorted(inner)}")
        meta_info = merge_meta_info([part.meta_info for part in data])
        return first.like(join_rows([part.columns() for part in data]), sum(map(len, data)), meta_info)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over; in order, or as `dataloader_kwargs` say.

        `dataloader_kwargs` are those of torch's DataLoader (`{"shuffle": True}`), and `seed` is its generator's, so
        the order is that of a DataLoader over the rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataError(f"{len(self)} rows cannot be split into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader[Any] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]  # anything with a length and items will do
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)

    # --- keys ---------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these keys; None means all of a part, [] none of it. The tensors are shared unless `deepcopy`."""
        tensors = _picked(self.batch, batch_keys, "batch")
        arrays = _picked(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = _picked(self.meta_info, meta_info_keys, "meta_info")
        selected = self.like({**tensors, **arrays}, len(self), meta_info)
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> DataProto:
        """Take these keys out of this batch and return them as one; None takes nothing. Changes this batch."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        for part, keys in (
            (self.batch, batch_keys),
            (self.non_tensor_batch, non_tensor_batch_keys),
            (self.meta_info, meta_info_keys),
        ):
            for key in _as_list(keys):
                del part[key]
        return popped

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename keys of the tensors and arrays, pair by pair. Changes this batch and returns it."""
        old, new = _as_list(old_keys), _as_list(new_keys)
        if len(old) != len(new):
            raise DataError(f"{len(old)} old keys {old} and {len(new)} new keys {new}: rename takes pairs")
        kept = self.columns()
        if missing := [key for key in old if key not in kept]:
            raise DataError(f"no keys {missing} to rename; there are {self._keys()}")
        moved = [kept.pop(key) for key in old]
        if taken := sorted({key for key in new if key in kept or new.count(key) > 1}):
            raise DataError(f"renaming {old} to {new} would give two columns the name {taken}")
        self._replace_with(self.like({**kept, **dict(zip(new, moved, strict=True))}, len(self)))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and meta_info of `other`. Changes this batch and returns it.

        Keys in both must hold equal values; nothing is changed when they do not. The added tensors are shared.
        """
        if self._keys() and other._keys() and len(self) != len(other):
            mine, theirs = f"{len(self)} rows ({self._keys()})", f"{len(other)} ({other._keys()})"
            raise DataError(f"a union needs equally many rows, not {mine} and {theirs}")
        meta_info = self.meta_info | only_in_second(self.meta_info, other.meta_info)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if self.batch is None:
            self.batch = None if other.batch is None else other.batch.clone(recurse=False)
        elif other.batch is not None:
            union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch, self.meta_info = arrays, meta_info
        return self

    # --- padded -------------------------------------------------------------------------------------------------

    def to_padded(
        self, prompt_width: int | None = None, response_width: int | None = None, pad_token_id: int = 0
    ) -> DataProto:
        """The same batch with dense tensors [rows, width] for its ragged columns, for code that reads padded ones.

        From `input_ids` and `num_prompt_tokens` come prompts (padded on the left), responses (on the right), both
        together as input_ids, attention_mask, position_ids and response_mask. Other ragged columns hold a number per
        response token: they get zeros on the right. A width that is not given is the longest row's.
        """
        columns = self.columns()
        if all(key in columns for key in TOKENS) and is_ragged(columns[INPUT_IDS]):
            columns.update(padded_tokens(columns, prompt_width, response_width, pad_token_id))
        padded = {key: pad_ragged(one, response_width) if is_ragged(one) else one for key, one in columns.items()}
        return self.like(padded, len(self))

    # --- where it lives -----------------------------------------------------------------------------------------

    def to(self, device: Any) -> DataProto:
        """Move the tensors to a device. Changes this batch and returns it."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all; non-tensors must be what JSON, numpy or torch can hold."""
        storage.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> DataProto:
        """The batch that `save_to_disk` wrote."""
        return cls(*storage.load(filepath))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as plain buffers (see `encoding`). The copy is on the CPU, and shares memory with nothing."""
        return _restore, (type(self), encode((self.batch, self.non_tensor_batch, self.meta_info)))

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        return type(self)(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    def __repr__(self) -> str:
        columns = {key: describe(column) for key, column in self.columns().items()}
        return f"DataProto({len(self)} rows, {columns}, meta_info={self.meta_info})"

    # --- helpers ------------------------------------------------------------------------------------------------

    def _keys(self) -> list[str]:
        return sorted(self.columns())

    def _take(self, rows: RowIndex) -> DataProto:
        num_rows = rows.stop - rows.start if isinstance(rows, builtins.slice) else len(rows)
        return self.like(take_rows(self.columns(), rows), num_rows)

    def _item(self, row: int) -> DataProtoItem:
        one = take_rows(self.columns(), builtins.slice(row, row + 1))
        ragged = {key: flat_values(column) for key, column in one.items() if is_ragged(column)}
        values = {key: ragged[key] if key in ragged else column[0] for key, column in one.items()}
        objects = {key: values.pop(key) for key in self.non_tensor_batch}
        batch = None if self.batch is None else new_batch(values, self.batch.batch_size[1:], self.batch.device)
        return DataProtoItem(batch, objects, dict(self.meta_info), frozenset(ragged))

    def _replace_with(self, other: DataProto) -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch


def _restore(cls: type[Any], encoded: Encoded) -> Any:
    return cls(*encoded.decode())


def _picked(part: Any, keys: Keys, name: str) -> dict[str, Any]:
    content: dict[str, Any] = {} if part is None else dict(part.items())
    if keys is None:
        return content
    if missing := [key for key in _as_list(keys) if key not in content]:
        raise DataError(f"{name} has no keys {missing}; it has {sorted(content)}")
    return {key: content[key] for key in _as_list(keys)}


def _as_list(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or [])
