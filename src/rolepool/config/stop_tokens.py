"""The tokens that end a response, from the files of the model, without torch and transformers.

A chat model often has several: the end of a turn, the end of a text, the start of a tool's answer.
The tokenizer names only one of them, and the others are in config.json and generation_config.json.
Owns reading these files, and what the chat template writes at the end of a turn.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rolepool.config.model_files import ShapeUnknown, model_folder, read_model_file
from rolepool.config.schema import Config
from rolepool.errors import ConfigError
from rolepool.reading import read_small

KEY = "actor_rollout_ref.rollout.stop_token_ids"
MARK = "(the response)"
"""The text of a turn whose end is looked for."""
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
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
    more: Mapping[str, str] = field(default_factory=dict)
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
        words = []
        for number in self.ids:
            if number in names:
                words.append(f"{names[number]} ({number})")
            else:
                words.append(str(number))
        return ", ".join(words)

    def warnings(self) -> list[str]:
        """What most likely lets responses run past the end of a turn."""
        lines = []
        end = self.tokenizer_end
        if end is not None and not end.startswith(tuple(self._names())):
            lines.append(self._warning_about_end(end))
        if self.unused_strings:
            strings = ", ".join(map(repr, self.unused_strings))
            what = f"generation_config.json has stop_strings ({strings}), which are not used"
            lines.append(f"{what}: engines stop at tokens; set {KEY} if one of them is a token")
        return lines

    def _warning_about_end(self, end: str) -> str:
        """What to do if no stop token ends a turn of the chat template."""
        effect = "its responses run past the end of a turn"
        if len(end) <= MAX_SHOWN:
            shown = repr(end)
        else:
            shown = repr(f"{end[:MAX_SHOWN]}...")
        for name, number in self.tokenizer.ids.items():
            if end.startswith(name):
                shown = name or shown
                effect += f"; set {KEY}=[{number}]"
                break
        what = f"the chat template ends a turn with {shown}, which does not end a response"
        return f"{what}: {effect}"

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
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = json.dumps
        try:
            template = environment.from_string(self.tokenizer.chat_template)
            text = template.render(
                messages=CHAT,
                add_generation_prompt=False,
                **self.tokenizer.more,
            )
        # A template may raise any of them.
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
            return None
        _, mark, end = text.rpartition(MARK)
        if not mark:
            return None
        return end.strip() or None


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
        model_file = read_model_file(model.path, model.override_config)
        ids += end_tokens("config.json", model_file)
    generation = _read(model.path, "generation_config.json")
    ids += end_tokens("generation_config.json", generation)
    strings = generation.get("stop_strings") or ()
    if not isinstance(strings, list | tuple):
        strings = (strings,)
    return StopTokens(
        ids=united(ids, config.actor_rollout_ref.rollout.stop_token_ids),
        tokenizer=tokenizer,
        unused_strings=tuple(map(str, strings)),
    )


def end_tokens(file: str, content: Mapping[str, object]) -> list[int]:
    """The end tokens that a file of a model names."""
    text_config = content.get("text_config")
    written = content.get("eos_token_id")
    if written is None and isinstance(text_config, dict):  # of a model that also reads images
        written = text_config.get("eos_token_id")
    if written is None:
        return []
    numbers = written if isinstance(written, list) else [written]
    ids: list[int] = []
    for number in numbers:
        # `type`, because True is an int.
        if type(number) is not int or number < 0:
            raise ConfigError(
                f"{file}: eos_token_id={written} must be a number of a token, or a list of them; correct it"
            )
        ids.append(number)
    return ids


def united(*lists: Iterable[int]) -> tuple[int, ...]:
    """The numbers of all lists, each once, in the order in which they come first."""
    return tuple(dict.fromkeys(chain(*lists)))


def read_tokenizer_files(path: str | None) -> TokenizerFiles:
    settings = {
        **_read(path, "special_tokens_map.json"),
        **_read(path, "tokenizer_config.json"),
    }
    special_tokens = {}
    for name in SPECIAL_TOKENS:
        special_tokens[name] = _text_of(settings.get(name)) or ""
    tokenizer = _read(path, "tokenizer.json")
    return TokenizerFiles(
        eos_token=_text_of(settings.get("eos_token")),
        ids=_added_tokens(tokenizer, settings),
        chat_template=_text(path, "chat_template.jinja") or _template_in(settings),
        more=special_tokens,
    )


def _added_tokens(
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, int]:
    """The added tokens, from tokenizer.json as a list, and from tokenizer_config.json by number."""
    ids: dict[str, int] = {}
    for token in tokenizer.get("added_tokens") or ():
        text = str(token["content"])
        ids[text] = int(token["id"])
    by_number = settings.get("added_tokens_decoder") or {}
    for number, token in by_number.items():
        text = str(token["content"])
        ids[text] = int(number)
    return ids


def _template_in(settings: Mapping[str, Any]) -> str | None:
    """The chat template of tokenizer_config.json; of several, which have names, the default one."""
    template: str | list[dict[str, str]] | None = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    for named in template:
        if named.get("name") == "default":
            return named.get("template")
    return None


def _text_of(token: object) -> str | None:
    """A token is written as a text, or as an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _text(path: str | None, name: str) -> str | None:
    """The text of a file of a model; None if the model is not on this machine or does not have the
    file."""
    # RuntimeError: a home folder that does not exist.
    with suppress(OSError, ValueError, RuntimeError):
        folder = model_folder(path)
        if folder is not None:
            return read_small(folder / name, MAX_BYTES).decode()
    return None


def _read(path: str | None, name: str) -> dict[str, Any]:
    """The content of such a file; nothing if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        content = json.loads(_text(path, name) or "null")
        if isinstance(content, dict):
            return content
    return {}
