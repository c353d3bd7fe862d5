"""Reading what a user wrote, as trees of plain data: config files, overrides, and values of Python
programs.

A tree is a dict by name, with a dict for each section. References such as `${a.b}` stay text.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rolepool.config.other_keys import renamed
from rolepool.config.schema import all_keys, all_sections
from rolepool.config.sources import load_file
from rolepool.config.values import show
from rolepool.errors import ConfigError, explained

Tree = dict[str, object]
Value = TypeVar("Value")

UNPARSABLE = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""What PyYAML and OmegaConf raise for text that they cannot read."""
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
_COLON_WITHOUT_SPACE = re.compile(r"([{,]\s*[\w.-]+):(?=\S)")
_MAPPING = re.compile(r"(?s).+")
_MAPPING_IN_A_LIST = re.compile(r"\{[^{}]*\}")


def read_file(file: str) -> Tree:
    """The content of a config file or a recipe."""
    fix = "give a YAML file, or key=value for an override; `rolepool recipes` lists the recipes"
    with explained(f"config file {show(file)}: cannot be read", fix, *UNPARSABLE):
        try:
            content = as_plain(load_file(file))
        except yaml.MarkedYAMLError as error:
            where = _place_in_file(error)
            raise ConfigError(
                f"config file {show(file)}{where}: not valid YAML ({error.problem}); fix it"
            ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"config file {show(file)}: must contain keys and values, not a list")
    return {str(name): value for name, value in content.items()}


def _place_in_file(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    if mark is None:
        return ""
    return f", line {mark.line + 1}, column {mark.column + 1}"


def read_value(name: object, value: object) -> object:
    """A value that a Python program set, as plain data: paths become texts, and tuples become
    lists."""
    what = f"{name}={show(value)}: cannot be stored"
    with explained(what, "use texts, numbers, lists and dicts", *UNPARSABLE):
        plain: object = json.loads(json.dumps(value, default=os.fspath))
        return plain


def parse_override(text: str) -> Tree:
    """`a.b=c` as `{a: {b: c}}`. Hydra's `+a.b=c` and `++a.b=c` mean the same."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if path.startswith("~"):
        fix = f"do not set {show(path[1:])} to use its default"
        raise ConfigError(f"{show(text)}: keys cannot be deleted; {fix}")
    path = renamed(path.removeprefix("+").removeprefix("+"))
    if not equals or not _KEY.fullmatch(path):
        fix = "write key=value, such as trainer.nnodes=2"
        raise ConfigError(f"{show(text)}: not an override; {fix}")
    what = f"{path}={show(value)}: not valid YAML or ${{...}}"
    with explained(what, "put text in quotes", *UNPARSABLE):
        if _is_unquoted_text(path, value.strip()):
            tree = OmegaConf.create()
            OmegaConf.update(tree, path, value.strip())
        else:
            tree = OmegaConf.from_dotlist([f"{path}={_with_spaces_after_colons(value)}"])
        return as_plain(unresolved(tree))


def _is_unquoted_text(path: str, value: str) -> bool:
    """Whether the value is a word for a key that holds text. It stays text, even if YAML would read
    a number or a date."""
    key = all_keys().get(path)
    is_quoted = value[:1] in ("'", '"')
    is_null = value in ("null", "~")
    return key is not None and key.is_text and not is_quoted and not is_null


def _with_spaces_after_colons(value: str) -> str:
    """The text of a list or mapping, in which `{a:1}` needs no space after the colon. In a list,
    `my.py:f` is text."""
    first = value.strip()[:1]
    if first not in ("{", "["):
        return value
    mapping = _MAPPING_IN_A_LIST if first == "[" else _MAPPING
    return mapping.sub(lambda match: _COLON_WITHOUT_SPACE.sub(r"\1: ", match[0]), value)


def unresolved(tree: DictConfig) -> Tree:
    """The values of a tree of OmegaConf, in which references are text."""
    content = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(content, dict)
    return {str(name): value for name, value in content.items()}


def as_plain(value: Value) -> Value:
    """The value, if it can be printed and stored; bytes and very long numbers raise an error."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves by dotted path, under rolepool's names. A key whose value is a mapping is one leaf."""
    for name, value in tree.items():
        written = f"{prefix}{name}"
        path = renamed(written)
        if value is None and path != written:
            continue  # another name that is not used
        if isinstance(value, dict) and _is_section(path, value):
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def _is_section(path: str, value: Tree) -> bool:
    """Whether a mapping holds keys, and is not itself the value of a key."""
    return path in all_sections() or (bool(value) and path not in all_keys())


def merged(old: object, new: object, path: str = "") -> object:
    """The new value; mappings are merged, so that a file or override may set one entry of them."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    if path == "placement.pools":
        old = {name: _as_mapping(pool) for name, pool in old.items()}
    entries = {name: merged(old.get(name), value) for name, value in new.items()}
    return {**old, **entries}


def _as_mapping(pool: object) -> object:
    """A pool as a mapping, because it may also be written as a list."""
    return {"per_node": pool} if isinstance(pool, list) else pool
