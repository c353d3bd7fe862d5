"""What the built-in roles read and return, as types: a class for each kind of batch, a field for
each column.

Between roles a batch is a `DataProto`, whose columns mypy cannot see. A role that reads one makes a
view of it (`of`), and one that returns one makes it from such a view (`to_proto`). Both share the
tensors. `register(reads=KIND.names())` says that only the columns of this kind are sent. Roles of
users may do the same, or use the columns of a DataProto by their names.

A field whose default is None is a column that not every such batch has. Does not know how columns
are stored (`columns`), nor who sends them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rolepool.errors import DataError
from rolepool.protocol.columns import Ragged, rows_of_responses
from rolepool.protocol.data import DataProto

Objects = npt.NDArray[np.object_]
"""A column with a Python object for each row."""


def objects(values: Iterable[object]) -> Objects:
    """A column of these objects."""
    # Not np.array, which would make an array with two dimensions of equally long lists.
    return np.fromiter(values, object)


@dataclass(frozen=True, kw_only=True)
class TypedBatch:
    """A batch whose columns are known. The columns of another kind of batch are not in it."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The columns of this kind of batch."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, data: DataProto) -> Self:
        """A view of the columns of this kind. Raises DataError if one is missing."""
        columns = data.columns()
        missing: list[str] = []
        for field in fields(cls):
            if field.default is MISSING and field.name not in columns:
                missing.append(field.name)
        if missing:
            raise DataError(
                f"{cls.__name__} need the columns {missing}; this batch has {sorted(columns)}"
            )
        own_columns = {name: columns[name] for name in cls.names() if name in columns}
        return cls(**own_columns)

    def to_proto(self) -> DataProto:
        """The batch with these columns, without those that are None."""
        columns: dict[str, object] = {}
        for name in self.names():
            column = getattr(self, name)
            if column is not None:
                columns[name] = column
        return DataProto.from_single_dict(columns)


# Prompts


@dataclass(frozen=True, kw_only=True)
class Prompts(TypedBatch):
    """What an engine generates from."""

    raw_prompt_ids: Objects
    """The tokens of each prompt, as a list."""
    uid: Objects
    """The name of the prompt, which is the same in every run."""
    sample_index: npt.NDArray[np.int64]
    """The number of the response among those to the same prompt."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentPrompts(Prompts):
    """What an environment reads of each prompt."""

    raw_prompt: Objects
    data_source: Objects
    reward_model: Objects
    extra_info: Objects
    origin: Objects
    """The place of the row in its file, for error messages."""


# Tokens


@dataclass(frozen=True, kw_only=True)
class Tokens(TypedBatch):
    """Prompts and responses."""

    input_ids: Ragged
    """The tokens of the prompt and of the response."""
    num_prompt_tokens: Tensor

    def responses(self) -> Sequence[Tensor]:
        """The tokens of each response."""
        return rows_of_responses(vars(self))


@dataclass(frozen=True, kw_only=True)
class SampledTokens(Tokens):
    """Prompts and responses, and which tokens of the responses the policy sampled."""

    response_mask: Ragged | None = None
    """None if it sampled all of them, because responses have one turn."""


@dataclass(frozen=True, kw_only=True)
class ComparableTokens(SampledTokens):
    """What the log-probs of the actor are compared with."""

    rollout_log_probs: Ragged | None = None
    """The engine's log-prob of each response token; 0 of those that it did not sample."""
    weights_version: Tensor | None = None
    """The version of the weights that generated the response; -1 if that is not known. None if
    log-probs are not compared."""


@dataclass(frozen=True, kw_only=True)
class Sizes(TypedBatch):
    """What the driver reads of rollouts: numbers of tokens, and the scores of environments."""

    num_prompt_tokens: Tensor
    num_response_tokens: Tensor
    response_mask: Ragged | None = None
    turn_scores: Ragged | None = None
    """The score of each turn at its last token, and 0 elsewhere."""
    environment_score: Tensor | None = None
    """The sum of a row's scores, which is NaN if the environment gave none."""
    num_turns: Tensor | None = None
    num_tool_calls: Tensor | None = None
    num_tool_errors: Tensor | None = None
    weights_version: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Rollouts(Sizes, ComparableTokens):
    """What a rollout returns."""

    old_log_probs: Ragged | None = None
    """The engine's log-probs, if the run takes them as the old log-probs. None if the actor
    computes those."""


# Numbers


@dataclass(frozen=True, kw_only=True)
class Scores(TypedBatch):
    """The score of each response."""

    scores: Tensor
    reward_numbers: Objects | None = None
    """Other numbers that a reward function returned, as a dict for each row."""
    pred: Objects | None = None
    """The answer in each response, or None."""


@dataclass(frozen=True, kw_only=True)
class Values(TypedBatch):
    values: Ragged
    """The value of the state before each response token."""


@dataclass(frozen=True, kw_only=True)
class LogProbs(TypedBatch):
    """What the actor computes with the weights that generated the responses."""

    old_log_probs: Ragged
    entropy_sums: Tensor
    """The sum of the entropies of the tokens that were sampled, for each row."""


@dataclass(frozen=True, kw_only=True)
class ReferenceLogProbs(TypedBatch):
    ref_log_prob: Ragged


@dataclass(frozen=True, kw_only=True)
class Estimates(TypedBatch):
    """Advantages and returns of response tokens."""

    advantages: Ragged
    returns: Ragged
    rollout_is_weights: Ragged | None = None
    """The weight of each token in the policy loss. None if losses have no weights."""
    loss_mask: Ragged | None = None
    """The sampled tokens that stay in losses. None if all of them do."""


# What updates and rewards read


@dataclass(frozen=True, kw_only=True)
class ActorUpdate(SampledTokens):
    old_log_probs: Ragged
    advantages: Ragged
    ref_log_prob: Ragged | None = None
    rollout_is_weights: Ragged | None = None
    loss_mask: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedUpdate(ActorUpdate):
    """What an update reads whose old log-probs are those of the engine, and are compared with the
    actor's."""

    weights_version: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CriticUpdate(SampledTokens):
    values: Ragged
    returns: Ragged
    loss_mask: Ragged | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredTokens(Tokens):
    """What a reward model reads if it has the tokens of the policy."""

    environment_score: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredChats(ScoredTokens):
    """What a reward model reads if texts are written again in tokens of its own."""

    raw_prompt: Objects
    origin: Objects


@dataclass(frozen=True, kw_only=True)
class ScoredRows(ScoredTokens):
    """What built-in rules read."""

    data_source: Objects
    reward_model: Objects
    extra_info: Objects
    origin: Objects
    uid: Objects


@dataclass(frozen=True, kw_only=True)
class ScoredRowsWithPrompts(ScoredRows):
    """What reward functions of users read."""

    raw_prompt: Objects
