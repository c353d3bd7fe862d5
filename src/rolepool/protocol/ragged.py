"""Ragged columns: rows of different lengths, stored as one flat tensor and the offsets at which rows start.

Owns the one form that such columns have, torch's jagged nested tensors whose second dimension varies, and the
conversion to padded tensors and back. torch itself can neither slice, index nor join them along rows, and its own
functions for making and reading them take ten times as long as the functions here.

The tokens of a row are its prompt and its response: the ragged column `input_ids`, with `num_prompt_tokens` of each
row beside it. Position ids and masks are computed from the two, so they are not sent. In a conversation with several
turns the response is everything after the first prompt, and the ragged column `response_mask` says which of its tokens
the policy sampled. Without that column it sampled all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # torch has no public name for it

from rolepool.errors import DataError

INPUT_IDS, NUM_PROMPT_TOKENS, RESPONSE_MASK = "input_ids", "num_prompt_tokens", "response_mask"
TOKENS = (INPUT_IDS, NUM_PROMPT_TOKENS)
MASKED_TOKENS = (*TOKENS, RESPONSE_MASK)
"""The columns of a method that must know which tokens were sampled. A batch without several turns has no mask."""
TURN_SCORES, ENVIRONMENT_SCORE = "turn_scores", "environment_score"
"""What an environment gave for a conversation: a ragged column with scores at the last tokens of turns, and the sum of
each row, which is NaN if it gave none."""


def is_ragged(column: object) -> TypeGuard[NestedTensor]:
    """Whether this is a ragged column. It is False for nested tensors that vary in another dimension."""
    return isinstance(column, NestedTensor) and column._ragged_idx == 1


def ragged(values: Tensor, lengths: Tensor) -> Tensor:
    """The column whose row i has the next `lengths[i]` of the values."""
    return ragged_from_parts(values, offsets_of(lengths.to(values.device)))


def ragged_from_parts(values: Tensor, offsets: Tensor) -> Tensor:
    """The column whose row i is `values[offsets[i] : offsets[i + 1]]`. Gradients do not pass through it."""
    return NestedTensor(values.detach(), offsets)


def ragged_parts(column: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a ragged column, without holes, and its offsets."""
    nested: Any = column
    if nested._lengths is not None:  # `torch.nested.narrow` makes columns with holes between the rows
        nested = nested.contiguous()
    return nested._values, nested._offsets


def flat_values(column: Tensor) -> Tensor:
    """The values of all rows, one after another."""
    return ragged_parts(column)[0]


def lengths_of(column: Tensor) -> Tensor:
    """The number of values of each row."""
    return ragged_parts(column)[1].diff()


def num_bytes(column: Any) -> int:
    """The bytes of a column's values: a ragged or dense tensor, or an array."""
    return int((flat_values(column) if is_ragged(column) else column).nbytes)


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def places_of(offsets: Tensor, rows: slice | Tensor) -> tuple[slice | Tensor, Tensor]:
    """Where the values of these rows are (a slice if the rows are a slice), and the offsets of a column of them."""
    if isinstance(rows, slice):
        inside = offsets[rows.start : rows.stop + 1]
        return slice(int(inside[0]), int(inside[-1])), inside - inside[0]
    rows = rows.to(offsets.device)
    lengths = offsets.diff()[rows]
    fresh = offsets_of(lengths)
    shift = torch.repeat_interleave(offsets[:-1][rows] - fresh[:-1], lengths)
    return shift + torch.arange(len(shift), device=offsets.device), fresh


# --- padded tensors -----------------------------------------------------------------------------------------------


def pad_ragged(
    column: Tensor, width: int | None = None, *, side: Literal["left", "right"] = "right", value: float = 0
) -> Tensor:
    """The column as [rows, width], with `value` on one side of shorter rows. The default width is the longest row's."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if longest > width:
        raise DataError(f"a row of {longest} tokens cannot be padded to {width}")
    padded = values.new_full((len(lengths), width, *values.shape[1:]), value)
    padded[_is_real(lengths, width, side)] = values
    return padded


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """The ragged column of the first `lengths[i]` entries of each row."""
    return ragged(padded[_is_real(lengths, padded.shape[1], "right")], lengths)


def _is_real(lengths: Tensor, width: int, side: Literal["left", "right"]) -> Tensor:
    places = torch.arange(width, device=lengths.device)
    return places < lengths[:, None] if side == "right" else places >= width - lengths[:, None]


def sampled_mask(batch: Mapping[str, Any], num_response: Tensor) -> Tensor:
    """[rows, longest response]: the response tokens that the policy sampled."""
    if RESPONSE_MASK in batch:
        return pad_ragged(batch[RESPONSE_MASK])
    return _is_real(num_response, int(num_response.max()), "right")


def split_tokens(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The prompts and the responses of `input_ids`, as two ragged columns."""
    ids, offsets = ragged_parts(batch[INPUT_IDS])
    num_prompt, lengths = batch[NUM_PROMPT_TOKENS], offsets.diff()
    is_prompt = torch.arange(len(ids), device=ids.device) < torch.repeat_interleave(offsets[:-1] + num_prompt, lengths)
    return ragged(ids[is_prompt], num_prompt), ragged(ids[~is_prompt], lengths - num_prompt)


def rows_of_responses(batch: Mapping[str, Any]) -> Sequence[Tensor]:
    """The tokens of each response."""
    _, responses = split_tokens(batch)
    return torch.split(flat_values(responses), lengths_of(responses).tolist())
