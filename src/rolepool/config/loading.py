"""From YAML files and `key=value` overrides to a checked Config, or to a list of all problems.

Owns merging, `${...}` references (with OmegaConf) and the messages about single keys. Rules about combinations of keys
are in `consistency`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rolepool.config.base import as_list
from rolepool.config.consistency import contradictions
from rolepool.config.functions import import_extensions
from rolepool.config.schema import Config, Key, all_keys, all_sections
from rolepool.config.unsupported import why_unsupported
from rolepool.errors import ConfigError

KEY_PATTERN = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
UNPARSABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and which keys the user set in files or overrides."""

    config: Config
    set_keys: frozenset[str]

    def value_of(self, path: str) -> Any:
        """The value of a key as plain data."""
        value: Any = self.config.model_dump(mode="json")
        for part in path.split("."):
            value = value[part]
        return value

    def to_yaml(self) -> str:
        """Every key with its value."""
        return yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(files: Iterable[str] = (), overrides: Iterable[str] = ()) -> LoadedConfig:
    """Merge defaults, files from left to right and overrides, then check. Raises ConfigError with all problems."""
    problems: list[str] = []
    leaves: dict[str, Any] = {}
    overrides = list(overrides)
    extensions = [text for text in overrides if text.lstrip("+").startswith("trainer.extensions=")]
    for text in extensions[-1:]:  # first of all, because other overrides may set keys that an extension adds
        _import_extensions(_parse_override(text))
    sources = [(_read_file, file) for file in files] + [(_parse_override, override) for override in overrides]
    for read, source in sources:
        try:
            tree = read(source)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if not extensions:
            _import_extensions(tree)
        for path, value in _flatten(tree):
            if (problem := _problem_with(path, value)) is not None:
                problems.append(problem)
            elif path not in all_sections():
                leaves[path] = _merged(leaves[path], value, path) if path in leaves else value
    tree, broken = _resolve(leaves, problems)
    config = _validate(tree, broken, frozenset(leaves), problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return LoadedConfig(config, frozenset(leaves))


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


def nearest_key(path: str) -> str | None:
    """The key that a mistyped one most likely means."""
    keys, leaf = list(all_keys()), path.rpartition(".")[2]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    close = [key for key in keys if key.endswith(f".{path}")]
    for candidates, cutoff in ((keys, 0.75), (same_leaf, 0.0), (keys, 0.5)):
        close = close or difflib.get_close_matches(path, candidates, n=1, cutoff=cutoff)
    return close[0] if close else None


# Reading files and overrides


def _import_extensions(tree: dict[str, Any]) -> None:
    """Import the modules that `trainer.extensions` names, if it is well-formed. They may add keys."""
    trainer = tree.get("trainer")
    names = as_list(trainer.get("extensions")) if isinstance(trainer, dict) else ()
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        import_extensions(names)


def _read_file(file: str) -> dict[str, Any]:
    path = Path(file)
    try:
        if not path.is_file():
            raise ConfigError(f"config file {show(file)}: no such file; give a YAML file, or key=value for an override")
        content = _plain(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    except (OSError, *UNPARSABLE) as error:
        raise ConfigError(f"config file {show(file)}: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config file {show(file)}: must contain keys and values, not a list")
    return {str(name): value for name, value in content.items()}


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as `{a: {b: c}}`. Hydra's `+a.b=c` and `++a.b=c` mean the same."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if path.startswith("~"):
        raise ConfigError(f"{show(text)}: keys cannot be deleted; leave {show(path[1:])} out to use its default")
    path = path.removeprefix("+").removeprefix("+")
    if not equals or not KEY_PATTERN.fullmatch(path):
        raise ConfigError(f"{show(text)}: not an override; write key=value, such as trainer.nnodes=2")
    try:
        text.encode()
        tree: Any = _plain(_parse_value(value, all_keys().get(path)))
    except UNPARSABLE as error:
        raise ConfigError(f"{path}={show(value)}: not valid YAML ({_one_line(error)}); put text in quotes") from None
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return dict(tree)


def _parse_value(text: str, key: Key | None) -> Any:
    """YAML, except that an unquoted word stays text for a text key, and `{a:1}` needs no space after the colon."""
    stripped = text.strip()
    if key is not None and key.is_text and stripped[:1] not in ("'", '"') and stripped not in ("null", "~"):
        return stripped
    if stripped[:1] in ("{", "["):
        text = re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", text)
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[call-overload,index]


def _plain(value: Any) -> Any:
    """The value, if it can be printed and stored; bytes and very long numbers raise an error."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path. A key whose value is a mapping is one leaf."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in all_keys():
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _problem_with(path: str, value: Any) -> str | None:
    """Why this key cannot be set; None if it can."""
    if path in all_sections():
        examples = ", ".join([key for key in all_keys() if key.startswith(f"{path}.")][:2])
        problem = f"{path}={show(value)}: is a section; set one of its keys, such as {examples}"
        return problem if value != {} else None
    if value == "???":
        return f"{path}=???: has no value yet; set one, or leave the key out to use its default"
    return None if path in all_keys() else f"{path}={show(value)}: {why_unsupported(path) or unknown_key(path)}"


def _merged(old: Any, new: Any, path: str = "") -> Any:
    """The new value; mappings are merged, so that a file or override may set one entry of them."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if path == "placement.pools":  # a pool may also be written as a list
        old = {name: {"per_node": pool} if isinstance(pool, list) else pool for name, pool in old.items()}
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def unknown_key(path: str) -> str:
    """The message for a key that does not exist."""
    meant = nearest_key(path)
    return f"unknown key; did you mean {meant}?" if meant else "unknown key; `rolepool config` lists all keys"


# Resolving and validating


@lru_cache(maxsize=1)
def _defaults(paths: tuple[str, ...]) -> DictConfig:
    """The default of every key; a default that follows another key is a `${...}`."""
    tree = OmegaConf.create()
    for key in (all_keys()[path] for path in paths):
        OmegaConf.update(tree, key.path, key.default, merge=False, force_add=True)
    return tree


def _resolve(leaves: dict[str, Any], problems: list[str]) -> tuple[dict[str, Any], set[str]]:
    """The defaults, replaced by the user's values, with all `${...}` resolved; and the keys whose reference failed."""
    tree = copy.deepcopy(_defaults(tuple(all_keys())))
    broken: set[str] = set()
    for path, value in leaves.items():
        try:
            OmegaConf.update(tree, path, value, merge=False)
        except UNPARSABLE:
            problems.append(f"{path}={show(value)}: its ${{...}} is not closed, or does not name a key")
            broken.add(path)
    for path in [path for path in leaves if path not in broken and "${" in str(leaves[path])]:
        try:
            resolved = OmegaConf.select(tree, path, throw_on_resolution_failure=True)
            if OmegaConf.is_config(resolved):
                OmegaConf.to_container(resolved, resolve=True)
        except UNPARSABLE as error:
            reason = "refers to itself" if isinstance(error, RecursionError) else _one_line(error)
            problems.append(f"{path}={show(leaves[path])}: the reference cannot be resolved ({reason})")
            broken.add(path)
    for path in broken:
        OmegaConf.update(tree, path, all_keys()[path].default, merge=False)
    container = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}, broken


def _validate(tree: dict[str, Any], broken: set[str], set_keys: frozenset[str], problems: list[str]) -> Config:
    """Check every key; then set wrong keys to their defaults and check all rules that do not mention those keys.

    A key that follows a wrong key is wrong too, but the user did not write it: only the written key is reported.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        items = [(_leaf_of(item["loc"]), item) for item in error.errors(include_url=False)]
        problems.extend(_sentence(item) for leaf, item in items if leaf in set_keys)
        defaults = OmegaConf.to_container(_defaults(tuple(all_keys())), resolve=True)
        broken = broken | {leaf for leaf, _ in items}
        for path in broken:
            _copy_leaf(path, defaults, tree)
        config = Config.model_validate(tree)
    problems.extend(rule for rule in contradictions(config) if not any(path in rule for path in broken))
    return config


def _leaf_of(location: tuple[int | str, ...]) -> str:
    """The key that contains pydantic's location."""
    place = "".join(f"{part}." for part in location)
    return next(path for path in all_keys() if place.startswith(f"{path}."))


def _copy_leaf(path: str, source: Any, target: dict[str, Any]) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        source, target = source[parent], target[parent]
    target[leaf] = source[leaf]


_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Field required": "is missing",
    "Extra inputs are not permitted": "is not known here",
}
"""pydantic's words, and the words that our errors use."""


def _sentence(item: Any) -> str:
    """One pydantic error as key, value and allowed values."""
    path, leaf = ".".join(str(part) for part in item["loc"] if part != "[key]"), _leaf_of(item["loc"])
    allowed = item["msg"].removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        allowed = allowed.replace(theirs, ours)
    if path == leaf and item["type"] not in ("value_error", "finite_number", "less_than_equal"):
        allowed = f"must be {all_keys()[path].type_text}"
    allowed += "; put it in quotes" if item["type"] == "string_type" else ""
    allowed += f"; see `rolepool config {leaf}`" if path != leaf else ""
    value = "" if item["type"] == "missing" else f"={show(item['input'])}"
    return f"{path}{value}: {allowed[:1].lower()}{allowed[1:]}"


def _one_line(error: BaseException) -> str:
    """The first line of an error that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if text.isprintable() else repr(text)
