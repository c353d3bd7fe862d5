"""Prompts as token ids: rows of the data files, checked, put through the chat template and cut to length.

Owns what a row must hold and what happens to a prompt that is too long. Every row is read and tokenized once, when a
`PromptSet` is made, so that a bad one is reported before any process starts. The tokens stay in memory, four bytes
each; everything else is read again when a row is asked for.

Does not know epochs or batches, and of rewards only that there is one for every row.
"""

from __future__ import annotations

import hashlib
import logging
import reprlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.files import Row, open_rows
from rolepool.data.rewards import find_rule, rule_for
from rolepool.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Lengths = npt.NDArray[np.int64]
Truncation = Literal["error", "left", "right", "middle"]

MAX_PROBLEMS_SHOWN = 5
_CHUNK_ROWS = 1024  # rows tokenized at once: fast tokenizers spread a list over the cores


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row, ready to be generated from."""

    token_ids: list[int]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    origin: str
    """The file and where in it the row stands, for errors."""


def train_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.train_files`."""
    data = config.data
    return PromptSet("data.train_files", data.train_files, data.train_max_samples, config, tokenizer)


def val_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.val_files`."""
    return PromptSet("data.val_files", config.data.val_files, config.data.val_max_samples, config, tokenizer)


class PromptSet:
    """The prompts of one or more files, by number: those of the first file first, without the ones left out."""

    def __init__(
        self, key: str, files: Sequence[str], max_samples: int, config: Config, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if not files:
            raise ConfigError(f"{key}: is empty; name one or more .parquet or .jsonl files")
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

    def take(self, numbers: Sequence[int]) -> list[Prompt]:
        """The prompts with these numbers."""
        return [self._prompt(number) for number in self._rows[list(numbers)].tolist()]

    def _prompt(self, row_number: int) -> Prompt:
        row = self._parse(row_number)
        return Prompt(
            token_ids=self._token_ids[self._starts[row_number] : self._starts[row_number + 1]].tolist(),
            data_source=row["data_source"],
            reward_model=row["reward_model"],
            extra_info=row["extra_info"],
            origin=self._name(row_number),
        )

    # --- the one pass over all rows -------------------------------------------------------------------------------

    def _check(self, num_rows: int) -> tuple[Lengths, str]:
        """Every prompt's length in tokens, and a digest of all tokens, which are kept; bad rows are a DataError."""
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
                continue  # nothing will be generated from these files: look for more bad rows only
            for number, ids in enumerate(self._tokenize(prompts, names), start=start):
                lengths[number] = len(ids)
                digest.update(array("q", [len(ids), *ids]).tobytes())
                self._token_ids.extend(truncate(ids, self._data.max_prompt_length, self._data.truncation))
        if num_bad > MAX_PROBLEMS_SHOWN:
            problems.append(f"{self.key}: {num_bad - MAX_PROBLEMS_SHOWN} more rows are bad, of {num_rows}")
        if problems:
            raise DataError(problems)
        for data_source in sorted(data_sources) if self._rule_decides else ():
            rule_for(data_source)
        return lengths, digest.hexdigest()

    def _choose(self, lengths: Lengths) -> npt.NDArray[np.intp]:
        """The numbers of the rows that are used; a DataError when one is too long, or all of them are left out."""
        longest = self._data.max_prompt_length
        overlong = np.flatnonzero(lengths > longest)
        if not len(overlong) or (self._data.truncation != "error" and not self._data.filter_overlong_prompts):
            return np.arange(len(lengths))
        if not self._data.filter_overlong_prompts:
            more = f"; {len(overlong)} of {len(lengths)} prompts are, the longest has {lengths.max()}"
            raise DataError(
                f"{self._name(int(overlong[0]))}: the prompt has {lengths[overlong[0]]} tokens, more than "
                f"data.max_prompt_length={longest}{more if len(overlong) > 1 else ''}. Set data.max_prompt_length="
                f"{lengths.max()}, data.filter_overlong_prompts=true, or data.truncation=left, right or middle"
            )
        if len(overlong) == len(lengths):
            raise DataError(
                f"{self.key}: all {len(lengths)} prompts have more than data.max_prompt_length={longest} tokens "
                f"(the shortest {lengths.min()}), so data.filter_overlong_prompts=true leaves none; raise the length"
            )
        left_out = f"left out {len(overlong)} of {len(lengths)} prompts over data.max_prompt_length={longest}"
        logger.warning("%s: %s", self.key, left_out)
        return np.flatnonzero(lengths <= longest)

    # --- one row --------------------------------------------------------------------------------------------------

    def _place(self, row_number: int) -> tuple[int, int]:
        """The file of a row, and its number in that file."""
        file = bisect_right(self._ends, row_number)
        return file, row_number - (self._ends[file - 1] if file else 0)

    def _name(self, row_number: int) -> str:
        file, number = self._place(row_number)
        return self._files[file].name(number)

    def _parse(self, row_number: int) -> Row:
        file, number = self._place(row_number)
        row = self._files[file].row(number)
        if wrong := _what_is_wrong(row, self._data.prompt_key, rule_decides=self._rule_decides):
            raise DataError(f"{self._files[file].name(number)}: {wrong}")
        return {**row, "reward_model": row.get("reward_model") or {}, "extra_info": row.get("extra_info") or {}}

    def _tokenize(self, prompts: Sequence[Any], names: Sequence[str]) -> list[list[int]]:
        """Token ids of chats and of plain strings. Rows of both kinds may stand in one file."""
        chats = [
            render_chat(self._tokenizer, prompt, name)
            for prompt, name in zip(prompts, names, strict=True)
            if not isinstance(prompt, str)
        ]
        # The template writes special tokens itself; a plain string gets those that the tokenizer adds to any text.
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
    """The text of a chat with the opening of the answer, as the tokenizer's template writes it."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{name}: the prompt is a chat, but the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "use a model with one (mostly named -Chat or -Instruct), or write the prompt as a plain string"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError) as error:  # a template may raise what it likes
        raise DataError(f"{name}: the chat template of {tokenizer.name_or_path} refuses this chat: {error}") from error


def truncate(token_ids: list[int], max_length: int, mode: Truncation) -> list[int]:
    """Cut to `max_length` tokens: `left` and `right` say which end is lost, `middle` keeps both ends."""
    if len(token_ids) <= max_length:
        return token_ids
    if mode == "left":
        return token_ids[-max_length:]
    if mode in ("right", "error"):  # with `error` a prompt that is too long is not used
        return token_ids[:max_length]
    num_first = max_length // 2
    return token_ids[:num_first] + token_ids[num_first - max_length :]


# --- what a row must hold -----------------------------------------------------------------------------------------


def _what_is_wrong(row: Row, prompt_key: str, *, rule_decides: bool) -> str | None:
    """Why nothing can be generated from this row, or scored; None when it is well."""
    why = {
        prompt_key: "data.prompt_key names the column with the prompt",
        "data_source": "It names the set the row is from, and so the reward",
    }
    for name, hint in why.items():
        if row.get(name) is None:
            return f"has no {name!r}; it has {', '.join(row)}. {hint}"
    reward_model, extra_info = row.get("reward_model") or {}, row.get("extra_info") or {}
    wanted: list[tuple[str, Any, type | tuple[type, ...], str]] = [
        (prompt_key, row[prompt_key], (str, list), "a list of {role, content} or a string"),
        ("data_source", row["data_source"], str, "a string"),
        ("reward_model", reward_model, dict, "an object"),
        ("extra_info", extra_info, dict, "an object"),
    ]
    for name, value, types, words in wanted:
        if not isinstance(value, types):
            return f"{name} is {type(value).__name__} {reprlib.repr(value)}; it must be {words}"
    if not row[prompt_key]:
        return f"{prompt_key} is an empty {'string' if row[prompt_key] == '' else 'chat'}"
    for i, message in enumerate(row[prompt_key] if isinstance(row[prompt_key], list) else ()):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"{prompt_key}[{i}] is not a message {{role, content}}"
        if not isinstance(content := message.get("content"), str):
            return f"{prompt_key}[{i}].content is {type(content).__name__}; only text is supported"
    texts = {"data_source": [row["data_source"]], prompt_key: _texts_of(row[prompt_key])}
    if broken := [name for name, parts in texts.items() if not all(map(_is_unicode, parts))]:
        return (
            f"{broken[0]} holds half of a surrogate pair, which is no character; write the character itself, as UTF-8"
        )
    truth = reward_model.get("ground_truth")
    if rule_decides and truth is None:
        return "has no reward_model.ground_truth, which a rule compares the response to"
    if rule_decides and (rule := find_rule(row["data_source"])):
        try:
            rule("", truth)
        except DataError as error:
            return str(error)
    return None


def _texts_of(prompt: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [value for message in prompt for value in message.values() if isinstance(value, str)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
