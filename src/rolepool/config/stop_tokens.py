"""The tokens that end a response, from the files of the model, without torch and transformers.

A chat model often has several: the end of a turn, the end of a text, the start of a tool's answer.
The tokenizer names only one of them, and the others are in config.json and generation_config.json.
Owns reading these files, and what the chat template writes at the end of a turn.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rolepool.config.model_files import ShapeUnknown, model_folder, read_model_file
from rolepool.config.schema import Config
from rolepool.errors import ConfigError
from rolepool.reading import read_small

MARK = "(the response)"
"""The text of a turn whose end is looked for."""
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
MAX_SHOWN = 40
MAX_BYTES = 2**28
"""Files of tokenizers have up to 40 MB."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of a tokenizer say about end tokens."""

    eos_token: str | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    """The added tokens, which have names such as "<|im_end|>"."""
    chat_template: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Names that the chat template may use, such as bos_token."""


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end a response."""

    ids: tuple[int, ...]
    tokenizer: TokenizerFiles = field(default_factory=TokenizerFiles)
    unused_strings: tuple[str, ...] = ()
    """The `stop_strings` of generation_config.json. Engines here read and return tokens, so they
    cannot use texts."""

    def in_words(self) -> str:
        """The tokens with their names, as far as they are known."""
        names = {number: name for name, number in self.tokenizer.ids.items()}
        shown = [f"{names[one]} ({one})" if one in names else str(one) for one in self.ids]
        return ", ".join(shown)

    def warnings(self) -> list[str]:
        """What most likely lets responses run past the end of a turn."""
        key = "actor_rollout_ref.rollout.stop_token_ids"
        lines = []
        end = self.tokenizer_end
        if end is not None and not any(end.startswith(name) for name in self._names()):
            token = next((name for name in self.tokenizer.ids if end.startswith(name)), None)
            shown = token or repr(end if len(end) <= MAX_SHOWN else f"{end[:MAX_SHOWN]}...")
            fix = "its responses run past the end of a turn"
            if token is not None:
                fix = f"{fix}; set {key}=[{self.tokenizer.ids[token]}]"
            lines.append(
                f"the chat template ends a turn with {shown}, which does not end a response: {fix}"
            )
        if self.unused_strings:
            strings = ", ".join(map(repr, self.unused_strings))
            what = f"generation_config.json has stop_strings ({strings}), which are not used"
            lines.append(f"{what}: engines stop at tokens; set {key} if one of them is a token")
        return lines

    def _names(self) -> list[str]:
        return [name for name, number in self.tokenizer.ids.items() if number in self.ids]

    @property
    def tokenizer_end(self) -> str | None:
        """What the chat template writes after a turn; None if it writes nothing or cannot be
        tried."""
        if self.tokenizer.chat_template is None:
            return None
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = json.dumps
        try:
            template = environment.from_string(self.tokenizer.chat_template)
            text = template.render(
                messages=CHAT, add_generation_prompt=False, **self.tokenizer.more
            )
        except (
            TemplateError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ):  # a template may raise any of them
            return None
        _, mark, end = text.rpartition(MARK)
        end = end.strip()
        return end if mark and end else None


def read_stop_tokens(config: Config) -> StopTokens:
    """The stop tokens of the policy. Raises ConfigError if a file has something else in their
    place.

    Files that are not on this machine are skipped: training reads them when it has downloaded the
    model.
    """
    model = config.actor_rollout_ref.model
    tokenizer = read_tokenizer_files(model.tokenizer)
    ids: list[int] = []
    if tokenizer.eos_token in tokenizer.ids:
        ids.append(tokenizer.ids[str(tokenizer.eos_token)])
    with suppress(ShapeUnknown):
        ids += end_tokens("config.json", read_model_file(model.path, model.override_config))
    generation = _read(model.path, "generation_config.json")
    ids += end_tokens("generation_config.json", generation)
    strings: Any = generation.get("stop_strings") or ()
    strings = (strings,) if isinstance(strings, str) else tuple(map(str, strings))
    return StopTokens(
        united(ids, config.actor_rollout_ref.rollout.stop_token_ids), tokenizer, strings
    )


def end_tokens(file: str, content: Mapping[str, Any]) -> list[int]:
    """The end tokens that a file of a model names."""
    text_config = content.get("text_config")
    written = content.get("eos_token_id")
    if written is None and isinstance(text_config, dict):  # of a model that also reads images
        written = text_config.get("eos_token_id")
    ids = written if isinstance(written, list) else [] if written is None else [written]
    if any(type(one) is not int or one < 0 for one in ids):
        raise ConfigError(
            f"{file}: eos_token_id={written} must be a number of a token, or a list of them; correct it"
        )
    return list(ids)


def united(*lists: Iterable[int]) -> tuple[int, ...]:
    """The numbers of all lists, each once, in the order in which they come first."""
    return tuple(dict.fromkeys(number for numbers in lists for number in numbers))


def read_tokenizer_files(path: str | None) -> TokenizerFiles:
    settings = {**_read(path, "special_tokens_map.json"), **_read(path, "tokenizer_config.json")}
    added = _read(path, "tokenizer.json").get("added_tokens") or []
    decoder = settings.get("added_tokens_decoder") or {}
    ids = {str(token["content"]): int(token["id"]) for token in added}
    ids |= {str(token["content"]): int(number) for number, token in decoder.items()}
    names = {
        name: _text_of(settings.get(name))
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    template = settings.get("chat_template")
    template = _text(path, "chat_template.jinja") or template
    if isinstance(template, list):  # several with names
        template = next(
            (one.get("template") for one in template if one.get("name") == "default"), None
        )
    return TokenizerFiles(
        names["eos_token"], ids, template, {name: text or "" for name, text in names.items()}
    )


def _text_of(token: Any) -> str | None:
    """A token is written as a text, or as an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _text(path: str | None, name: str) -> str | None:
    """The text of a file of a model; None if the model is not on this machine or does not have the
    file."""
    with suppress(
        OSError, ValueError, RuntimeError
    ):  # RuntimeError: a home folder that does not exist
        folder = model_folder(path)
        return None if folder is None else read_small(folder / name, MAX_BYTES).decode()
    return None


def _read(path: str | None, name: str) -> dict[str, Any]:
    """The content of such a file; nothing if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        content = json.loads(_text(path, name) or "null")
        if isinstance(content, dict):
            return content
    return {}
