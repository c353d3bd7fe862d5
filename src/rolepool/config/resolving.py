"""From the values that the user wrote to a Config: defaults, `${...}` references, and checks.

Owns the sentence about a wrong value, and what is unknown because something else is wrong. Rules
about combinations of keys are in `schema`.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import lru_cache, partial

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rolepool.config.fitting import FITTED_TO, fitted_defaults, num_slots
from rolepool.config.functions import ANY_NAME, EXTENDABLE_NAMES
from rolepool.config.parsing import UNPARSABLE, as_plain, flatten, unresolved
from rolepool.config.schema import Config, all_keys
from rolepool.config.values import show
from rolepool.errors import one_line

_REFERENCE = re.compile(r"\$\{\s*([\w.-]+)\s*\}")
_WITH_OWN_SENTENCE = ("value_error", "finite_number", "less_than_equal")
"""Errors of pydantic whose text says more than the type of the key."""


@lru_cache(maxsize=1)
def _defaults(paths: tuple[str, ...]) -> DictConfig:
    """The default of every key; a default that follows another key is a `${...}`."""
    tree = OmegaConf.create()
    set_values(tree, {path: all_keys()[path].default for path in paths})
    return tree


def set_values(tree: DictConfig, values: Mapping[str, object]) -> None:
    """Set these keys of the tree."""
    for path, value in values.items():
        OmegaConf.update(tree, path, value, merge=False, force_add=True)


def resolve(
    leaves: Mapping[str, object],
    others: dict[str, object],
    problems: list[str],
) -> tuple[DictConfig, set[str]]:
    """The defaults, replaced by the user's values; and the keys whose `${...}` cannot be resolved.

    A reference may also name a key that rolepool does not have, if the user set it. Values of
    `others` are resolved in place.
    """
    tree = copy.deepcopy(_defaults(tuple(all_keys())))
    set_values(tree, leaves)
    with_others = copy.deepcopy(tree)
    set_values(with_others, others)
    for path, value in others.items():
        if "${" in str(value):
            with suppress(*UNPARSABLE):
                others[path] = _resolved(with_others, path)

    broken: set[str] = set()
    for path, value in leaves.items():
        if "${" not in str(value):
            continue
        try:
            _resolved(tree, path)
        except UNPARSABLE as error:
            try:
                resolved = _resolved(with_others, path)
                OmegaConf.update(tree, path, resolved, merge=False)
            except UNPARSABLE:
                reason = f"the reference cannot be resolved ({one_line(error)})"
                problems.append(f"{path}={show(value)}: {reason}")
                broken.add(path)
    return tree, broken


def _resolved(tree: DictConfig, path: str) -> object:
    value: object = OmegaConf.select(tree, path, throw_on_resolution_failure=True)
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def validate(
    tree: DictConfig,
    broken: set[str],
    leaves: Mapping[str, object],
    *,
    keeps_names: bool,
) -> tuple[Config, list[tuple[str, str]]]:
    """Check every key, after other defaults are chosen that fit the values; with `keeps_names`,
    functions may have any names. Returns the config, and the wrong keys that the user set with a
    line for each problem.

    Wrong keys are added to `broken` and get their defaults, so that the rest can be checked too. A
    key that follows a wrong key is wrong too, but the user did not write it: only the written key
    is reported.
    """
    set_values(tree, {path: all_keys()[path].default for path in broken})
    trainer = tree.trainer
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = num_slots(trainer.device)
    # Before the values are resolved, because other keys may follow the fitted ones.
    fitted = fitted_defaults(partial(_resolved, tree), leaves)
    set_values(tree, fitted)
    values = OmegaConf.to_container(tree, resolve=True)
    try:
        return Config.model_validate(values, context={ANY_NAME: keeps_names}), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    lines: list[tuple[str, str]] = []
    for item in items:
        key = _key_of(item)
        broken.add(key)
        if key in leaves:
            line = _sentence(key, item)
            lines.append((key, line))
    config, _ = validate(tree, broken, leaves, keeps_names=keeps_names)
    return config, lines


def _key_of(item: ErrorDetails) -> str:
    """The key that an error of pydantic is about. The error may be deep inside of its value."""
    place = ".".join(map(str, item["loc"])) + "."
    return next(path for path in all_keys() if place.startswith(f"{path}."))


def _sentence(key: str, item: ErrorDetails) -> str:
    """One pydantic error as key, value and allowed values."""
    names = [str(part) for part in item["loc"]]
    # pydantic adds this to the place of a name in a mapping that is wrong.
    path = ".".join(name for name in names if name != "[key]")
    is_whole_value = path == key
    if is_whole_value and item["type"] not in _WITH_OWN_SENTENCE:
        allowed = f"must be {all_keys()[path].type_text}"
    else:
        allowed = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if item["type"] == "string_type":
        allowed += "; put it in quotes"
    if not is_whole_value:
        allowed += f"; see `rolepool config {key}`"
    value = "" if item["type"] == "missing" else f"={show(item['input'])}"
    return f"{show(path)}{value}: {allowed}"


def unknown_functions(tree: DictConfig) -> Iterator[str]:
    """The keys that name a function that is not known here, if it is not a `module:function`."""
    for key, known in EXTENDABLE_NAMES.items():
        name = str(OmegaConf.select(tree, key))
        if name not in known and ":" not in name:
            yield f"{key}={show(name)}"


def with_followers(unknown: Set[str], tree: DictConfig, unset: Set[str]) -> Set[str]:
    """These keys, and all keys whose value depends on one of them."""
    depends_on: dict[str, set[str]] = {}
    values = as_plain(unresolved(tree))
    for path, value in flatten(values):
        references = _REFERENCE.findall(str(value))
        depends_on[path] = set(references)
    for path in unset & FITTED_TO.keys():
        depends_on[path].update(FITTED_TO[path])
    # A follower may have followers of its own, so this is repeated until there are no more.
    while True:
        followers: set[str] = set()
        for path, keys in depends_on.items():
            if not keys.isdisjoint(unknown):
                followers.add(path)
        if followers <= unknown:
            return unknown
        unknown = unknown | followers
