"""Prompts as token ids, and batches of them, from the rows of files.

Owns what happens to a prompt that is too long. A `PromptSet` checks and tokenizes every row once
when it is created, so that a bad row is reported before any process starts. It keeps the tokens in
memory, four bytes each. It reads all other columns again when a row is used: a line of a JSONL file
is parsed then, and a Parquet file is kept as Arrow columns.

Owns the position in the data, too. A `PromptLoader` decides which rows belong to which step, in an
order that depends only on the seed and the epoch. Its position is a plain dict in the checkpoint.
It counts rows, not steps or ranks, so a run resumes at the same prompt with any placement and batch
size.

Owns what a reward model reads, too: the policy's tokens, or the same texts in tokens of its own.

Does not know how many responses are sampled for a prompt, or on which ranks.
"""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolepool.config import Config, show
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.files import BadRow, Row, check_row, lines_by_kind, open_rows, used_columns
from rolepool.data.reasoning_gym import is_generator, reason_of_repeats
from rolepool.data.reward_needs import needs_of
from rolepool.data.tools import template_options
from rolepool.errors import ConfigError, DataError, explained, logger, one_line
from rolepool.protocol import DataProto
from rolepool.protocol.columns import INPUT_IDS, TOKENS, rows_of_responses

_CHUNK_ROWS = 1024  # rows tokenized at once; fast tokenizers use several cores for a list


def load_tokenizer(keys: PolicyModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer."""
    name = "path" if keys.tokenizer_path is None else "tokenizer_path"
    return tokenizer_at(f"actor_rollout_ref.model.{name}", keys.tokenizer, keys.trust_remote_code)


def tokenizer_at(name: str, path: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer at a path, which is the value of the key `name`. If it has no pad token, its
    end-of-sequence token is used."""
    key = f"{name}={show(path)}"
    place = str(Path(str(path)).expanduser())
    # OSError: files are missing. ValueError, KeyError: they belong to something else.
    with explained(
        f"{key}: no tokenizer can be loaded from there", "give a model folder", ValueError, KeyError
    ):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code
        )
    if found.eos_token_id is None:
        raise ConfigError(
            f"{key}: its tokenizer has no end-of-sequence token, which responses need to end"
        )
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    return found


class PromptSet:
    """The prompts of `data.train_files` or `data.val_files`, numbered in the order of the files.

    Prompts that are skipped because they are too long have no number.
    """

    def __init__(
        self,
        split: Literal["train", "val"],
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        reward: Callable[..., Any] | None = None,
    ) -> None:
        """`reward` is the reward function that a Python program has given."""
        self.key = f"data.{split}_files"
        self._config = config
        self._data = config.data
        self._tokenizer = tokenizer
        self._needs = needs_of(config, reward)
        self._template_options = template_options(config)
        self._files = [open_rows(path, self.key) for path in config.at(self.key)]
        self._ends = list(accumulate(file.num_rows for file in self._files))
        max_samples: int = config.at(f"data.{split}_max_samples")
        num_rows = sum(file.num_rows for file in self._files)
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
        self._starts = np.concatenate(
            [[0], np.minimum(lengths, config.data.max_prompt_length).cumsum()]
        )
        self._rows = self._choose(lengths)
        logger.info(
            "%s: %d prompts of up to %d tokens", self.key, len(self), lengths[self._rows].max()
        )

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """The prompts with these numbers, as columns. `origin` is a row's place in the files, for
        error messages."""
        row_numbers = self._rows[list(numbers)].tolist()
        rows = [self._parse(number) for number in row_numbers]
        all_ids = [
            self._token_ids[self._starts[row] : self._starts[row + 1]].tolist()
            for row in row_numbers
        ]
        return {
            **{name: [row[name] for row in rows] for name in rows[0]},
            "raw_prompt_ids": all_ids,
        }

    def leave_out(self, training: "PromptSet") -> None:
        """If a generator makes validation prompts, leave out those that also occur in training,
        because their scores do not show what was learned. Raises DataError if none would be left.

        Files are not compared: whoever wrote them chose their rows, and all rows would be read a
        second time.
        """
        generators = [path for path in self._config.at(self.key) if is_generator(path)]
        if not generators:
            return
        known = set(training._questions())
        is_known = np.array([question in known for question in self._questions()])
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
        for path in filter(is_generator, self._config.at(self.key)):
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
        if ids[place] >= size:
            row = int(self._starts.searchsorted(place, side="right")) - 1
            problem = f"the prompt has the token id {ids[place]}, but {model} has only the ids 0 to {size - 1}"
            fix = "use the tokenizer of that model, or a model with the same tokens"
            raise DataError(f"{self._parse(row)['origin']}: {problem}; {fix}")

    def _read(self, num_rows: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], str]:
        """Check and tokenize every row, and keep the tokens. Returns the length of every prompt
        before truncation and a digest of all tokens. Raises DataError with one line for each kind
        of problem."""
        lengths = array("q")
        digest = hashlib.blake2b(digest_size=16)
        problems: list[BadRow] = []
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows: list[Row] = []
            for number in range(start, min(start + _CHUNK_ROWS, num_rows)):
                try:
                    rows.append(self._with_text(self._parse(number, check=True)))
                except BadRow as error:
                    problems.append(BadRow(str(error), error.kind))  # without its traceback
            for row, ids in zip(rows, tokenize(self._tokenizer, rows), strict=True):
                lengths.append(len(ids))
                digest.update(array("q", [len(ids), *ids]).tobytes())
                self._token_ids.extend(
                    truncate(ids, self._data.max_prompt_length, self._data.truncation)
                )
                if not ids:
                    reason = f"{self._data.prompt_key} has no tokens; write at least one"
                    problems.append(BadRow(f"{row['origin']}: {reason}", "no tokens"))
        DataError.raise_if_any(lines_by_kind(problems, num_rows))
        return np.array(lengths, dtype=np.int64), digest.hexdigest()

    def _choose(
        self, lengths: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The numbers of the rows to use. Raises DataError if a prompt is too long to be used."""
        longest = self._data.max_prompt_length
        key = f"data.max_prompt_length={self._data.max_prompt_length}"
        overlong = np.flatnonzero(lengths > longest)
        if len(overlong) and self._data.filter_overlong_prompts:
            logger.warning(
                "%s: skipped %d of %d prompts, longer than %s",
                self.key,
                len(overlong),
                len(lengths),
                key,
            )
            if len(overlong) == len(lengths):
                fix = f"set data.max_prompt_length to at least {lengths.min()}"
                raise DataError(
                    f"{self.key}: all {len(lengths)} prompts have more tokens than {key}; {fix}"
                )
            return np.flatnonzero(lengths <= longest)
        if len(overlong) and self._data.truncation == "error":
            first = int(overlong[0])
            most = lengths.max()
            problem = f"{self._parse(first)['origin']}: the prompt has {lengths[first]} tokens, more than {key}"
            others = (
                f"{len(overlong)} of {len(lengths)} prompts are too long, the longest has {most}"
            )
            fix = "data.filter_overlong_prompts=true, or data.truncation=left, right or middle"
            raise DataError(f"{problem} ({others}). Set data.max_prompt_length={most}, {fix}")
        return np.arange(len(lengths))

    def _parse(self, row_number: int, *, check: bool = False) -> Row:
        """A row: its prompt and the columns that rewards need. `origin` is its place in the
        files."""
        index = bisect_right(self._ends, row_number)
        file = self._files[index]
        number = row_number - self._ends[index] + self._files[index].num_rows
        origin, row = file.read(number)
        if check:
            check_row(origin, row, file.source, self._config, self._needs)
        return {**used_columns(row, file.source, self._config), "origin": origin}

    def _with_text(self, row: Row) -> Row:
        """The row with the text of its prompt."""
        text = render_chat(
            self._tokenizer, row["raw_prompt"], row["origin"], **self._template_options
        )
        return {**row, "is_chat": not isinstance(row["raw_prompt"], str), "text": text}


def tokenize(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[list[int]]:
    """Token ids of chats and of plain strings. A file may contain rows of both kinds."""
    for is_chat, group in groupby(rows, key=itemgetter("is_chat")):
        texts = [row["text"] for row in group]
        # A template writes special tokens itself; for a plain string the tokenizer adds them.
        encoded = tokenizer(
            texts, add_special_tokens=not is_chat, return_attention_mask=False, verbose=False
        )
        yield from encoded["input_ids"]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    origin: str,
    answer: str | None = None,
    /,
    **options: Any,
) -> str:
    """The text of a chat as the tokenizer's template writes it with these options: with an answer,
    or up to the start of the answer. A prompt that is a plain string is returned unchanged."""
    if isinstance(prompt, str):
        return prompt
    if answer is None:
        chat = prompt
    else:
        chat = [*prompt, {"role": "assistant", "content": answer}]
    try:
        text = str(
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=answer is None, tokenize=False, **options
            )
        )
        text.encode()  # fails if a message contains half of a surrogate pair
    except (
        TemplateError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # a template may raise any of them
        problem = f"the chat template of {tokenizer.name_or_path} cannot write this chat: {one_line(error)}"
        fix = "use a model with a chat template (often named -Chat or -Instruct), or write the prompt as a plain string"
        raise BadRow(f"{origin}: {problem}; {fix}", kind="chat template") from error
    return text


def truncate(token_ids: list[int], max_length: int, mode: str) -> list[int]:
    """Truncate to `max_length` tokens: `left` removes the first tokens, `middle` keeps both ends,
    others the first."""
    if len(token_ids) <= max_length:
        return token_ids
    num_last = {"left": max_length, "middle": max_length - max_length // 2}.get(mode, 0)
    return token_ids[: max_length - num_last] + token_ids[len(token_ids) - num_last :]


# --- batches ------------------------------------------------------------------------------------------------------


class PromptLoader:
    """An endless sequence of training batches. The last rows of an epoch are dropped if they do not
    fill a batch."""

    def __init__(
        self, prompts: PromptSet, batch_size: int, *, seed: int, shuffle: bool = True
    ) -> None:
        if batch_size > len(prompts):
            problem = f"{prompts.key} has {len(prompts)} prompts, less than one batch"
            raise ConfigError(
                f"data.train_batch_size={batch_size}: {problem}; use at most {len(prompts)}"
            )
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
        self.num_steps_per_epoch = len(prompts) // batch_size
        self.epoch = -1
        """The epoch of the next batch; the first is 0."""
        self._move_to(0, 0)

    def next_batch(self) -> DataProto:
        """The next `batch_size` prompts; see `batch_of` for the columns."""
        rows = self._order[self._index : self._index + self._batch_size].tolist()
        batch = batch_of(self._prompts, rows, f"epoch{self.epoch}")
        self._move_to(self.epoch, self._index + self._batch_size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and in which data; only numbers and strings."""
        return {"epoch": self.epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position that `state_dict` returned. Raises DataError if the data or its
        order has changed."""
        changed = {
            key: (state.get(key), now)
            for key, now in self._identity.items()
            if state.get(key) != now
        }
        if changed:
            changes = "; ".join(
                f"{key} was {then}, is {now}" for key, (then, now) in changed.items()
            )
            words = "digest is a hash of all prompt tokens; seed is data.seed, or trainer.seed if that is null"
            problem = f"the saved position in {self._prompts.key} belongs to other data: {changes} ({words})"
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
                np.random.default_rng([self._seed, epoch]).shuffle(self._order)
        self.epoch = epoch
        self._index = index


def validation_batches(prompts: PromptSet, batch_size: int | None = None) -> Iterator[DataProto]:
    """All prompts once, in the order of the files; the last batch may be smaller. None: all prompts
    in one batch."""
    size = batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        yield batch_of(prompts, range(start, min(start + size, len(prompts))), "val")


def batch_of(prompts: PromptSet, rows: Sequence[int], pass_name: str) -> DataProto:
    """These prompts as a batch. It has no tensors, because prompts differ in length and are not
    padded here.

    `raw_prompt` is a chat or a plain string, and `raw_prompt_ids` are lists of token ids; `uid`
    names a prompt and is the same in every run, so that responses to the same prompt can be found;
    `index` is the prompt's number, and `origin` its place in the files.
    """
    uids = [f"{pass_name}-row{row}" for row in rows]
    columns = {**prompts.take(rows), "uid": uids, "index": np.array(rows, dtype=np.int64)}
    return DataProto.from_dict(non_tensors=columns)


# --- what a reward model reads ------------------------------------------------------------------------------------


class RewardTexts:
    """Writes prompts and responses in the tokens of a reward model that does not have the policy's
    tokenizer."""

    READS = (*TOKENS, "raw_prompt", "origin")
    """The columns that `tokenize` reads."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
        self._policy = policy
        self._own = own

    def check(self, prompts: PromptSet) -> None:
        """Raise BadRow if the reward model's template cannot write the first chat."""
        prompt, origin = (prompts.take([0])[name][0] for name in ("raw_prompt", "origin"))
        render_chat(self._own, prompt, origin, "")

    def tokenize(self, batch: DataProto) -> list[list[int]]:
        """The tokens of each row. A chat is written with the reward model's template, the response
        as its last message. If the prompt is a plain string, the text is what the policy read and
        wrote."""
        columns = batch.non_tensor_batch
        rows = []
        token_rows = zip(
            batch.batch[INPUT_IDS].unbind(), rows_of_responses(batch.batch), strict=True
        )
        for prompt, origin, (ids, response) in zip(
            columns["raw_prompt"], columns["origin"], token_rows, strict=True
        ):
            is_chat = not isinstance(prompt, str)
            text = str(self._policy.decode(response if is_chat else ids, skip_special_tokens=True))
            if is_chat:
                text = render_chat(self._own, prompt, origin, text)
            rows.append({"is_chat": is_chat, "text": text})
        return list(tokenize(self._own, rows))


def reward_texts(config: Config, section: str, vocab_size: int) -> RewardTexts | None:
    """How texts are tokenized again for the reward model of a section, such as
    `reward_model.model`; None if it gets the policy's tokens. Raises ConfigError if it has too few
    tokens for that."""
    keys = config.at(section)
    policy_keys = config.actor_rollout_ref.model
    name = f"{section}.input_tokenizer"
    path = keys.input_tokenizer
    if path in (None, policy_keys.path):
        path = policy_keys.tokenizer
    policy = tokenizer_at(name, path, policy_keys.trust_remote_code)
    folder = Path(keys.path).expanduser()
    has_tokenizer = not folder.is_dir() or any([*folder.glob("tokenizer*"), *folder.glob("vocab*")])
    if has_tokenizer and keys.input_tokenizer is not None:
        own = tokenizer_at(f"{section}.path", keys.path, keys.trust_remote_code)
        if own.get_vocab() != policy.get_vocab() or own.chat_template not in (
            None,
            policy.chat_template,
        ):
            return RewardTexts(policy, own)
    if vocab_size < len(policy):
        what = f"it has {vocab_size} tokens, fewer than the policy ({len(policy)}), whose tokens it would get"
        if has_tokenizer:
            fix = f"do not set {name}=null"
        else:
            fix = "add its tokenizer to its folder"
        raise ConfigError(f"{section}.path={keys.path}: {what}; {fix}")
    return None
