"""Prompts as token ids: rows of the data files are checked, rendered with the chat template and truncated.

Owns what a row must contain and what happens to a prompt that is too long. A `PromptSet` reads and tokenizes every row
once when it is created, so that a bad row is reported before any process starts. The tokens stay in memory, four bytes
each; everything else is read again when a row is used.

Does not know epochs or batches, and knows of rewards only that every row needs one.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from rolepool.config import Config
from rolepool.config.loading import show
from rolepool.data.files import Row, open_rows
from rolepool.data.rewards import find_rule, rule_for
from rolepool.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Lengths = npt.NDArray[np.int64]
Truncation = Literal["error", "left", "right", "middle"]

MAX_PROBLEMS_SHOWN = 5
_CHUNK_ROWS = 1024  # rows tokenized at once; fast tokenizers use several cores for a list


def train_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.train_files`."""
    data = config.data
    return PromptSet("data.train_files", data.train_files, data.train_max_samples, config, tokenizer)


def val_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.val_files`."""
    return PromptSet("data.val_files", config.data.val_files, config.data.val_max_samples, config, tokenizer)


class PromptSet:
    """The prompts of one or more files, numbered in the order of the files; prompts that are left out do not count."""

    def __init__(
        self, key: str, files: Sequence[str], max_samples: int, config: Config, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if not files:
            raise ConfigError(f"{key}: is empty; name at least one .parquet or .jsonl file")
        self.key = key
        self._data = config.data
        self._tokenizer = tokenizer
        self._rule_decides = not config.reward_model.enable and config.custom_reward_function.path is None
        columns = (config.data.prompt_key, "data_source", "reward_model", "extra_info")
        self._files = [open_rows(path, key, columns) for path in files]
        self._ends = list(accumulate(len(file) for file in self._files))
        num_rows = self._ends[-1] if max_samples < 0 else min(max_samples, self._ends[-1])
        if num_rows == 0:
            raise DataError(f"{key}: there are no rows in {', '.join(files)}")
        self._token_ids = array("i")
        """The tokens of all rows, one row after another, cut to length."""
        lengths, self.digest = self._check(num_rows)
        self._starts = np.concatenate([[0], np.minimum(lengths, config.data.max_prompt_length).cumsum()])
        self._rows = self._choose(lengths)
        logger.info("%s: %d prompts of up to %d tokens", key, len(self), lengths[self._rows].max())

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """The prompts with these numbers, as columns. `origin` is a row's place in the files, for error messages."""
        row_numbers = self._rows[list(numbers)].tolist()
        rows = [self._parse(number) for number in row_numbers]
        columns = {name: [row[name] for row in rows] for name in ("data_source", "reward_model", "extra_info")}
        all_ids = [self._token_ids[self._starts[row] : self._starts[row + 1]].tolist() for row in row_numbers]
        return {**columns, "raw_prompt_ids": all_ids, "origin": [self._name(number) for number in row_numbers]}

    # --- the one pass over all rows -------------------------------------------------------------------------------

    def _check(self, num_rows: int) -> tuple[Lengths, str]:
        """The length of every prompt in tokens, and a digest of all tokens, which are kept. Raises DataError for bad
        rows."""
        lengths = np.zeros(num_rows, dtype=np.int64)
        data_sources: set[str] = set()
        digest = hashlib.blake2b(digest_size=16)
        problems: list[str] = []
        num_bad = 0
        for start in range(0, num_rows, _CHUNK_ROWS):
            names, prompts = [], []
            for number in range(start, min(start + _CHUNK_ROWS, num_rows)):
                try:
                    row = self._parse(number)
                except DataError as error:
                    num_bad += 1
                    problems += error.problems if num_bad <= MAX_PROBLEMS_SHOWN else ()
                    continue
                prompts.append(row[self._data.prompt_key])
                names.append(self._name(number))
                data_sources.add(row["data_source"])
            if num_bad:
                continue  # training cannot start, so only look for more bad rows
            for number, ids in enumerate(self._tokenize(prompts, names), start=start):
                lengths[number] = len(ids)
                digest.update(array("q", [len(ids), *ids]).tobytes())
                self._token_ids.extend(truncate(ids, self._data.max_prompt_length, self._data.truncation))
        if num_bad > MAX_PROBLEMS_SHOWN:
            problems.append(f"{self.key}: {num_bad - MAX_PROBLEMS_SHOWN} more of {num_rows} rows are bad")
        if problems:
            raise DataError(problems)
        for data_source in sorted(data_sources) if self._rule_decides else ():
            rule_for(data_source)
        return lengths, digest.hexdigest()

    def _choose(self, lengths: Lengths) -> npt.NDArray[np.intp]:
        """The numbers of the rows to use. Raises DataError if a prompt is too long and may not be cut or left out."""
        longest = self._data.max_prompt_length
        overlong = np.flatnonzero(lengths > longest)
        if not len(overlong) or (self._data.truncation != "error" and not self._data.filter_overlong_prompts):
            return np.arange(len(lengths))
        if not self._data.filter_overlong_prompts:
            more = f" ({len(overlong)} of {len(lengths)} prompts are too long, the longest has {lengths.max()})"
            raise DataError(
                f"{self._name(int(overlong[0]))}: the prompt has {lengths[overlong[0]]} tokens, more than "
                f"data.max_prompt_length={longest}{more if len(overlong) > 1 else ''}. Set data.max_prompt_length="
                f"{lengths.max()}, data.filter_overlong_prompts=true, or data.truncation=left, right or middle"
            )
        if len(overlong) == len(lengths):
            raise DataError(
                f"{self.key}: all {len(lengths)} prompts have more than data.max_prompt_length={longest} tokens "
                f"(the shortest has {lengths.min()}): data.filter_overlong_prompts=true leaves none; raise the length"
            )
        left_out = f"{len(overlong)} of {len(lengths)} prompts are longer than data.max_prompt_length={longest}"
        logger.warning("%s: %s and are left out", self.key, left_out)
        return np.flatnonzero(lengths <= longest)

    # --- one row --------------------------------------------------------------------------------------------------

    def _place(self, row_number: int) -> tuple[int, int]:
        """The index of a row's file, and the row's number in that file."""
        file = bisect_right(self._ends, row_number)
        return file, row_number - (self._ends[file - 1] if file else 0)

    def _name(self, row_number: int) -> str:
        file, number = self._place(row_number)
        return self._files[file].name(number)

    def _parse(self, row_number: int) -> Row:
        file, number = self._place(row_number)
        row = self._files[file].row(number)
        if problem := _problem_of(row, self._data.prompt_key, rule_decides=self._rule_decides):
            raise DataError(f"{self._files[file].name(number)}: {problem}")
        return {**row, "reward_model": row.get("reward_model") or {}, "extra_info": row.get("extra_info") or {}}

    def _tokenize(self, prompts: Sequence[Any], names: Sequence[str]) -> list[list[int]]:
        """Token ids of chats and of plain strings. A file may contain rows of both kinds."""
        chats = [
            render_chat(self._tokenizer, prompt, name)
            for prompt, name in zip(prompts, names, strict=True)
            if not isinstance(prompt, str)
        ]
        # A template writes special tokens itself; for a plain string the tokenizer adds them.
        ids_of_chats = self._encode(chats, add_special_tokens=False)
        ids_of_texts = self._encode([prompt for prompt in prompts if isinstance(prompt, str)], add_special_tokens=True)
        all_ids = [next(ids_of_texts if isinstance(prompt, str) else ids_of_chats) for prompt in prompts]
        for ids, name in zip(all_ids, names, strict=True):
            if not ids:
                raise DataError(f"{name}: {self._data.prompt_key} has no tokens; generation needs at least one")
        return all_ids

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> Iterator[list[int]]:
        if not texts:
            return iter(())
        encoded = self._tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return iter(encoded["input_ids"])


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], name: str) -> str:
    """The text of a chat, up to the start of the answer, as the tokenizer's template writes it."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{name}: the prompt is a chat, but the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "use a model with one (often named -Chat or -Instruct), or write the prompt as a plain string"
        )
    try:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        text.encode()  # fails if a message contains half of a surrogate pair
    except (TemplateError, ValueError, TypeError, KeyError) as error:  # a template may raise any of them
        raise DataError(f"{name}: the chat template of {tokenizer.name_or_path} rejects this chat: {error}") from error
    return text


def truncate(token_ids: list[int], max_length: int, mode: Truncation) -> list[int]:
    """Truncate to `max_length` tokens: `left` and `right` cut that end, `middle` keeps both ends."""
    if len(token_ids) <= max_length:
        return token_ids
    if mode == "left":
        return token_ids[-max_length:]
    if mode in ("right", "error"):  # with `error` a prompt that is too long is not used
        return token_ids[:max_length]
    num_first = max_length // 2
    return token_ids[:num_first] + token_ids[num_first - max_length :]


# --- what a row must contain --------------------------------------------------------------------------------------


class _Message(TypedDict):
    role: str
    content: str


_Text = Annotated[str, Field(min_length=1), Tag("text")]
_Chat = Annotated[list[_Message], Field(min_length=1), Tag("chat")]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)

    prompt: Annotated[_Text | _Chat, Discriminator(lambda prompt: "text" if isinstance(prompt, str) else "chat")]
    data_source: Annotated[str, Field(min_length=1)]  # with a length, pydantic checks the Unicode too
    reward_model: dict[str, Any] | None = None
    extra_info: dict[str, Any] | None = None


def _problem_of(row: Row, prompt_key: str, *, rule_decides: bool) -> str | None:
    """Why this row cannot be used; None if it can."""
    hints = {
        prompt_key: "data.prompt_key names the column with the prompt",
        "data_source": "It names the dataset, which selects the reward",
    }
    for name, hint in hints.items():
        if row.get(name) is None:
            return f"has no {name!r}; it has {', '.join(row)}. {hint}"
    try:
        _Row.model_validate({**row, "prompt": row[prompt_key]})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        names = [prompt_key if part == "prompt" else str(part) for part in found["loc"] if part not in ("text", "chat")]
        hint = "; a prompt is a string, or a list of messages {role, content}" if names[0] == prompt_key else ""
        value = "" if found["type"] == "missing" else f"={show(found['input'])}"
        return f"{'.'.join(names)}{value}: {found['msg']}{hint}"
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if rule_decides and truth is None:
        return "has no reward_model.ground_truth, which a rule compares with the response"
    if rule_decides and (rule := find_rule(row["data_source"])):
        try:
            rule("", truth)
        except DataError as error:
            return str(error)
    return None
