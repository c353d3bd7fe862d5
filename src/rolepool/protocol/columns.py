"""The columns of a batch: dense tensors, ragged tensors and numpy arrays, which have one entry per
row.

Owns how rows are selected and joined, and when two values are equal. Ragged columns that share one
offsets tensor share the new one as well: by that object torch knows that their rows have the same
lengths, and allows such columns to be added or compared.

Ragged columns have rows of different lengths, stored as one flat tensor and the offsets at which
rows start. Owns the one form that such columns have, torch's jagged nested tensors whose second
dimension varies, and the conversion to padded tensors and back. torch itself can neither slice,
index nor join them along rows, and its own functions for making and reading them take ten times as
long as the functions here.

The tokens of a row are its prompt and its response: the ragged column `input_ids`, with
`num_prompt_tokens` of each row beside it. Position ids and masks are computed from the two, so they
are not sent. In a conversation with several turns the response is everything after the first
prompt, and the ragged column `response_mask` says which of its tokens the policy sampled. Without
that column it sampled all of them.

Does not know DataProto.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict.base import TensorDictBase
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # torch has no public name for it

from rolepool.errors import DataError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Ragged = NestedTensor
"""A ragged column."""
Column = Tensor | Array
"""A dense or ragged tensor, or an array."""
Columns = dict[str, Column]
MetaInfo = dict[str, Any]
"""What a batch says about itself as a whole. Whoever reads an entry knows its type."""
Entry = TypeVar("Entry")
RowIndex = slice | Tensor
"""A slice with step 1, or a 1-d int64 tensor of row numbers."""

INPUT_IDS = "input_ids"
NUM_PROMPT_TOKENS = "num_prompt_tokens"
RESPONSE_MASK = "response_mask"
LOSS_MASK = "loss_mask"
TOKENS = (INPUT_IDS, NUM_PROMPT_TOKENS)
MASKED_TOKENS = (*TOKENS, RESPONSE_MASK)
"""The columns of a method that must know which tokens were sampled. A batch without several turns
has no mask."""
TURN_SCORES = "turn_scores"
"""What an environment gave for a conversation: a ragged column with scores at the last tokens of
turns."""
ENVIRONMENT_SCORE = "environment_score"
"""The sum of a row's scores, which is NaN if the environment gave none."""


class RowIndexError(DataError, IndexError):
    """A row number that the batch does not have. It is also an IndexError, as Python expects of
    sequences."""


# Ragged columns


def is_ragged(column: object) -> TypeGuard[Ragged]:
    """Whether this is a ragged column. It is False for nested tensors that vary in another
    dimension."""
    return isinstance(column, NestedTensor) and column._ragged_idx == 1


def ragged(values: Tensor, lengths: Tensor) -> Ragged:
    """The column whose row i has the next `lengths[i]` of the values."""
    return ragged_from_parts(values, offsets_of(lengths.to(values.device)))


def ragged_from_parts(values: Tensor, offsets: Tensor) -> Ragged:
    """The column whose row i is `values[offsets[i] : offsets[i + 1]]`. Gradients do not pass
    through it."""
    return NestedTensor(values.detach(), offsets)


def ragged_parts(column: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a ragged column, without holes, and its offsets."""
    nested = cast(Ragged, column)
    # `torch.nested.narrow` makes columns with holes between the rows.
    if nested._lengths is not None:
        nested = cast(Ragged, nested.contiguous())
    return nested._values, nested._offsets


def flat_values(column: Tensor) -> Tensor:
    """The values of all rows, one after another."""
    return ragged_parts(column)[0]


def lengths_of(column: Tensor) -> Tensor:
    """The number of values of each row."""
    return ragged_parts(column)[1].diff()


def num_bytes(column: Column) -> int:
    """The bytes of a column's values: a ragged or dense tensor, or an array."""
    if is_ragged(column):
        column = flat_values(column)
    return int(column.nbytes)


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def places_of(offsets: Tensor, rows: slice | Tensor) -> tuple[slice | Tensor, Tensor]:
    """Where the values of these rows are (a slice if the rows are a slice), and the offsets of a
    column of them."""
    if isinstance(rows, slice):
        offsets_of_rows = offsets[rows.start : rows.stop + 1]
        first = offsets_of_rows[0]
        end = offsets_of_rows[-1]
        values = slice(int(first), int(end))
        return values, offsets_of_rows - first
    rows = rows.to(offsets.device)
    lengths = offsets.diff()[rows]
    new_offsets = offsets_of(lengths)
    # How far each value of a row is from where it will be.
    old_starts = offsets[:-1][rows]
    new_starts = new_offsets[:-1]
    shift_of_values = torch.repeat_interleave(old_starts - new_starts, lengths)
    new_places = torch.arange(len(shift_of_values), device=offsets.device)
    return shift_of_values + new_places, new_offsets


# Padded tensors


def pad_ragged(
    column: Tensor,
    width: int | None = None,
    *,
    side: Literal["left", "right"] = "right",
    value: float = 0,
) -> Tensor:
    """The column as [rows, width], with `value` on one side of shorter rows. The default width is
    the longest row's."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    if width is None:
        width = longest
    if longest > width:
        raise DataError(f"a row of {longest} tokens cannot be padded to {width}")
    padded = values.new_full((len(lengths), width, *values.shape[1:]), value)
    padded[_is_real(lengths, width, side)] = values
    return padded


def unpad(padded: Tensor, lengths: Tensor) -> Ragged:
    """The ragged column of the first `lengths[i]` entries of each row."""
    return ragged(padded[_is_real(lengths, padded.shape[1], "right")], lengths)


def _is_real(lengths: Tensor, width: int, side: Literal["left", "right"]) -> Tensor:
    places = torch.arange(width, device=lengths.device)
    if side == "right":
        return places < lengths[:, None]
    return places >= width - lengths[:, None]


def sampled_mask(response_mask: Tensor | None, num_response: Tensor) -> Tensor:
    """[rows, longest response]: the response tokens that the policy sampled, which are all of them
    if there is no such column."""
    if response_mask is not None:
        return pad_ragged(response_mask)
    return _is_real(num_response, int(num_response.max()), "right")


def split_tokens(batch: Mapping[str, Tensor]) -> tuple[Ragged, Ragged]:
    """The prompts and the responses of `input_ids`, as two ragged columns."""
    ids, offsets = ragged_parts(batch[INPUT_IDS])
    num_prompt = batch[NUM_PROMPT_TOKENS]
    lengths = offsets.diff()
    # For each token: where the prompt of its row ends.
    prompt_ends = offsets[:-1] + num_prompt
    prompt_end_of_token = torch.repeat_interleave(prompt_ends, lengths)
    places = torch.arange(len(ids), device=ids.device)
    is_prompt = places < prompt_end_of_token
    prompts = ragged(ids[is_prompt], num_prompt)
    responses = ragged(ids[~is_prompt], lengths - num_prompt)
    return prompts, responses


def rows_of_responses(batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """The tokens of each response."""
    _, responses = split_tokens(batch)
    return torch.split(flat_values(responses), lengths_of(responses).tolist())


# Rows


def rows_of(index: object, num_rows: int) -> RowIndex:
    """The rows, out of `num_rows`, that a slice, a list, array or tensor of row numbers, or a bool
    mask selects."""
    everything = np.arange(num_rows)
    if isinstance(index, slice):
        start, stop, step = index.indices(num_rows)
        if step == 1:
            return slice(start, max(start, stop))
        return torch.from_numpy(everything[index].copy())
    try:
        if isinstance(index, Tensor):
            rows = index.detach().cpu().numpy()
        else:
            rows = np.asarray(index)
        if rows.ndim == 1 and (rows.size == 0 or rows.dtype.kind in "biu"):
            if rows.size == 0 and rows.dtype != bool:
                # numpy makes an empty list an array of floats, which cannot be an index.
                rows = rows.astype(np.int64)
            return torch.from_numpy(everything[rows])
    except IndexError as error:
        raise RowIndexError(f"the batch has {num_rows} rows: {error}") from None
    except (TypeError, ValueError):
        pass  # nested lists of different lengths
    raise DataError(
        f"rows are selected by a 1-d index of integers or a bool mask, not by {index!r}"
    )


def take_rows(columns: Columns, rows: RowIndex) -> Columns:
    """These rows of every column. They are views if the rows are a slice, and copies if they are
    row numbers."""
    taken: Columns = {}
    # By the id of the offsets, because columns that share them must share the new ones.
    places: dict[int, tuple[RowIndex, Tensor, Tensor]] = {}
    for key, column in columns.items():
        if is_ragged(column):
            values, offsets = ragged_parts(column)
            if id(offsets) not in places:
                inside, new_offsets = places_of(offsets, rows)
                # The old offsets are kept alive, because their id is the key.
                places[id(offsets)] = (inside, new_offsets, offsets)
            inside, new_offsets, _ = places[id(offsets)]
            taken[key] = ragged_from_parts(values[inside], new_offsets)
        elif isinstance(rows, slice):
            taken[key] = column[rows]
        elif isinstance(column, Tensor):
            taken[key] = column[rows.to(column.device)]
        else:
            taken[key] = column[rows.numpy()]
    return taken


SharedOffsets = dict[tuple[int, ...], tuple[Tensor, Sequence[Tensor]]]
"""The offsets of joined columns by the ids of those that were joined, which are kept alive beside
them."""


def join_rows(parts: Sequence[Columns]) -> Columns:
    """A copy of the rows of all parts, one after another. The parts have the same keys."""
    joined: Columns = {}
    shared: SharedOffsets = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        try:
            joined[key] = _joined(columns, shared)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            forms = ", ".join(map(describe, columns))
            raise DataError(f"{key!r} cannot be concatenated: {forms}") from error
    return joined


def _joined(columns: Sequence[Column], shared: SharedOffsets) -> Column:
    """The column with the rows of these columns, which are all of one kind."""
    tensors: list[Tensor] = []
    arrays: list[Array] = []
    for column in columns:
        if isinstance(column, Tensor):
            tensors.append(column)
        else:
            arrays.append(column)
    if arrays and tensors:
        raise TypeError("some are tensors, others are arrays")
    if arrays:
        return np.concatenate(arrays)
    if not is_ragged(tensors[0]):
        return torch.cat(tensors)
    values, old_offsets = zip(*map(ragged_parts, tensors), strict=True)
    ids = tuple(map(id, old_offsets))
    if ids not in shared:
        lengths = torch.cat([offsets.diff() for offsets in old_offsets])
        shared[ids] = (offsets_of(lengths), old_offsets)
    new_offsets, _ = shared[ids]
    return ragged_from_parts(torch.cat(values), new_offsets)


# Equality and union


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        kind = "ragged " if value.is_nested else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{kind}{dtype}{list(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def same_value(
    a: object,
    b: object,
    outer: frozenset[tuple[int, int]] = frozenset(),
) -> bool:
    """Whether two values are equal: tensors and arrays in dtype, shape and every element. NaN
    equals NaN.

    `outer` has the ids of the pairs that contain this pair. A value may contain itself: a pair that
    is inside itself says nothing new, so its other elements decide.
    """
    if a is b:
        return True
    pair = (id(a), id(b))
    if pair in outer:
        return True
    same_inner = partial(same_value, outer=outer | {pair})
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _same_array(a, b, same_inner)
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return False
        return all(same_inner(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(map(same_inner, a, b))
    try:
        if bool(a == b):
            return True
        # A NaN is not equal to itself.
        return bool(a != a and b != b)
    except (TypeError, ValueError, RuntimeError):  # a tensor or array and something else
        return False


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two dense or two ragged tensors are equal, on whatever devices they are."""
    if a.layout != b.layout or a.dtype != b.dtype:
        return False
    if is_ragged(a):
        values_of_a, offsets_of_a = ragged_parts(a)
        values_of_b, offsets_of_b = ragged_parts(b)
        have_same_values = _same_tensor(values_of_a, values_of_b)
        return have_same_values and _same_tensor(offsets_of_a, offsets_of_b)
    a = a.cpu()
    b = b.cpu()
    if torch.equal(a, b):
        return True
    if a.shape != b.shape:
        return False
    both_nan = (a != a) & (b != b)
    return bool(((a == b) | both_nan).all())


def _same_array(a: Array, b: Array, same_inner: Callable[[object, object], bool]) -> bool:
    """Whether two arrays are equal. `same_inner` compares the elements of arrays of objects."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.hasobject:
        return all(map(same_inner, a.flat, b.flat))
    can_be_nan = a.dtype.kind in "fcmM"
    return bool(np.array_equal(a, b, equal_nan=can_be_nan))


def additions(first: Mapping[str, Entry], second: Mapping[str, Entry]) -> dict[str, Entry]:
    """What a union adds to the first: the entries of the second whose keys are new. Others must be
    equal in both."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            both = f"{describe(first[key])}, {describe(second[key])}"
            raise DataError(f"{key!r} is in both batches with different content: {both}")
    return {key: value for key, value in second.items() if key not in first}


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Add the second's tensors to the first, which is changed and returned. A key in both must have
    equal tensors."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        size1 = f"{list(tensor_dict1.batch_size)} (keys {sorted(tensor_dict1.keys())})"
        size2 = f"{list(tensor_dict2.batch_size)} (keys {sorted(tensor_dict2.keys())})"
        raise DataError(f"a union needs equal batch sizes, not {size1} and {size2}")
    first = dict(tensor_dict1.items())
    second = dict(tensor_dict2.items())
    return tensor_dict1.update(additions(first, second))


def union_numpy_dict(tensor_dict1: Arrays, tensor_dict2: Arrays) -> Arrays:
    """Add the second's arrays to the first, which is changed and returned. A key in both must have
    equal arrays."""
    tensor_dict1.update(additions(tensor_dict1, tensor_dict2))
    return tensor_dict1


def merge_meta_info(parts: Sequence[MetaInfo]) -> MetaInfo:
    """The meta_info of joined batches. Entries must be equal, except `metrics`: these become one
    dict of lists."""
    merged: MetaInfo = {}
    metrics: dict[str, list[object]] = {}
    for part in parts:
        others = {key: value for key, value in part.items() if key != "metrics"}
        merged |= additions(merged, others)
        rows = part.get("metrics") or []
        if not isinstance(rows, list):
            rows = [rows]
        for row in rows:
            for key, value in row.items():
                metrics.setdefault(key, []).append(value)
    if metrics:
        merged["metrics"] = metrics
    return merged
