"""DataProto: the batch that moves between the driver, the workers and their roles.

Owns one class with three parts that have the same rows: `batch` (tensors), `non_tensor_batch`
(numpy arrays, mostly of Python objects) and `meta_info` (about the batch as a whole). The names and
their meaning are those of verl's `verl.protocol`, so that code written for it keeps working; the
code is ours.

What operations share and what they copy: containers (the TensorDict, the two dicts) are new in
every result, so adding or removing a key of a result never changes its source. `select`, `slice`,
`chunk`, `split` and integer indexing share tensors and arrays with the source; operations that
gather or join rows copy them (`select_idxs`, `repeat`, `concat`, `padding`). `union`, `pop`,
`rename`, `reorder`, `padding` and `to` change the batch they are called on.

Columns with a number per token are ragged (see `columns`); `to_padded` makes the padded columns
that verl's code reads.

Does not know processes or files: `encoding` turns a batch into shared-memory buffers or into a
file.
"""

from __future__ import annotations

import builtins
import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, SupportsIndex, TypeVar, cast, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase
from torch.utils.data import DataLoader, Dataset

from rolepool.errors import DataError, logger
from rolepool.protocol import columns as operations
from rolepool.protocol.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
    TOKENS,
    Array,
    Arrays,
    Column,
    Columns,
    MetaInfo,
    flat_values,
    is_ragged,
    pad_ragged,
)
from rolepool.protocol.encoding import Encoded, encode, load_parts, save_parts

AUTO_PADDING_KEY = "_rolepool_auto_padding"
TENSORDICT_KEY = "_rolepool_tensordict"

Keys = str | Sequence[str] | None
Device = torch.device | str | int | None
RowSelection = slice | Sequence[int] | Sequence[bool] | torch.Tensor | Array
"""Row numbers, or a bool mask of the rows."""
Objects = dict[str, Any]
"""Objects by key. Whoever reads one knows its type."""
Reduced = tuple[object, ...]
"""What pickle calls and with which arguments."""
Entry = TypeVar("Entry")
Decoded = TypeVar("Decoded")


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto: tensors without the batch dimension, the objects themselves, the
    batch's meta_info."""

    batch: Any = None
    non_tensor_batch: Objects = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)
    ragged_keys: frozenset[str] = frozenset()  # `collate_fn` makes these ragged again

    def __reduce_ex__(self, protocol: SupportsIndex) -> Reduced:
        parts = (self.batch, self.non_tensor_batch, self.meta_info, self.ragged_keys)
        return _restore, (type(self), encode(parts))


@dataclass(eq=False)
class DataProto:
    """Rows of tensors (`batch`, a flat TensorDict or None) and arrays (`non_tensor_batch`), with
    `meta_info`.

    If `non_tensor_batch` or `meta_info` is None, it becomes an empty dict.
    """

    batch: Any = None
    """A TensorDict or None. It is typed as Any so that readers need no check for None."""
    non_tensor_batch: Arrays = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    auto_padding: ClassVar[bool] = False
    """If True, every batch may be padded to a size that the ranks divide."""

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        self.check_consistency()

    # --- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Iterable[object]] | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """A batch of these tensors and arrays. The first `num_batch_dims` dimensions of all tensors
        must be equal.

        Non-tensors that are not arrays (usually lists) become 1-d object arrays with one entry per
        row.
        """
        non_tensors = non_tensors or {}
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise DataError(
                f"num_batch_dims is {num_batch_dims}; it is at least 1, and 1 with {list(non_tensors)}"
            )
        batch = None
        if tensors:
            _check_tensors(tensors)
            sizes: dict[str, tuple[int, ...]] = {}
            for key, tensor in tensors.items():
                sizes[key] = tuple(tensor.shape[:num_batch_dims])
            batch_size = next(iter(sizes.values()))
            have_one_size = set(sizes.values()) == {batch_size}
            if not have_one_size or len(batch_size) < num_batch_dims:
                raise DataError(
                    f"the tensors need {num_batch_dims} batch dimensions of equal sizes, not {sizes}"
                )
            batch = TensorDict(dict(tensors), batch_size)
        arrays: Arrays = {}
        for key, value in non_tensors.items():
            if isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                # Not np.array, which would make an array with two dimensions of equally long lists.
                arrays[key] = np.fromiter(value, object)
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[AUTO_PADDING_KEY] = True
        return cls(batch, arrays, meta_info)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Column],
        batch_size: Sequence[int] | None,
        meta_info: MetaInfo,
        device: Device = None,
    ) -> DataProto:
        """A batch of tensors and arrays. If `batch_size` is None, it has no tensors."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: Arrays = {}
        for key, column in columns.items():
            if isinstance(column, torch.Tensor):
                tensors[key] = column
            else:
                arrays[key] = column
        if batch_size is None:
            return cls(None, arrays, meta_info)
        batch = TensorDict(tensors, batch_size, device=device)
        return cls(batch, arrays, meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, object],
        meta_info: MetaInfo | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """A batch of one dict of tensors and numpy arrays."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: Arrays = {}
        wrong: dict[str, str] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                wrong[key] = type(value).__name__
        if wrong:
            raise DataError(f"from_single_dict takes tensors and numpy arrays, not {wrong}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """The batch in a TensorDict. Its NonTensorStacks become non_tensor_batch, and its
        NonTensorData meta_info."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: Arrays = {}
        meta = dict(meta_info or {})
        entries = {} if tensor_dict is None else dict(tensor_dict.items())
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorStack):
                arrays[key] = np.fromiter(value.tolist(), object)
            elif isinstance(value, NonTensorData):
                meta |= operations.additions(meta, {key: value.data})
            else:
                raise DataError(
                    f"{key!r} is a {type(value).__name__}; a batch is flat: tensor_dict.flatten_keys('.')"
                )
        return cls.from_dict(tensors, arrays, meta, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict that shares the tensors. Arrays become NonTensorStacks, and meta_info
        NonTensorData.

        Converted back, all arrays hold objects.
        """
        clash = sorted(self.columns().keys() & self.meta_info.keys())
        if clash:
            raise DataError(
                f"a TensorDict has one value per key, but these are in meta_info too: {clash}"
            )
        if self.batch is None:
            result = TensorDict({}, [len(self)])
        else:
            result = self.batch.clone(recurse=False)
        for key, array in self.non_tensor_batch.items():
            if len(array):
                rows = [NonTensorData(row) for row in array]
                stack = NonTensorStack(*rows)
            else:
                stack = NonTensorStack(batch_size=[])
            result.set(key, stack)
        for key, value in self.meta_info.items():
            result.set_non_tensor(key, value)
        return result

    # --- size, checks -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for array in self.non_tensor_batch.values():
            return len(array)
        return 0

    def columns(self) -> Columns:
        """The tensors and arrays by key, in a new dict."""
        tensors: Columns = {} if self.batch is None else dict(self.batch.items())
        clash = tensors.keys() & self.non_tensor_batch.keys()
        if clash:
            names = sorted(clash)
            raise DataError(f"these keys are both in batch and in non_tensor_batch: {names}")
        return {**tensors, **self.non_tensor_batch}

    def like(
        self,
        columns: Columns,
        num_rows: int,
        meta_info: MetaInfo | None = None,
    ) -> DataProto:
        """A batch with other columns and that many rows. Its type, device and meta_info are those
        of this batch."""
        if meta_info is None:
            meta_info = dict(self.meta_info)
        if self.batch is None:
            return type(self).from_columns(columns, None, meta_info)
        batch_size = [num_rows, *self.batch.batch_size[1:]]
        return type(self).from_columns(columns, batch_size, meta_info, self.batch.device)

    def check_consistency(self) -> None:
        """Raise a DataError if the parts do not have the same rows or hold the wrong types."""
        if self.batch is not None:
            if not isinstance(self.batch, TensorDictBase) or not self.batch.batch_size:
                raise DataError(
                    f"batch is a {type(self.batch).__name__}, not a TensorDict with rows (see from_dict)"
                )
            _check_tensors(self.batch)
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise DataError(
                    f"non_tensor_batch[{key!r}] is a {type(array).__name__}, not an array with rows"
                )
            if len(array) != len(self):
                shown = self._described()
                raise DataError(
                    f"non_tensor_batch[{key!r}] has {len(array)} rows, not {len(self)}: {shown}"
                )
        self.columns()

    def print_size(self, prefix: str = "") -> str:
        """Log and return how many bytes the tensors and arrays take. An object counts as a
        reference (8 bytes)."""
        tensor_bytes = 0
        if self.batch is not None:
            tensor_bytes = sum(map(operations.num_bytes, self.batch.values()))
        array_bytes = sum(map(operations.num_bytes, self.non_tensor_batch.values()))
        tensors = f"batch {tensor_bytes / 2**20:.2f} MiB"
        arrays = f"non_tensor_batch {array_bytes / 2**20:.2f} MiB"
        text = f"{len(self)} rows, {tensors}, {arrays}"
        if prefix:
            text = f"{prefix}, {text}"
        logger.info(text)
        return text

    def get_data_info(self) -> str:
        """The keys, one in a line: columns with their shape, type and device, and `meta_info` with
        types."""
        lines = ["batch"]
        if self.batch is not None:
            for key, tensor in self.batch.items():
                lines.append(f"  {key}: {tuple(tensor.shape)} ({tensor.dtype}) {tensor.device}")
        lines.append("non_tensor_batch")
        for key, array in self.non_tensor_batch.items():
            lines.append(f"  {key}: ndarray{array.shape} ({array.dtype})")
        lines.append("meta_info")
        for key, value in self.meta_info.items():
            lines.append(f"  {key}: {type(value).__name__}")
        return "\n".join(lines)

    def is_padding_enabled(self) -> bool:
        """Whether a call may pad this batch to a size that its ranks divide."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY)) or type(self).auto_padding

    # --- rows ---------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: RowSelection) -> DataProto: ...

    def __getitem__(self, item: object) -> DataProtoItem | DataProto:
        """An int gives a DataProtoItem; a slice, list, array, tensor or bool mask of rows gives a
        DataProto."""
        if isinstance(item, torch.Tensor | np.ndarray | np.generic) and item.ndim == 0:
            item = item.item()
        if type(item) is not int:
            return self.select_idxs(item)
        num_rows = len(self)
        if item not in range(-num_rows, num_rows):
            raise operations.RowIndexError(f"the batch has {num_rows} rows; there is no row {item}")
        return self._item_at(item % num_rows)

    def _item_at(self, row: int) -> DataProtoItem:
        columns = operations.take_rows(self.columns(), builtins.slice(row, row + 1))
        tensors: Objects = {}
        objects: Objects = {}
        ragged_keys: set[str] = set()
        for key, column in columns.items():
            if is_ragged(column):
                ragged_keys.add(key)
                tensors[key] = flat_values(column)
            elif isinstance(column, torch.Tensor):
                tensors[key] = column[0]
            else:
                objects[key] = column[0]
        inner = None
        if self.batch is not None:
            inner = TensorDict(tensors, self.batch.batch_size[1:], device=self.batch.device)
        return DataProtoItem(inner, objects, dict(self.meta_info), frozenset(ragged_keys))

    def select_idxs(self, idxs: object) -> DataProto:
        """A copy of the rows with these numbers (list, array, tensor), or of those at which a bool
        mask is True."""
        rows = operations.rows_of(idxs, len(self))
        if isinstance(rows, builtins.slice):
            num_rows = rows.stop - rows.start
        else:
            num_rows = len(rows)
        columns = operations.take_rows(self.columns(), rows)
        return self.like(columns, num_rows)

    def slice(
        self,
        start: int | None = None,
        end: int | None = None,
        step: int | None = None,
    ) -> DataProto:
        """The rows from `start` to before `end`. They share memory with this batch if `step` is
        1."""
        return self.select_idxs(builtins.slice(start, end, step))

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` parts, in order, of one size; if padding is enabled, sizes that differ by one
        are possible."""
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            fix = "pad it with pad_dataproto_to_divisor, or enable auto_padding"
            raise DataError(f"{len(self)} rows cannot be split into {chunks} equal parts; {fix}")
        size, rest = divmod(len(self), chunks)
        # The first `rest` parts have one row more than the others.
        edges = [number * size + min(number, rest) for number in range(chunks + 1)]
        return [self.slice(start, end) for start, end in itertools.pairwise(edges)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, in order; the last one may be smaller."""
        if split_size < 1:
            raise DataError(f"a batch cannot be split into parts of {split_size} rows")
        starts = range(0, len(self), split_size)
        return [self.slice(start, start + split_size) for start in starts]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times, in the order 0 0 1 1 if `interleave` is true, else 0 1 0
        1."""
        rows = torch.arange(len(self))
        if interleave:
            return self.select_idxs(rows.repeat_interleave(repeat_times))
        return self.select_idxs(rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: object) -> DataProto:
        """Row i `repeat_times[i]` times, its copies next to each other."""
        num_rows = len(self)
        counts = torch.as_tensor(repeat_times).cpu()
        is_one_per_row = counts.shape == (num_rows,)
        if not is_one_per_row or counts.is_floating_point() or bool((counts < 0).any()):
            form = operations.describe(counts)
            raise DataError(
                f"sample_level_repeat takes {num_rows} counts, one integer per row, not {form}"
            )
        counts = counts.to(torch.int64)
        rows = torch.arange(num_rows).repeat_interleave(counts)
        return self.select_idxs(rows)

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> DataProto:
        """`n_split` rows for every row: `split_keys` are split along their second dimension, other
        columns repeated."""
        columns = self.repeat(n_split).columns()
        to_split = _picked(self.columns(), _as_list(split_keys), "the batch")
        for key, column in to_split.items():
            has_second_dim = not is_ragged(column) and column.ndim >= 2
            if n_split < 1 or not has_second_dim or column.shape[1] % n_split:
                form = f"dense columns with a second dimension that {n_split} divides"
                raise DataError(
                    f"unfold_column_chunks splits {form}; {key!r} is {operations.describe(column)}"
                )
            width = column.shape[1] // n_split
            other_dims = column.shape[2:]
            columns[key] = column.reshape(-1, width, *other_dims)
        return self.like(columns, len(self) * n_split)

    def reorder(self, indices: object) -> None:
        """Put the rows in this order, a permutation of the row numbers. Changes this batch."""
        num_rows = len(self)
        all_rows = torch.arange(num_rows)
        rows = all_rows[operations.rows_of(indices, num_rows)]
        if not torch.equal(rows.sort().values, all_rows):
            raise DataError(
                f"reorder needs every one of {num_rows} rows once; got {len(rows)} row numbers"
            )
        self._replace_with(self.select_idxs(rows))

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append `padding_size` copies of the "first" or the "last" row. Changes this batch."""
        # The default of verl is "", which means the last row.
        if padding_candidate not in ("", "first", "last"):
            raise DataError(
                f"padding_candidate is {padding_candidate!r}; it must be 'first' or 'last'"
            )
        num_rows = len(self)
        if padding_size < 0 or (padding_size and num_rows == 0):
            raise DataError(
                f"{padding_size} rows of padding cannot be appended to {num_rows} rows ({self._keys()})"
            )
        candidate = 0 if padding_candidate == "first" else num_rows - 1
        own_rows = torch.arange(num_rows)
        padding_rows = torch.full((padding_size,), candidate)
        self._replace_with(self.select_idxs(torch.cat([own_rows, padding_rows])))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all batches, one after another. All batches must have the same keys.

        `meta_info` entries must be equal in all batches that have them, except `metrics`: those
        dicts (or lists of dicts), one per rank, become one dict of lists.
        """
        if not data:
            raise DataError("nothing to concatenate: the list of batches is empty")
        first_form = data[0]._form()
        for number, part in enumerate(data[1:], start=1):
            form = part._form()
            if form != first_form:
                raise DataError(
                    f"batches 0 and {number} have different keys or batch dimensions: "
                    f"{first_form}, {form}"
                )
        meta_info = operations.merge_meta_info([part.meta_info for part in data])
        columns = operations.join_rows([part.columns() for part in data])
        num_rows = sum(map(len, data))
        return data[0].like(columns, num_rows, meta_info)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows, for `epochs` epochs. Rows are in order unless
        they are shuffled.

        `dataloader_kwargs` are passed to torch's DataLoader (for example `{"shuffle": True}`), and
        `seed` seeds its generator, so the order is that of a DataLoader over the rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataError(
                f"{len(self)} rows cannot be split into mini-batches of {mini_batch_size}"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options = {**(dataloader_kwargs or {}), "collate_fn": list, "generator": generator}
        # torch accepts anything that has a length and items.
        row_numbers = cast("Dataset[list[int]]", range(len(self)))
        loader: DataLoader[list[int]] = DataLoader(row_numbers, mini_batch_size, **options)

        def mini_batches() -> Iterator[DataProto]:
            for _ in range(epochs):
                for rows in loader:
                    yield self.select_idxs(rows)

        # A generator of its own, so that a wrong size is reported by the call.
        return mini_batches()

    # --- keys ---------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these keys. None selects all keys of a part, and [] none. The tensors are shared
        unless `deepcopy`."""
        tensors = _picked(self.batch, batch_keys, "batch")
        arrays = _picked(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta_info = _picked(self.meta_info, meta_info_keys, "meta_info")
        selected = self.like({**tensors, **arrays}, len(self), meta_info)
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> DataProto:
        """Remove these keys from this batch and return a batch of them. None removes nothing.
        Changes this batch."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        if popped.batch is not None:
            for key in popped.batch.keys():  # noqa: SIM118  # it is not a dict
                del self.batch[key]
        for key in popped.non_tensor_batch:
            del self.non_tensor_batch[key]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename keys of the tensors and arrays, pair by pair. Changes this batch and returns
        it."""
        old = _as_list(old_keys)
        new = _as_list(new_keys)
        columns = self.columns()
        moved = _picked(columns, old, "the batch")
        for key in moved:
            del columns[key]
        taken = list(columns)
        names = [*taken, *new]
        has_duplicates = len(set(names)) < len(names)
        if len(moved) != len(new) or has_duplicates:
            reason = f"each needs one new name, and {taken} are taken"
            raise DataError(f"{old} cannot be renamed to {new}: {reason}")
        for new_key, column in zip(new, moved.values(), strict=True):
            columns[new_key] = column
        self._replace_with(self.like(columns, len(self)))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and meta_info of `other`. Changes this batch and returns it.

        If a key is in both, its values must be equal; if they are not, nothing is changed. Added
        tensors are shared.
        """
        own_keys = self._keys()
        other_keys = other._keys()
        if own_keys and other_keys and len(self) != len(other):
            mine = f"{len(self)} rows ({own_keys})"
            theirs = f"{len(other)} ({other_keys})"
            raise DataError(f"a union needs equally many rows, not {mine} and {theirs}")
        meta_info = self.meta_info | operations.additions(self.meta_info, other.meta_info)
        arrays = operations.union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if other.batch is not None:
            tensors = self.batch
            if tensors is None:
                tensors = TensorDict({}, other.batch.batch_size, device=other.batch.device)
            self.batch = operations.union_tensor_dict(tensors, other.batch)
        self.non_tensor_batch = arrays
        self.meta_info = meta_info
        return self

    # --- forms --------------------------------------------------------------------------------------------------

    def to_padded(
        self,
        prompt_width: int | None = None,
        response_width: int | None = None,
        pad_token_id: int = 0,
    ) -> DataProto:
        """The same batch with dense tensors [rows, width] in place of its ragged columns.

        From `input_ids` and `num_prompt_tokens` it computes prompts (padded on the left), responses
        (on the right), both together as input_ids, attention_mask and position_ids, and a
        response_mask of ones if there is none yet. Other ragged columns hold a number per response
        token: they get zeros on the right. The default width is that of the longest row.
        """
        columns = self.columns()
        has_tokens = all(key in columns for key in TOKENS)
        if has_tokens and is_ragged(columns[INPUT_IDS]):
            columns |= self._padded_tokens(prompt_width, response_width, pad_token_id)
        for key, column in columns.items():
            if is_ragged(column):
                columns[key] = pad_ragged(column, response_width)
        return self.like(columns, len(self))

    def _padded_tokens(
        self,
        prompt_width: int | None,
        response_width: int | None,
        pad_token_id: int,
    ) -> Columns:
        """The columns of `to_padded` that are computed from the tokens."""
        prompts, responses = operations.split_tokens(self.batch)
        prompt_ids = pad_ragged(prompts, prompt_width, side="left", value=pad_token_id)
        response_ids = pad_ragged(responses, response_width, value=pad_token_id)

        is_prompt = pad_ragged(torch.ones_like(prompts), prompt_width, side="left")
        is_response = pad_ragged(torch.ones_like(responses), response_width)
        attention_mask = torch.cat([is_prompt, is_response], dim=1).long()
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)

        # The mask of several turns says which tokens the policy sampled, and must not be replaced.
        mask: torch.Tensor = self.batch.get(RESPONSE_MASK, is_response)
        if is_ragged(mask):
            mask = pad_ragged(mask, response_width)
        return {
            INPUT_IDS: torch.cat([prompt_ids, response_ids], dim=1),
            "prompts": prompt_ids,
            "responses": response_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            RESPONSE_MASK: mask.long(),
        }

    def to(self, device: Device) -> DataProto:
        """Move the tensors to a device. Changes this batch and returns it."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one safetensors file, completely or not at all. Non-tensors must be values that
        JSON can hold."""
        save_parts(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> DataProto:
        """The batch that `save_to_disk` wrote."""
        return cls(*load_parts(filepath))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Reduced:
        """Pickle as plain buffers (see `encoding`). The copy is on the CPU and does not share
        memory."""
        parts = (self.batch, self.non_tensor_batch, self.meta_info)
        return _restore, (type(self), encode(parts))

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, object]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        others = (self.non_tensor_batch, self.meta_info)
        arrays, meta_info = copy.deepcopy(others, memo)
        return type(self)(batch, arrays, meta_info)

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows, {self._described()}, meta_info={self.meta_info})"

    # --- helpers ------------------------------------------------------------------------------------------------

    def _keys(self) -> list[str]:
        return sorted(self.columns())

    def _form(self) -> tuple[list[str], torch.Size | None]:
        """The keys, and the batch dimensions after the rows: equal in batches that can be joined."""
        if self.batch is None:
            return self._keys(), None
        return self._keys(), self.batch.batch_size[1:]

    def _described(self) -> dict[str, str]:
        return {key: operations.describe(column) for key, column in self.columns().items()}

    def _replace_with(self, other: DataProto) -> None:
        self.batch = other.batch
        self.non_tensor_batch = other.non_tensor_batch


def _restore(cls: Callable[..., Decoded], encoded: Encoded) -> Decoded:
    return cls(*encoded.decode())


def tensordict_to_batch(value: object) -> object:
    """A TensorDict with rows as a batch that `batch_to_tensordict` recognizes. Other values are
    returned unchanged."""
    if not isinstance(value, TensorDictBase) or not value.batch_size:
        return value
    return DataProto.from_tensordict(value, {TENSORDICT_KEY: True}, len(value.batch_size))


def batch_to_tensordict(value: object) -> object:
    """The TensorDict that a batch was made of by `tensordict_to_batch`. Other values are returned
    unchanged."""
    if not isinstance(value, DataProto) or TENSORDICT_KEY not in value.meta_info:
        return value
    value.pop(meta_info_keys=TENSORDICT_KEY)
    return value.to_tensordict()


def _check_tensors(tensors: Mapping[str, object]) -> None:
    for key, value in tensors.items():
        is_dense = isinstance(value, torch.Tensor) and not value.is_nested
        if not is_dense and not is_ragged(value):
            needed = "a dense tensor or a nested one with layout=torch.jagged, untransposed (see also from_tensordict)"
            raise DataError(f"batch[{key!r}] is a {type(value).__name__}; it must be {needed}")


def _picked(
    part: Mapping[str, Entry] | None,
    keys: Keys,
    name: str,
) -> dict[str, Entry]:
    content = {} if part is None else dict(part.items())
    if keys is None:
        return content
    wanted = _as_list(keys)
    missing = [key for key in wanted if key not in content]
    if missing:
        raise DataError(f"{name} has no keys {missing}; it has {sorted(content)}")
    return {key: content[key] for key in wanted}


def _as_list(keys: Keys) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    return list(keys or [])
