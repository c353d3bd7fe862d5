"""Prompts as token ids, and batches of them, from the rows of files.

Owns what happens to a prompt that is too long. A `PromptSet` checks and tokenizes every row once
when it is created, so that a bad row is reported before any process starts. It keeps the tokens in
memory, four bytes each. It reads all other columns again when a row is used: a line of a JSONL file
is parsed then, and a Parquet file is kept as Arrow columns.

Owns the position in the data, too. A `PromptLoader` decides which rows belong to which step, in an
order that depends only on the seed and the epoch. Its position is a plain dict in the checkpoint.
It counts rows, not steps or ranks, so a run resumes at the same prompt with any placement and batch
size.

Does not know how many responses are sampled for a prompt, or on which ranks.
"""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config, show
from rolepool.data.files import (
    BadRow,
    Row,
    checked_columns,
    lines_by_kind,
    open_rows,
    used_columns,
)
from rolepool.data.reasoning_gym import is_generator, reason_of_repeats
from rolepool.data.reward_needs import needs_of
from rolepool.data.reward_signatures import UserFunction
from rolepool.data.tokenizer import render_chat, tokenize, truncate
from rolepool.data.tools import template_options
from rolepool.errors import ConfigError, DataError, logger
from rolepool.protocol import DataProto

_CHUNK_ROWS = 1024  # rows tokenized at once; fast tokenizers use several cores for a list


class PromptSet:
    """The prompts of `data.train_files` or `data.val_files`, numbered in the order of the files.

    Prompts that are skipped because they are too long have no number.
    """

    def __init__(
        self,
        split: Literal["train", "val"],
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        reward: UserFunction | None = None,
    ) -> None:
        """`reward` is the reward function that a Python program has given."""
        self.key = f"data.{split}_files"
        self._config = config
        self._data = config.data
        self._tokenizer = tokenizer
        self._needs = needs_of(config, reward)
        self._template_options = template_options(config)
        self._files = [open_rows(path, self.key) for path in config.at(self.key)]
        nums_rows = [file.num_rows for file in self._files]
        self._ends = list(accumulate(nums_rows))
        max_samples: int = config.at(f"data.{split}_max_samples")
        num_rows = sum(nums_rows)
        if max_samples >= 0:
            num_rows = min(num_rows, max_samples)
        if num_rows == 0:
            files = show(config.at(self.key))
            raise DataError(
                f"{self.key}={files}: there are no rows; name .parquet or .jsonl files with rows"
            )
        self._token_ids = array("i")
        """The tokens of all rows, one row after another, truncated."""
        lengths, self.digest = self._read(num_rows)
        truncated_lengths = np.minimum(lengths, config.data.max_prompt_length)
        self._starts = np.concatenate([[0], truncated_lengths.cumsum()])
        self._rows = self._choose(lengths)
        longest = lengths[self._rows].max()
        logger.info("%s: %d prompts of up to %d tokens", self.key, len(self), longest)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """The prompts with these numbers, as columns. `origin` is a row's place in the files, for
        error messages."""
        row_numbers: list[int] = self._rows[list(numbers)].tolist()
        rows: list[Row] = []
        raw_prompt_ids: list[list[int]] = []
        for row_number in row_numbers:
            rows.append(self._parse(row_number))
            raw_prompt_ids.append(self._ids_of(row_number))
        columns: dict[str, list[Any]] = {}
        for name in rows[0]:
            columns[name] = [row[name] for row in rows]
        columns["raw_prompt_ids"] = raw_prompt_ids
        return columns

    def leave_out(self, training: "PromptSet") -> None:
        """If a generator makes validation prompts, leave out those that also occur in training,
        because their scores do not show what was learned. Raises DataError if none would be left.

        Files are not compared: whoever wrote them chose their rows, and all rows would be read a
        second time.
        """
        generators = [path for path in self._config.at(self.key) if is_generator(path)]
        if not generators:
            return
        trained_questions = set(training._questions())
        is_known = np.array([question in trained_questions for question in self._questions()])
        num_known = int(is_known.sum())
        if not num_known:
            return
        what = f"{self.key}: {num_known} of {len(self)} prompts also occur in training"
        reason = training._reason_of_repeats_in(generators)
        if num_known == len(self):
            fix = reason or "give the generator another seed, more items or a wider range"
            raise DataError(f"{what}; {fix}")
        if reason is None:
            logger.info("%s, and are left out", what)
        else:
            logger.warning("%s, and are left out; %s", what, reason)
        self._rows = self._rows[~is_known]

    def _reason_of_repeats_in(self, generators: Sequence[str]) -> str | None:
        """Why validation repeats these prompts, if the seeds of generators are the reason."""
        for path in self._config.at(self.key):
            if not is_generator(path):
                continue
            for generator in generators:
                reason = reason_of_repeats(path, generator)
                if reason is not None:
                    return reason
        return None

    def _questions(self) -> Iterator[str]:
        """The text of each prompt."""
        for row in self._rows.tolist():
            yield json.dumps(self._parse(row)["raw_prompt"], default=str)

    def check_vocabulary(self, model: str, size: int) -> None:
        """Raise DataError if a prompt has a token id that a model of this vocabulary size does not
        have. `model` is the model's key and path."""
        ids = np.frombuffer(self._token_ids, dtype=np.intc)
        place = int(ids.argmax())
        highest = ids[place]
        if highest >= size:
            row_number = int(self._starts.searchsorted(place, side="right")) - 1
            origin = self._parse(row_number)["origin"]
            has = f"the prompt has the token id {highest}"
            problem = f"{has}, but {model} has only the ids 0 to {size - 1}"
            fix = "use the tokenizer of that model, or a model with the same tokens"
            raise DataError(f"{origin}: {problem}; {fix}")

    def _read(self, num_rows: int) -> tuple[npt.NDArray[np.int64], str]:
        """Check and tokenize every row, and keep the tokens. Returns the length of every prompt
        before truncation and a digest of all tokens. Raises DataError with one line for each kind
        of problem."""
        lengths = array("q")
        digest = hashlib.blake2b(digest_size=16)
        problems: list[BadRow] = []
        for start in range(0, num_rows, _CHUNK_ROWS):
            end = min(start + _CHUNK_ROWS, num_rows)
            rows = self._rows_with_text(range(start, end), problems)
            ids_of_rows = tokenize(self._tokenizer, rows)
            for row, ids in zip(rows, ids_of_rows, strict=True):
                length = len(ids)
                lengths.append(length)
                digest.update(array("q", (length,)))
                digest.update(array("q", ids))
                kept_ids = truncate(ids, self._data.max_prompt_length, self._data.truncation)
                self._token_ids.extend(kept_ids)
                if not ids:
                    reason = f"{self._data.prompt_key} has no tokens; write at least one"
                    problems.append(BadRow(f"{row['origin']}: {reason}", "no tokens"))
        DataError.raise_if_any(lines_by_kind(problems, num_rows))
        return np.array(lengths, dtype=np.int64), digest.hexdigest()

    def _rows_with_text(self, numbers: Iterable[int], problems: list[BadRow]) -> list[Row]:
        """Those of these rows that can be used. Adds an error to `problems` for each of the
        others."""
        rows: list[Row] = []
        for number in numbers:
            try:
                row = self._parse(number, check=True)
                rows.append(self._with_text(row))
            except BadRow as error:
                # A new error, because this one keeps the row alive in its traceback.
                problems.append(BadRow(str(error), error.kind))
        return rows

    def _choose(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """The numbers of the rows to use. Raises DataError if a prompt is too long to be used."""
        longest = self._data.max_prompt_length
        key = f"data.max_prompt_length={self._data.max_prompt_length}"
        overlong = np.flatnonzero(lengths > longest)
        num_overlong = len(overlong)
        if num_overlong and self._data.filter_overlong_prompts:
            skipped = f"{num_overlong} of {len(lengths)} prompts"
            logger.warning("%s: skipped %s, longer than %s", self.key, skipped, key)
            if num_overlong == len(lengths):
                fix = f"set data.max_prompt_length to at least {lengths.min()}"
                raise DataError(
                    f"{self.key}: all {len(lengths)} prompts have more tokens than {key}; {fix}"
                )
            return np.flatnonzero(lengths <= longest)
        if num_overlong and self._data.truncation == "error":
            first = int(overlong[0])
            most = lengths.max()
            origin = self._parse(first)["origin"]
            problem = f"{origin}: the prompt has {lengths[first]} tokens, more than {key}"
            others = (
                f"{num_overlong} of {len(lengths)} prompts are too long, the longest has {most}"
            )
            fix = "data.filter_overlong_prompts=true, or data.truncation=left, right or middle"
            raise DataError(f"{problem} ({others}). Set data.max_prompt_length={most}, {fix}")
        return np.arange(len(lengths))

    def _parse(self, row_number: int, *, check: bool = False) -> Row:
        """A row: its prompt and the columns that rewards need. `origin` is its place in the
        files."""
        index = bisect_right(self._ends, row_number)
        file = self._files[index]
        first_row = self._ends[index] - file.num_rows
        origin, row = file.read(row_number - first_row)
        if check:
            used = checked_columns(
                place=origin,
                row=row,
                source=file.source,
                config=self._config,
                needs=self._needs,
            )
        else:
            used = used_columns(row, file.source, self._config)
        used["origin"] = origin
        return used

    def _ids_of(self, row_number: int) -> list[int]:
        """The tokens of a row's prompt, truncated."""
        start = self._starts[row_number]
        end = self._starts[row_number + 1]
        return self._token_ids[start:end].tolist()

    def _with_text(self, row: Row) -> Row:
        """The row with the text of its prompt."""
        prompt = row["raw_prompt"]
        text = render_chat(self._tokenizer, prompt, row["origin"], **self._template_options)
        return {**row, "is_chat": not isinstance(prompt, str), "text": text}


# Batches


class PromptLoader:
    """An endless sequence of training batches. The last rows of an epoch are dropped if they do not
    fill a batch."""

    def __init__(
        self,
        prompts: PromptSet,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        size_key: str = "data.train_batch_size",
    ) -> None:
        """`size_key` is the key that sets `batch_size`."""
        if batch_size > len(prompts):
            problem = f"{prompts.key} has {len(prompts)} prompts, less than one batch"
            raise ConfigError(f"{size_key}={batch_size}: {problem}; use at most {len(prompts)}")
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._identity = {
            "num_rows": len(prompts),
            "digest": prompts.digest,
            "seed": seed,
            "shuffle": shuffle,
        }
        """What must be the same to resume at a saved position."""
        self.num_batches_per_epoch = len(prompts) // batch_size
        self.epoch = -1
        """The epoch of the next batch; the first is 0."""
        self._move_to(0, 0)

    def next_batch(self) -> DataProto:
        """The next `batch_size` prompts; see `batch_of` for the columns."""
        end = self._index + self._batch_size
        rows = self._order[self._index : end].tolist()
        batch = batch_of(self._prompts, rows, f"epoch{self.epoch}")
        self._move_to(self.epoch, end)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and in which data; only numbers and strings."""
        return {"epoch": self.epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position that `state_dict` returned. Raises DataError if the data or its
        order has changed."""
        changes: list[str] = []
        for key, now in self._identity.items():
            then = state.get(key)
            if then != now:
                changes.append(f"{key} was {then}, is {now}")
        if changes:
            words = "digest is a hash of all prompt tokens; seed is data.seed, or trainer.seed if that is null"
            position = f"the saved position in {self._prompts.key}"
            problem = f"{position} belongs to other data: {'; '.join(changes)} ({words})"
            raise DataError(
                f"{problem}. Undo the change, or start a new run with trainer.resume_mode=disable"
            )
        self._move_to(state["epoch"], state["index"])

    def _move_to(self, epoch: int, index: int) -> None:
        """Move to row `index` of an epoch, or to the next epoch if less than a batch is left in
        it."""
        if index + self._batch_size > len(self._prompts):
            epoch = epoch + 1
            index = 0
        if epoch != self.epoch:
            self._order = np.arange(len(self._prompts))
            if self._shuffle:
                generator = np.random.default_rng([self._seed, epoch])
                generator.shuffle(self._order)
        self.epoch = epoch
        self._index = index


def validation_batches(prompts: PromptSet, batch_size: int | None = None) -> Iterator[DataProto]:
    """All prompts once, in the order of the files; the last batch may be smaller. None: all prompts
    in one batch."""
    size = batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        end = min(start + size, len(prompts))
        yield batch_of(prompts, range(start, end), "val")


def batch_of(prompts: PromptSet, rows: Sequence[int], pass_name: str) -> DataProto:
    """These prompts as a batch. It has no tensors, because prompts differ in length and are not
    padded here.

    `raw_prompt` is a chat or a plain string, and `raw_prompt_ids` are lists of token ids; `uid`
    names a prompt and is the same in every run, so that responses to the same prompt can be found;
    `index` is the prompt's number, and `origin` its place in the files.
    """
    uids = [f"{pass_name}-row{row}" for row in rows]
    columns: dict[str, Iterable[object]] = dict(prompts.take(rows))
    columns["uid"] = uids
    columns["index"] = np.array(rows, dtype=np.int64)
    return DataProto.from_dict(non_tensors=columns)
