"""The policy's tokenizer, or that of a reward model: loading it, and the tokens of chats and texts.

Owns how a chat becomes a text and which tokens of a text are left if it is too long. Does not know
files of prompts.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rolepool.config import show
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.files import BadRow, Row
from rolepool.errors import ConfigError, explained, one_line


def load_tokenizer(keys: PolicyModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer."""
    name = "path" if keys.tokenizer_path is None else "tokenizer_path"
    return tokenizer_at(f"actor_rollout_ref.model.{name}", keys.tokenizer, keys.trust_remote_code)


def tokenizer_at(name: str, path: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer at a path, which is the value of the key `name`. If it has no pad token, its
    end-of-sequence token is used."""
    key = f"{name}={show(path)}"
    place = str(Path(str(path)).expanduser())
    problem = f"{key}: no tokenizer can be loaded from there"
    # OSError: files are missing. ValueError, KeyError: they belong to something else.
    with explained(problem, "give a model folder", ValueError, KeyError):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place,
            trust_remote_code=trust_remote_code,
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}: its tokenizer has no end-of-sequence token, which responses need to end"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[list[int]]:
    """Token ids of chats and of plain strings. A file may contain rows of both kinds."""
    for is_chat, group in groupby(rows, key=itemgetter("is_chat")):
        texts = [row["text"] for row in group]
        # A template writes special tokens itself; for a plain string the tokenizer adds them.
        encoded = tokenizer(
            texts,
            add_special_tokens=not is_chat,
            return_attention_mask=False,
            verbose=False,
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
        written = tokenizer.apply_chat_template(
            chat, add_generation_prompt=answer is None, tokenize=False, **options
        )
        text = str(written)
        text.encode()  # fails if a message contains half of a surrogate pair
    # A template is a program, and may raise any of them.
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        template = f"the chat template of {tokenizer.name_or_path}"
        problem = f"{template} cannot write this chat: {one_line(error)}"
        model = "use a model with a chat template (often named -Chat or -Instruct)"
        fix = f"{model}, or write the prompt as a plain string"
        raise BadRow(f"{origin}: {problem}; {fix}", kind="chat template") from error
    return text


def truncate(token_ids: list[int], max_length: int, mode: str) -> list[int]:
    """Truncate to `max_length` tokens: `left` removes the first tokens, `middle` keeps both ends,
    others the first."""
    if len(token_ids) <= max_length:
        return token_ids
    num_last = 0
    if mode == "left":
        num_last = max_length
    elif mode == "middle":
        num_last = max_length - max_length // 2
    num_first = max_length - num_last
    first_of_last = len(token_ids) - num_last
    return token_ids[:num_first] + token_ids[first_of_last:]
