"""From YAML files and `key=value` overrides to a checked Config, or to a list of all problems.

Owns merging, `${...}` references (with OmegaConf), what a key means, the messages about single
keys, and the decision about keys of other trainers (the table is `other_keys.yaml`). Rules about
combinations of keys are in `schema`.
"""

import copy
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rolepool.config.base import Items, Section, lines_of, read_table
from rolepool.config.fitting import FITTED_TO, fitted_defaults, num_slots
from rolepool.config.functions import (
    ANY_NAME,
    EXTENDABLE,
    EXTENDABLE_NAMES,
    EXTENSIONS,
    OTHER_ENGINES,
    import_extensions,
)
from rolepool.config.other_names import Hint, hint_for_key
from rolepool.config.schema import Config, all_keys, all_sections, contradictions
from rolepool.config.sources import load_file
from rolepool.errors import ConfigError, collected, explained, first_few, one_line

KEY_PATTERN = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
MIN_SIMILARITY = 0.9
"""How similar a key must be to the one that the user wrote. 1.0 is equal."""
NULL_IS_UNSET = ("reward_model.", "custom_reward_function.")
"""Sections in which null in a file means that the key is not set: newer files of verl have these
sections twice."""
READ_AS_A_WHOLE = ("placement.split", "placement.roles", "roles")
"""Sections that are not read key by key."""
REFERENCE = re.compile(r"\$\{\s*([\w.-]+)\s*\}")
UNPARSABLE = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)


FALLBACK = "set actor_rollout_ref.rollout.fallback=native to generate with rolepool's own engine"


@dataclass(frozen=True)
class PlainValues:
    """Keys and values that are taken as they are, such as those of a run folder.

    `${...}` in them is text, the extensions that they name are not imported, and names that only
    such an extension has are kept.
    """

    values: Mapping[str, Any]


ConfigSource = str | Mapping[str, Any] | PlainValues


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and which keys the user set in files or overrides."""

    config: Config
    """The values, such as `config.trainer.save_freq`."""
    set_keys: frozenset[str]
    """The keys that files or overrides set; all others have their defaults."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Why a setting (`key=value`) that was accepted changes nothing."""
    warnings: Sequence[str] = ()
    """A line for each accepted setting that asks for something that training does not do."""
    unknown_names: Sequence[str] = ()
    """Keys and names in plain values that only an extension has, and that extension was not
    imported."""

    def value_of(self, path: str) -> Any:
        """The value of a key as plain data."""
        return reduce(getitem, path.split("."), self.config.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Every key with its value, in a form that can be used as a config file."""
        values = escaped(self.config.model_dump(mode="json"))
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def why_not_trained(self) -> list[str]:
        """A line for each key that can be planned, but not trained."""
        return lines_of(*(rule(self.config) for rule in NOT_TRAINED))

    def notes(self) -> list[str]:
        """A line that lists the settings that were accepted and change nothing, if there are
        any."""
        names = first_few([setting.partition("=")[0] for setting in self.without_effect], 3)
        return (
            [f"no effect here: {names}; `rolepool config` with the same arguments says why"]
            if names
            else []
        )

    def explain(self, path: str) -> str:
        """Meaning, type, default and current value of a key; for a section, one entry for each of
        its keys."""
        below = [key for key in all_keys().values() if key.path.startswith(f"{path}.")]
        if below:
            return "\n".join(
                f"{key.path} = {show(self.value_of(key.path))}\n  {key.doc}" for key in below
            )
        if path not in all_keys():
            raise ConfigError(f"{show(path)}: {unknown_key(path)}")
        key = all_keys()[path]
        lines = [f"{path} = {show(self.value_of(path))}", key.doc, f"type: {key.type_text}"]
        return "\n  ".join([*lines, f"default: {show(key.default)}"])


@dataclass(frozen=True)
class Draft:
    """A config as it was read, and the problems that were found so far.

    Keys with a wrong value have no value here: reading one raises UnknownValue, which ends the
    check that needs it.
    """

    loaded: LoadedConfig
    problems: Sequence[str]

    def with_problems(self, problems: Iterable[str], wrong_keys: Iterable[str] = ()) -> "Draft":
        """The same with further problems, because of which these keys have no value."""
        config = _without(self.loaded.config, frozenset(wrong_keys))
        return Draft(replace(self.loaded, config=config), (*self.problems, *problems))

    def checked(self, *more: str) -> LoadedConfig:
        """The config. Raises ConfigError if there are problems, with `more` problems after them."""
        ConfigError.raise_if_any(dict.fromkeys([*self.problems, *more]))
        return self.loaded


def load_config(files: Iterable[ConfigSource] = (), overrides: Iterable[str] = ()) -> LoadedConfig:
    """Merge defaults, files from left to right and overrides, then check. Raises ConfigError with
    all problems.

    A file may also be the name of a recipe, or a mapping with keys and values. A name in a mapping
    may be a dotted key. PlainValues are a mapping whose values are taken as they are.
    """
    return read_config(files, overrides).checked()


def read_config(files: Iterable[ConfigSource] = (), overrides: Iterable[str] = ()) -> Draft:
    """The same, but it raises nothing, so that the caller can report problems of other kinds
    together with these."""
    overrides = list(overrides)
    extensions = _own_extensions(overrides)
    reading = _Reading(sources_import=not extensions)
    for (
        text
    ) in extensions:  # first of all, because other overrides may set keys that an extension adds
        with collected([]):  # a text that is no override is reported below
            reading.import_extensions(_parse_override(text))
    for file in files:
        if isinstance(file, str):
            reading.add_file(file)
        elif isinstance(file, PlainValues):
            reading.add_plain_values(file.values)
        else:
            reading.add_values(file)
    for text in overrides:
        reading.add_override(text)
    return reading.draft()


def import_own_extensions(overrides: Iterable[str]) -> None:
    """Import the extensions that the user names in these overrides, before a run is read that needs
    them."""
    for text in _own_extensions(overrides):
        import_extensions(dict(_flatten(_parse_override(text)))["trainer.extensions"])


def _own_extensions(overrides: Iterable[str]) -> list[str]:
    """The last override that names extensions, if there is one."""
    return [text for text in overrides if text.lstrip("+").startswith("trainer.extensions=")][-1:]


class _Reading:
    """What files and overrides say, and which problems they have. A later one wins over an earlier
    one."""

    def __init__(self, sources_import: bool) -> None:
        self._sources_import = sources_import
        """Whether extensions that a file or override names are imported when it is read."""
        self._leaves: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._problems: list[str] = []
        self._unknown = set[str]()
        """The keys whose values are not known, because what the user wrote cannot be read."""
        self._meant = set[str]()
        """The keys that are offered in place of names that do not exist."""
        self._has_unread_file = self._lacks_extension = False
        self._keeps_names = False
        """Whether names that are not known are kept, because an extension that was not imported may
        have them."""
        self._unknown_names: list[str] = []
        """Those names, with their keys."""

    def add_file(self, file: str) -> None:
        try:
            self._add(_read_file(file), null_is_unset=True)
        except ConfigError as error:
            self._problems.extend(error.problems)
            self._has_unread_file = True

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Add what a Python program set."""
        tree: dict[str, Any] = {}
        for name, value in values.items():
            self._unknown.add(renamed(str(name)))
            with collected(self._problems):
                tree[str(name)] = _read_value(name, value)
                self._unknown.discard(renamed(str(name)))
        self._add(tree, null_is_unset=True)

    def add_plain_values(self, values: Mapping[str, Any]) -> None:
        """Add values as they are. If they name an extension that was not imported, names are kept
        that it may have."""
        names = dict(_flatten(dict(values))).get("trainer.extensions") or ()
        names = [names] if isinstance(names, str) else names
        if isinstance(names, list | tuple) and any(name not in EXTENSIONS for name in names):
            self._lacks_extension = self._keeps_names = True
        imports, self._sources_import = self._sources_import, False
        self._add(_mapped(escaped(dict(values)), _with_missing_escaped), null_is_unset=True)
        self._sources_import = imports

    def add_override(self, text: str) -> None:
        try:
            self._add(_parse_override(text))
        except ConfigError as error:
            self._problems.extend(error.problems)
            self._unknown.add(renamed(text.partition("=")[0].strip().lstrip("+~")))

    def import_extensions(self, tree: dict[str, Any]) -> None:
        """Import the modules that `trainer.extensions` names, if it is well-formed. They may add
        keys and names."""
        names = dict(_flatten(tree)).get("trainer.extensions", ())
        names = [names] if isinstance(names, str) else names
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            for name in names:
                try:
                    import_extensions([name])
                except ConfigError as error:
                    self._problems.extend(error.problems)
                    self._lacks_extension = True

    def draft(self) -> Draft:
        """The config of all that was added."""
        for path in [path for path, value in self._leaves.items() if value == "???"]:
            del self._leaves[path]
            self._unknown.add(path)
            self._problems.append(
                f"{path}=???: has no value yet; set one, or remove the key to use its default"
            )
        resolved, broken = _resolve(self._leaves, self._others, self._problems)
        without_effect, warnings = _judge(self._others, resolved, self._problems)
        config, wrong = _validate(resolved, broken, self._leaves, keeps_names=self._keeps_names)
        self._problems.extend(line for path, line in wrong if not self._may_be_added(path))
        if fitted := fitted_defaults(config, self._leaves):
            fitting = _set_all(resolved, fitted)
            config, _ = _validate(fitting, broken, self._leaves, keeps_names=self._keeps_names)
        without_effect |= _unused(config, self._leaves)
        unset = all_keys().keys() - self._leaves.keys()
        unknown: Set[str] = broken | (self._unknown & all_keys().keys()) | (self._meant & unset)
        if unknown:
            unknown = _with_followers(unknown, resolved, unset)
        config = _without(config, unknown)
        self._problems.extend(contradictions(config))
        if self._has_unread_file:  # it may set all other keys
            config = _without(config, unset - unknown)
        if self._keeps_names:
            self._unknown_names.extend(_unknown_functions(resolved))
        names = tuple(self._unknown_names)
        loaded = LoadedConfig(config, frozenset(self._leaves), without_effect, warnings, names)
        return Draft(loaded, tuple(dict.fromkeys(self._problems)))

    def _add(self, tree: dict[str, Any], *, null_is_unset: bool = False) -> None:
        if self._sources_import:
            self.import_extensions(tree)
        for path, value in _flatten(tree):
            if value is None and null_is_unset and path.startswith(NULL_IS_UNSET):
                continue
            if path in all_keys():
                self._leaves[path] = _merged(self._leaves.get(path), _usual(path, value), path)
            elif path not in all_sections() and find_other(path) is not None:
                self._others[path] = value
            elif self._may_be_added(path):
                self._unknown_names.append(f"{path}={show(value)}")
            else:
                self._problems.append(f"{show(path)}={show(value)}: {unknown_key(path)}")
                self._meant.update(keys_meant_by(path))

    def _may_be_added(self, path: str) -> bool:
        """Whether an extension that could not be imported may have added this key or its value."""
        return self._lacks_extension and path.startswith(EXTENDABLE)


def show(value: Any) -> str:
    """A value on one line, as a user would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        text = "[" + ",".join(show(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{show(name)}:{show(item)}" for name, item in value.items()) + "}"
    else:
        text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(path: str) -> str:
    """Why this name cannot be set, and the keys of the section, or the key that the user most
    likely means."""
    if path in all_sections():
        examples = ", ".join([key for key in all_keys() if key.startswith(f"{path}.")][:2])
        return f"is a section; set one of its keys, such as {examples}"
    meant = _meant_by(path)
    if not meant:
        return "unknown key; `rolepool config` lists all keys"
    return f"unknown key; did you mean {meant[0].key}{meant[0].remark}?"


def keys_meant_by(path: str) -> list[str]:
    """The keys that the user may mean by a name that does not exist, the most likely one first."""
    return [hint.key for hint in _meant_by(path)]


def _meant_by(path: str) -> list[Hint]:
    keys, leaf = list(all_keys()), path.rpartition(".")[2]
    named = hint_for_key(path)
    if named is not None:
        return [named]
    without_first_sections = [key for key in keys if key.endswith(f".{path}")]
    similar = difflib.get_close_matches(path, keys, n=1, cutoff=MIN_SIMILARITY)
    in_other_sections = [key for key in keys if "_" in leaf and key.endswith(f".{leaf}")]
    only_one = in_other_sections if len(in_other_sections) == 1 else []
    likely = without_first_sections or similar
    return (
        [Hint(key, "") for key in likely]
        or _meant_by_end_of(path)
        or [Hint(key, "") for key in only_one]
    )


def _meant_by_end_of(path: str) -> list[Hint]:
    """The key for the end of a dotted name that begins with a section: `trainer.max_steps` is
    `max_steps`. A key of the same section is preferred: `critic.learning_rate` is
    `critic.optim.lr`, and not that of the actor."""
    words = path.split(".")
    for first in range(1, len(words)):
        hint, section = hint_for_key(".".join(words[first:])), ".".join(words[:first])
        if hint is not None and section in all_sections():
            leaf = hint.key.rpartition(".")[2]
            in_section = [
                key
                for key in all_keys()
                if key.startswith(f"{section}.") and key.endswith(f".{leaf}")
            ]
            is_of_section = not in_section or hint.key in in_section
            return [hint] if is_of_section else [Hint(key, "") for key in in_section]
    return []


# Text with references in it

_REFERENCE_START = re.compile(r"(\\*)\$\{")


def escaped(value: Any) -> Any:
    """The value, with texts such as `${x}` written so that they stay text when they are read as a
    config."""
    return _mapped(
        value, lambda text: _REFERENCE_START.sub(lambda found: f"{found[1]}{found[1]}\\${{", text)
    )


def _with_missing_escaped(text: str) -> str:
    """The text, written so that OmegaConf does not take it for its mark of a missing value."""
    return f"\\{text}" if text.endswith("???") and not text[:-3].strip("\\") else text


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed."""
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Writes YAML that OmegaConf reads as the same values. It takes more words for numbers than
    PyYAML does."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Texts that look like numbers are quoted, and those with line breaks are escaped: YAML would
    fold some of them."""
    style = None if text.isprintable() else '"'
    with suppress(ValueError):
        float(text.replace("_", ""))
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


# Reading files and overrides


def _read_file(file: str) -> dict[str, Any]:
    fix = "give a YAML file, or key=value for an override; `rolepool recipes` lists the recipes"
    with explained(f"config file {show(file)}: cannot be read", fix, *UNPARSABLE):
        try:
            content = _plain(load_file(file))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise ConfigError(
                f"config file {show(file)}{where}: not valid YAML ({error.problem}); fix it"
            ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"config file {show(file)}: must contain keys and values, not a list")
    return {str(name): value for name, value in content.items()}


def _read_value(name: object, value: Any) -> Any:
    """A value that a Python program set, as plain data: paths become texts, and tuples become
    lists."""
    with explained(
        f"{name}={show(value)}: cannot be stored",
        "use texts, numbers, lists and dicts",
        *UNPARSABLE,
    ):
        return json.loads(json.dumps(value, default=os.fspath))


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as `{a: {b: c}}`. Hydra's `+a.b=c` and `++a.b=c` mean the same."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if path.startswith("~"):
        raise ConfigError(
            f"{show(text)}: keys cannot be deleted; do not set {show(path[1:])} to use its default"
        )
    path = renamed(path.removeprefix("+").removeprefix("+"))
    if not equals or not KEY_PATTERN.fullmatch(path):
        raise ConfigError(
            f"{show(text)}: not an override; write key=value, such as trainer.nnodes=2"
        )
    stripped, key = value.strip(), all_keys().get(path)
    with explained(
        f"{path}={show(value)}: not valid YAML or ${{...}}", "put text in quotes", *UNPARSABLE
    ):
        if (
            key is not None
            and key.is_text
            and stripped[:1] not in ("'", '"')
            and stripped not in ("null", "~")
        ):
            tree = OmegaConf.create()  # an unquoted word stays text for a text key
            OmegaConf.update(tree, path, stripped)
        else:
            if stripped[:1] in (
                "{",
                "[",
            ):  # `{a:1}` needs no space after the colon; in a list, `my.py:f` is text
                mapping = r"\{[^{}]*\}" if stripped[:1] == "[" else r"(?s).+"
                value = re.sub(
                    mapping,
                    lambda found: re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", found[0]),
                    value,
                )
            tree = OmegaConf.from_dotlist([f"{path}={value}"])
        return dict(_plain(OmegaConf.to_container(tree, resolve=False)))


def _plain(value: Any) -> Any:
    """The value, if it can be printed and stored; bytes and very long numbers raise an error."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path, under rolepool's names. A key whose value is a mapping is one leaf."""
    for name, value in tree.items():
        path = renamed(f"{prefix}{name}")
        if value is None and path != f"{prefix}{name}":
            continue  # another name that is not used
        if isinstance(value, dict) and (
            path in all_sections() or (value and path not in all_keys())
        ):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _usual(path: str, value: Any) -> Any:
    """The value in rolepool's own words."""
    words = VERL_KEYS.same_values.get(path, {})
    return words.get(value, value) if isinstance(value, str | int | None) else value


def _merged(old: Any, new: Any, path: str = "") -> Any:
    """The new value; mappings are merged, so that a file or override may set one entry of them."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if path == "placement.pools":  # a pool may also be written as a list
        old = {
            name: {"per_node": pool} if isinstance(pool, list) else pool
            for name, pool in old.items()
        }
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


# Values that can be planned, but not trained


def _about_lora(config: Config) -> Iterator[str]:
    if lora_rank := config.actor_rollout_ref.model.lora_rank:
        yield f"actor_rollout_ref.model.lora_rank={lora_rank}: not implemented yet, only 0 works; remove it"


def _about_engine(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.engine in OTHER_ENGINES:
        yield f"actor_rollout_ref.rollout.name={rollout.name}: not implemented yet; {FALLBACK}"
    if rollout.engine == "transformers" and (size := rollout.tensor_model_parallel_size) > 1:
        key, fix = (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
            "use 1, or rollout.name=native",
        )
        yield f"{key}: the transformers engine has all weights in one process; {fix}"
    if rollout.engine == "vllm" and not Path(rollout.vllm_python).expanduser().is_file():
        where = f"there is no actor_rollout_ref.rollout.vllm_python={rollout.vllm_python}"
        fix = f"run scripts/setup_vllm.sh, which makes .venv-vllm, or {FALLBACK}"
        yield f"actor_rollout_ref.rollout.name=vllm: {where}; {fix}"


def _about_validation(config: Config) -> Iterator[str]:
    for key in ("trainer.test_freq", "trainer.val_only"):
        if (config.at(key) or 0) > 0 and not config.data.val_files:
            fix = f"set data.val_files, or remove {key}"
            yield f"{key}={show(config.at(key))}: there are no validation prompts; {fix}"


def _about_loggers(config: Config) -> Iterator[str]:
    for name in config.trainer.logger:
        if name in ("tensorboard", "wandb", "mlflow") and find_spec(name) is None:
            fix = f"pip install 'rolepool[{name}]', or remove it from the list"
            yield f"trainer.logger: {name} is not installed; {fix}"


NOT_TRAINED = (_about_lora, _about_engine, _about_validation, _about_loggers)


# Resolving and validating


@lru_cache(maxsize=1)
def _defaults(paths: tuple[str, ...]) -> DictConfig:
    """The default of every key; a default that follows another key is a `${...}`."""
    return _set_all(OmegaConf.create(), {path: all_keys()[path].default for path in paths})


def _set_all(tree: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Set these keys of the tree, and return it."""
    for path, value in values.items():
        OmegaConf.update(tree, path, value, merge=False, force_add=True)
    return tree


def _resolve(
    leaves: dict[str, Any], others: dict[str, Any], problems: list[str]
) -> tuple[DictConfig, set[str]]:
    """The defaults, replaced by the user's values; and the keys whose `${...}` cannot be resolved.

    A reference may also name a key that rolepool does not have, if the user set it. Values of
    `others` are resolved in place.
    """
    tree, broken = _set_all(copy.deepcopy(_defaults(tuple(all_keys()))), leaves), set[str]()
    whole = _set_all(copy.deepcopy(tree), others)
    for path, value in others.items():
        with suppress(*UNPARSABLE):
            others[path] = _resolved(whole, path) if "${" in str(value) else value
    references = {path: value for path, value in leaves.items() if "${" in str(value)}
    for path, value in references.items():
        try:
            _resolved(tree, path)
        except UNPARSABLE as error:
            try:
                OmegaConf.update(tree, path, _resolved(whole, path), merge=False)
            except UNPARSABLE:
                problems.append(
                    f"{path}={show(value)}: the reference cannot be resolved ({one_line(error)})"
                )
                broken.add(path)
    return tree, broken


def _resolved(tree: DictConfig, path: str) -> Any:
    value = OmegaConf.select(tree, path, throw_on_resolution_failure=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _judge(
    others: dict[str, Any], tree: DictConfig, problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Check the keys that rolepool does not have. Returns why each accepted one has no effect, and
    warnings.

    `tree` has the values of rolepool's own keys.
    """
    accepted, warnings = dict[str, str](), list[str]()
    for path, value in others.items():
        other, setting = find_other(path), f"{path}={show(value)}"
        assert other is not None
        is_off = other.is_off(value) or (
            other.same_as is not None and value == OmegaConf.select(tree, other.same_as)
        )
        if other.works == "if_off" and not is_off:
            problems.append(f"{setting}: not supported: {other.reason}")
            continue
        accepted[setting] = other.reason
        if other.works == "warned" and not is_off:
            warnings.append(f"{setting}: no effect: {other.reason}")
    return accepted, warnings


def _unused(config: Config, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Why settings of rolepool's own keys have no effect in this config."""
    unused: dict[str, str] = {}
    for key, value in leaves.items():
        # A size of micro-batches in sequences, and the key of its section that limits them by
        # tokens instead.
        switch = re.sub(r"(ppo_|forward_)?micro_batch_size_per_gpu$", "use_dynamic_bsz", key)
        if switch != key and switch in all_keys() and value is not None and config.at(switch):
            unused[f"{key}={show(value)}"] = f"{switch}=true limits micro-batches by tokens"
    rollout = config.actor_rollout_ref.rollout
    if rollout.engine_kwargs.vllm and rollout.engine != "vllm":
        unused["actor_rollout_ref.rollout.engine_kwargs.vllm"] = f"the engine is {rollout.engine}"
    if not config.uses_critic:
        critics = {
            key: value
            for key, value in leaves.items()
            if key.startswith("critic.") and key != "critic.enable"
        }
        unused |= {f"{key}={show(value)}": "there is no critic" for key, value in critics.items()}
    trainer = config.trainer
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        reason = f"trainer.resume_mode={trainer.resume_mode} does not use it"
        unused[f"trainer.resume_from_path={trainer.resume_from_path}"] = reason
    if rollout.engine != rollout.name:
        unused[f"actor_rollout_ref.rollout.name={rollout.name}"] = (
            f"fallback={rollout.engine} generates"
        )
    return unused


def _validate(
    tree: DictConfig, broken: set[str], leaves: dict[str, Any], *, keeps_names: bool
) -> tuple[Config, list[tuple[str, str]]]:
    """Check every key; with `keeps_names`, functions may have any names. Returns the config, and
    the wrong keys that the user set with a line for each problem.

    Wrong keys are added to `broken` and get their defaults, so that the rest can be checked too. A
    key that follows a wrong key is wrong too, but the user did not write it: only the written key
    is reported.
    """
    _set_all(tree, {path: all_keys()[path].default for path in broken})
    if tree.trainer.n_gpus_per_node is None:
        tree.trainer.n_gpus_per_node = num_slots(tree.trainer.device)
    try:
        return Config.model_validate(
            OmegaConf.to_container(tree, resolve=True), context={ANY_NAME: keeps_names}
        ), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    lines: list[tuple[str, str]] = []
    for item in items:
        place = "".join(f"{part}." for part in item["loc"])
        leaf = next(path for path in all_keys() if place.startswith(f"{path}."))
        broken.add(leaf)
        if leaf in leaves:
            lines.append((leaf, _sentence(leaf, item)))
    config, _ = _validate(tree, broken, leaves, keeps_names=keeps_names)
    return config, lines


def _unknown_functions(tree: DictConfig) -> Iterator[str]:
    """The keys that name a function that is not known here, if it is not a `module:function`."""
    for key, known in EXTENDABLE_NAMES.items():
        name = str(OmegaConf.select(tree, key))
        if name not in known and ":" not in name:
            yield f"{key}={show(name)}"


def _with_followers(unknown: Set[str], tree: DictConfig, unset: Set[str]) -> Set[str]:
    """These keys, and all keys whose value depends on one of them."""
    depends_on: dict[str, set[str]] = {}
    for path, value in _flatten(dict(_plain(OmegaConf.to_container(tree, resolve=False)))):
        depends_on[path] = set(REFERENCE.findall(str(value)))
    for path in unset & FITTED_TO.keys():
        depends_on[path].update(FITTED_TO[path])
    while followers := {path for path, keys in depends_on.items() if keys & unknown} - unknown:
        unknown = unknown | followers
    return unknown


def _without(config: Config, unknown: Set[str]) -> Config:
    """The config without the values of these keys. Some sections are only read as a whole, and are
    removed as such."""
    names = set[str]()
    for path in unknown:
        wholes = [section for section in READ_AS_A_WHOLE if path.startswith(f"{section}.")]
        names.add(wholes[0] if wholes else path)
    for name in sorted(names):
        config = config.without_value(name)
    return config


def _sentence(leaf: str, item: Any) -> str:
    """One pydantic error as key, value and allowed values."""
    path = ".".join(str(part) for part in item["loc"] if part != "[key]")
    allowed = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if path == leaf and item["type"] not in ("value_error", "finite_number", "less_than_equal"):
        allowed = f"must be {all_keys()[path].type_text}"
    allowed += "; put it in quotes" if item["type"] == "string_type" else ""
    allowed += f"; see `rolepool config {leaf}`" if path != leaf else ""
    value = "" if item["type"] == "missing" else f"={show(item['input'])}"
    return f"{show(path)}{value}: {allowed}"


# Keys of verl that rolepool does not have: other names of its own keys, keys without effect, keys
# that it refuses


class OtherKey(Section):
    """Keys, or sections, of another trainer that are treated in the same way."""

    keys: Items[str]
    """Their names, as patterns. A section stands for all keys below it."""
    works: Literal["any", "warned", "if_off"]
    """Which values are accepted: any value; any value, and the user is warned unless it is off; or
    off alone."""
    reason: str
    """Why they have no effect, or why they are refused and what to write instead."""
    same: Items[Any] = ()
    """Values that mean what rolepool does in any case. They count as off."""
    same_as: str | None = None
    """A key of rolepool whose value counts as off, because it says the same."""

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing that rolepool does not do."""
        return value in (None, False, "", "???") or value in ([], {}, *self.same)


class OtherKeys(Section):
    """The table."""

    renamed: dict[str, str]
    """Other names of keys and sections, as patterns. A new name may be renamed again by a later
    pattern."""
    same_values: dict[str, dict[Any, Any]]
    """Other ways to write a value, by key. false is 0."""
    other_keys: Items[OtherKey]
    """The first entry with a pattern that matches decides."""


VERL_KEYS = read_table(Path(__file__).with_name("other_keys.yaml"), OtherKeys)


def renamed(path: str) -> str:
    """The name that rolepool has for this key; the same name if it has no other."""
    for pattern, name in VERL_KEYS.renamed.items():
        path = re.sub(rf"^{pattern}(?=\.|$)", name, path)
    return path


def find_other(path: str) -> OtherKey | None:
    """The entry for a key that rolepool does not have."""
    for other in VERL_KEYS.other_keys:
        if any(re.fullmatch(rf"(?:{pattern})(\..*)?", path) for pattern in other.keys):
            return other
    return None
