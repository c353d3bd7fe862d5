"""Prompts as token ids: rows of the data files, checked, put through the chat template and cut to length.

Owns what a row must hold and what happens to a prompt that is too long. Every row is read and tokenized once when a
`PromptSet` is made, so that a bad one is reported before any process starts; what stays in memory is the numbers of
the rows that are used. Their tokens are made again when a row is asked for.

Does not know epochs or batches, and of rewards only that there is one for every row.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.files import Row, open_rows
from rolepool.data.rewards import rule_for
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
    return _prompts_of("train", config, config.data.train_files, config.data.train_max_samples, tokenizer)


def val_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.val_files`."""
    return _prompts_of("val", config, config.data.val_files, config.data.val_max_samples, tokenizer)


def _prompts_of(
    part: str, config: Config, files: Sequence[str], max_samples: int, tokenizer: PreTrainedTokenizerBase
) -> PromptSet:
    rule_decides = not config.reward_model.enable and config.custom_reward_function.path is None
    prompts = PromptSet(
        files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        filter_overlong_prompts=config.data.filter_overlong_prompts,
        max_samples=max_samples,
        prompt_key=config.data.prompt_key,
        needs_ground_truth=rule_decides,
        key=f"data.{part}_files",
    )
    if rule_decides:
        for data_source in sorted(prompts.data_sources):
            rule_for(data_source)
    return prompts


class PromptSet:
    """The prompts of one or more files, by number: those of the first file first, without the ones left out."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        truncation: Truncation = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        prompt_key: str = "prompt",
        needs_ground_truth: bool = True,
        key: str = "data.train_files",
    ) -> None:
        if not files:
            raise ConfigError(f"{key}: is empty; name one or more .parquet or .jsonl files")
        self.key = key
        self._tokenizer = tokenizer
        self._prompt_key = prompt_key
        self._needs_ground_truth = needs_ground_truth
        self._max_prompt_length = max_prompt_length
        self._truncation = truncation
        self._files = [
            open_rows(path, key, (prompt_key, "data_source", "reward_model", "extra_info")) for path in files
        ]
        self._ends = list(accumulate(len(file) for file in self._files))
        num_rows = self._ends[-1] if max_samples < 0 else min(max_samples, self._ends[-1])
        if num_rows == 0:
            raise DataError(f"{key}: there are no rows in {', '.join(files)}")
        lengths, self.digest, self.data_sources = self._check(num_rows)
        self._rows = self._choose(lengths, filter_overlong_prompts)
        logger.info("%s: %d prompts of up to %d tokens", key, len(self), lengths[self._rows].max())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Prompt:
        (prompt,) = self.take([number])
        return prompt

    def take(self, numbers: Sequence[int]) -> list[Prompt]:
        """The prompts with these numbers, tokenized together."""
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"there is no prompt {number}; {self.key} holds {len(self)}")
        names, parsed = [], []
        for row_number in (int(self._rows[number]) for number in numbers):
            names.append(self._name(row_number))
            parsed.append(self._parse(row_number))
        all_ids = self._tokenize([row[self._prompt_key] for row in parsed], names)
        return [
            Prompt(
                token_ids=truncate(ids, self._max_prompt_length, self._truncation),
                data_source=row["data_source"],
                reward_model=row["reward_model"],
                extra_info=row["extra_info"],
                origin=name,
            )
            for ids, row, name in zip(all_ids, parsed, names, strict=True)
        ]

    # --- the one pass over all rows -------------------------------------------------------------------------------

    def _check(self, num_rows: int) -> tuple[Lengths, str, frozenset[str]]:
        """Every prompt's length in tokens, a digest of all tokens, and the data sources; bad rows are a DataError."""
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
                prompts.append(row[self._prompt_key])
                names.append(self._name(number))
                data_sources.add(row["data_source"])
            if num_bad:
                continue  # nothing will be generated from these files: look for more bad rows only
            for number, ids in enumerate(self._tokenize(prompts, names), start=start):
                lengths[number] = len(ids)
                digest.update(array("q", [len(ids), *ids]).tobytes())
        if num_bad > MAX_PROBLEMS_SHOWN:
            problems.append(f"{self.key}: {num_bad - MAX_PROBLEMS_SHOWN} more rows are bad, of {num_rows}")
        if problems:
            raise DataError(problems)
        return lengths, digest.hexdigest(), frozenset(data_sources)

    def _choose(self, lengths: Lengths, filter_overlong_prompts: bool) -> npt.NDArray[np.intp]:
        """The numbers of the rows that are used; a DataError when one is too long, or all of them are left out."""
        longest = self._max_prompt_length
        overlong = np.flatnonzero(lengths > longest)
        if not len(overlong) or (self._truncation != "error" and not filter_overlong_prompts):
            return np.arange(len(lengths))
        if not filter_overlong_prompts:
            raise DataError(_too_long(self._name(int(overlong[0])), lengths, overlong, longest))
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
        if wrong := _what_is_wrong(row, self._prompt_key, self._needs_ground_truth):
            raise DataError(f"{self._files[file].name(number)}: {wrong}")
        return {**row, "reward_model": row.get("reward_model") or {}, "extra_info": row.get("extra_info") or {}}

    def _tokenize(self, prompts: Sequence[Any], names: Sequence[str]) -> list[list[int]]:
        """Token ids of chats and of plain strings. Rows of both kinds may stand in one file."""
        chats = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
        texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        all_ids: list[list[int]] = [[] for _ in prompts]
        # The template writes special tokens itself; a plain string gets those that the tokenizer adds to any text.
        rendered = [render_chat(self._tokenizer, prompts[i], names[i]) for i in chats]
        for i, ids in zip(chats, self._encode(rendered, add_special_tokens=False), strict=True):
            all_ids[i] = ids
        for i, ids in zip(texts, self._encode([prompts[i] for i in texts], add_special_tokens=True), strict=True):
            all_ids[i] = ids
        for ids, name in zip(all_ids, names, strict=True):
            if not ids:
                raise DataError(f"{name}: {self._prompt_key} has no tokens; generation needs at least one")
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
    if mode == "right":
        return token_ids[:max_length]
    if mode == "middle":
        num_first = max_length // 2
        return token_ids[:num_first] + token_ids[num_first - max_length :]
    raise DataError(f"a prompt of {len(token_ids)} tokens is longer than data.max_prompt_length={max_length}")


def _too_long(first: str, lengths: Lengths, overlong: npt.NDArray[np.intp], max_length: int) -> str:
    more = (
        f"; {len(overlong)} of {len(lengths)} prompts are, the longest has {lengths.max()}" if len(overlong) > 1 else ""
    )
    return (
        f"{first}: the prompt has {lengths[overlong[0]]} tokens, more than data.max_prompt_length={max_length}{more}. "
        f"Set data.max_prompt_length={lengths.max()}, data.filter_overlong_prompts=true, or data.truncation=left, "
        "right or middle"
    )


# --- what a row must hold -----------------------------------------------------------------------------------------


def _what_is_wrong(row: Row, prompt_key: str, needs_ground_truth: bool) -> str | None:
    """Why nothing can be generated from this row, or scored; None when it is well."""
    checks: list[Callable[[], str | None]] = [
        lambda: _about_the_prompt(row, prompt_key),
        lambda: _about_the_source(row),
        lambda: _about_the_reward(row, needs_ground_truth),
        lambda: _wrong_type("extra_info", row.get("extra_info") or {}, dict),
    ]
    return next((wrong for check in checks if (wrong := check())), None)


def _about_the_prompt(row: Row, key: str) -> str | None:
    prompt = row.get(key)
    if prompt is None:
        return f"has no {key!r}; it has {', '.join(row)}. data.prompt_key names the column with the prompt"
    if isinstance(prompt, str):
        return None if prompt else f"{key} is an empty string"
    if not isinstance(prompt, list):
        return f"{key} is {_kind(prompt)}; it must be a list of {{role, content}} or a string"
    if not prompt:
        return f"{key} is an empty chat"
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"{key}[{i}] is not a message {{role, content}}"
        if not isinstance(message.get("content"), str):
            return f"{key}[{i}].content is {_kind(message.get('content'))}; only text is supported"
    return None


def _about_the_source(row: Row) -> str | None:
    if row.get("data_source") is None:
        return f"has no 'data_source'; it has {', '.join(row)}. It names the set the row is from, and so the reward"
    return _wrong_type("data_source", row["data_source"], str)


def _about_the_reward(row: Row, needs_ground_truth: bool) -> str | None:
    reward_model = row.get("reward_model")
    if wrong := _wrong_type("reward_model", reward_model or {}, dict):
        return wrong
    if needs_ground_truth and (reward_model or {}).get("ground_truth") is None:
        return "has no reward_model.ground_truth, which a rule compares the response to"
    return None


def _wrong_type(name: str, value: Any, wanted: type) -> str | None:
    kind = "a string" if wanted is str else "an object"
    return None if isinstance(value, wanted) else f"{name} is {_kind(value)}; it must be {kind}"


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
