"""From files, overrides and values of a Python program to a checked Config, or to a list of all
problems.

Owns the order in which sources are read, what a later one replaces, and when the modules of
`trainer.extensions` are imported, because they may add keys.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from omegaconf import DictConfig

from rolepool.config.fitting import CORRECTION
from rolepool.config.functions import EXTENDABLE, EXTENSIONS, import_extensions
from rolepool.config.loaded import Draft, LoadedConfig, without_values
from rolepool.config.other_keys import find_other, in_own_words, judge, renamed
from rolepool.config.parsing import (
    Tree,
    flatten,
    merged,
    parse_override,
    read_file,
    read_value,
)
from rolepool.config.resolving import (
    resolve,
    unknown_functions,
    validate,
    with_followers,
)
from rolepool.config.rollout_correction import PRESETS
from rolepool.config.rules import contradictions
from rolepool.config.schema import Config, all_keys, all_sections
from rolepool.config.unknown_keys import keys_meant_by, unknown_key
from rolepool.config.values import fully_escaped, show
from rolepool.errors import ConfigError, collected

NULL_IS_UNSET = ("reward_model.", "custom_reward_function.")
"""Sections in which null in a file means that the key is not set: newer files of verl have these
sections twice."""
EXTENSIONS_KEY = "trainer.extensions"
_ROWS_OF_MICRO_BATCHES = re.compile(r"(ppo_|forward_)?micro_batch_size_per_gpu$")


@dataclass(frozen=True)
class PlainValues:
    """Keys and values that are taken as they are, such as those of a run folder.

    `${...}` in them is text, the extensions that they name are not imported, and names that only
    such an extension has are kept.
    """

    values: Mapping[str, object]


ConfigSource = str | Mapping[str, object] | PlainValues
"""A file or the name of a recipe, keys with values, or keys with values that are taken as they
are."""


def load_config(files: Iterable[ConfigSource] = (), overrides: Iterable[str] = ()) -> LoadedConfig:
    """Merge defaults, files from left to right and overrides, then check. Raises ConfigError with
    all problems.

    A file may also be the name of a recipe, or a mapping with keys and values. A name in a mapping
    may be a dotted key. PlainValues are a mapping whose values are taken as they are.
    """
    return read_config(files, overrides).checked()


def read_config(files: Iterable[ConfigSource] = (), overrides: Iterable[str] = ()) -> Draft:
    """Merge and check like `load_config`, but raise nothing: the draft has the problems, so that
    the caller can report them together with problems of other kinds."""
    overrides = list(overrides)
    extensions = _own_extensions(overrides)
    reading = _Reading(sources_import=not extensions)
    # Extensions come first, because other overrides may set keys that an extension adds.
    for text in extensions:
        with collected([]):  # a text that is no override is reported below
            reading.import_extensions(parse_override(text))
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
        names = _extensions_in(parse_override(text))
        if isinstance(names, list | tuple):
            import_extensions(names)


def _own_extensions(overrides: Iterable[str]) -> list[str]:
    """The last override that names extensions, because it replaces earlier ones; an empty list if
    there is none."""
    last: list[str] = []
    for text in overrides:
        if text.lstrip("+").startswith(f"{EXTENSIONS_KEY}="):
            last = [text]
    return last


def _extensions_in(tree: Tree) -> object:
    """What a tree has as `trainer.extensions`. One name may be written without a list."""
    leaves = dict(flatten(tree))
    names = leaves.get(EXTENSIONS_KEY) or ()
    return [names] if isinstance(names, str) else names


class _Reading:
    """What files and overrides say, and which problems they have. A later one wins over an earlier
    one."""

    def __init__(self, sources_import: bool) -> None:
        self._sources_import = sources_import
        """Whether extensions that a file or override names are imported when it is read."""
        self._leaves: dict[str, object] = {}
        """The values that the user set, by key."""
        self._others: dict[str, object] = {}
        """The values of keys that only other trainers have."""
        self._problems: list[str] = []
        self._unknown: set[str] = set()
        """The keys whose values are not known, because what the user wrote cannot be read."""
        self._meant: set[str] = set()
        """The keys that are offered in place of names that do not exist."""
        self._has_unread_file = False
        self._lacks_extension = False
        """Whether an extension was not imported."""
        self._keeps_names = False
        """Whether names that are not known are kept, because an extension that was not imported may
        have them."""
        self._unknown_names: list[str] = []
        """Those names, with their keys."""

    def add_file(self, file: str) -> None:
        try:
            self._add(read_file(file), null_is_unset=True)
        except ConfigError as error:
            self._problems.extend(error.problems)
            self._has_unread_file = True

    def add_values(self, values: Mapping[str, object]) -> None:
        """Add what a Python program set."""
        tree: Tree = {}
        for name, value in values.items():
            path = renamed(str(name))
            # Until the value is read, which may fail.
            self._unknown.add(path)
            with collected(self._problems):
                tree[str(name)] = read_value(name, value)
                self._unknown.discard(path)
        self._add(tree, null_is_unset=True)

    def add_plain_values(self, values: Mapping[str, object]) -> None:
        """Add values as they are. If they name an extension that was not imported, names are kept
        that it may have."""
        names = _extensions_in(dict(values))
        if isinstance(names, list | tuple):
            are_imported = all(name in EXTENSIONS for name in names)
            if not are_imported:
                self._lacks_extension = True
                self._keeps_names = True
        sources_import = self._sources_import
        self._sources_import = False
        tree = {name: fully_escaped(value) for name, value in values.items()}
        self._add(tree, null_is_unset=True)
        self._sources_import = sources_import

    def add_override(self, text: str) -> None:
        try:
            self._add(parse_override(text))
        except ConfigError as error:
            self._problems.extend(error.problems)
            written, _, _ = text.partition("=")
            name = written.strip().lstrip("+~")
            self._unknown.add(renamed(name))

    def import_extensions(self, tree: Tree) -> None:
        """Import the modules that `trainer.extensions` names, if it is well-formed. They may add
        keys and names."""
        names = _extensions_in(tree)
        if not isinstance(names, list | tuple):
            return  # validation says what is wrong with it
        if not all(isinstance(name, str) for name in names):
            return
        for name in names:
            try:
                import_extensions([name])
            except ConfigError as error:
                self._problems.extend(error.problems)
                self._lacks_extension = True

    def draft(self) -> Draft:
        """The config of all that was added."""
        self._report_missing_values()
        tree, broken = resolve(self._leaves, self._others, self._problems)
        judgement = judge(self._others, tree)
        self._problems.extend(judgement.problems)
        config = self._validated(tree, broken)
        without_effect = {**judgement.without_effect, **_unused(config, self._leaves)}

        unset = all_keys().keys() - self._leaves.keys()
        unknown: Set[str] = broken.union(
            self._unknown & all_keys().keys(),
            # The value was probably meant for this key.
            self._meant & unset,
        )
        if unknown:
            unknown = with_followers(unknown, tree, unset)
        config = without_values(config, unknown)
        self._problems.extend(contradictions(config))
        if self._has_unread_file:  # it may set all other keys
            config = without_values(config, unset - unknown)
        if self._keeps_names:
            self._unknown_names.extend(unknown_functions(tree))
        loaded = LoadedConfig(
            config,
            frozenset(self._leaves),
            without_effect,
            judgement.warnings,
            tuple(self._unknown_names),
        )
        # Each problem once.
        problems = dict.fromkeys(self._problems)
        return Draft(loaded, tuple(problems))

    def _report_missing_values(self) -> None:
        """Files of Hydra write `???` for a value that the user must give."""
        for path, value in list(self._leaves.items()):
            if value != "???":
                continue
            del self._leaves[path]
            self._unknown.add(path)
            fix = "set one, or remove the key to use its default"
            self._problems.append(f"{path}=???: has no value yet; {fix}")

    def _validated(self, tree: DictConfig, broken: set[str]) -> Config:
        """The config. Adds wrong keys to `broken`."""
        config, wrong = validate(tree, broken, self._leaves, keeps_names=self._keeps_names)
        for path, line in wrong:
            if not self._may_be_added(path):
                self._problems.append(line)
        return config

    def _add(self, tree: Tree, *, null_is_unset: bool = False) -> None:
        if self._sources_import:
            self.import_extensions(tree)
        for path, value in flatten(tree):
            if value is None and null_is_unset and path.startswith(NULL_IS_UNSET):
                continue
            if path in all_keys():
                own_value = in_own_words(path, value)
                earlier = self._leaves.get(path)
                self._leaves[path] = merged(earlier, own_value, path)
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


def _unused(config: Config, leaves: Mapping[str, object]) -> dict[str, str]:
    """Why settings of rolepool's own keys have no effect in this config."""
    reasons: dict[str, str] = {}
    for key, value in leaves.items():
        setting = f"{key}={show(value)}"
        switch = _switch_to_tokens(key)
        if switch is not None and value is not None and config.at(switch):
            reasons[setting] = f"{switch}=true limits micro-batches by tokens"
        is_of_critic = key.startswith("critic.") and key != "critic.enable"
        if is_of_critic and not config.uses_critic:
            reasons[setting] = "there is no critic"
    rollout = config.actor_rollout_ref.rollout
    if rollout.engine_kwargs.vllm and rollout.engine != "vllm":
        reasons["actor_rollout_ref.rollout.engine_kwargs.vllm"] = f"the engine is {rollout.engine}"
    reasons |= _unused_corrections(config, leaves)
    trainer = config.trainer
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        setting = f"trainer.resume_from_path={trainer.resume_from_path}"
        reasons[setting] = f"trainer.resume_mode={trainer.resume_mode} does not use it"
    if rollout.engine != rollout.name:
        setting = f"actor_rollout_ref.rollout.name={rollout.name}"
        reasons[setting] = f"fallback={rollout.engine} generates"
    return reasons


def _unused_corrections(config: Config, leaves: Mapping[str, object]) -> dict[str, str]:
    """Why settings of `algorithm.rollout_correction` have no effect. Defaults are not listed,
    because a config that was saved sets all keys."""
    keys = config.algorithm.rollout_correction
    reasons: dict[str, str] = {}
    if keys.rollout_is is not None and not keys.weighs:
        reasons["rollout_is"] = "with bypass_mode and ppo_clip, the ratio of the loss is its weight"
    if keys.rollout_is_batch_normalize and not keys.weighs:
        reasons["rollout_is_batch_normalize"] = "there are no weights"
    if keys.rollout_rs_threshold is not None and keys.rollout_rs is None:
        reasons["rollout_rs_threshold"] = "rollout_rs is not set"
    if not keys.weighs:
        reasons["rollout_is_threshold"] = "there are no weights"
    set_by_preset = PRESETS.get(str(keys.preset), {})
    is_needed = any(f"{CORRECTION}.{name}" not in leaves for name in set_by_preset)
    is_repeated = all(getattr(keys, name) == value for name, value in set_by_preset.items())
    if not is_needed and not is_repeated:
        reasons["preset"] = "all keys that it sets are set by themselves"

    settings: dict[str, str] = {}
    for name, reason in reasons.items():
        key = f"{CORRECTION}.{name}"
        if key in leaves and getattr(keys, name) != all_keys()[key].default:
            settings[f"{key}={show(leaves[key])}"] = reason
    return settings


def _switch_to_tokens(key: str) -> str | None:
    """For a size of micro-batches in sequences: the key of its section that limits them by tokens
    instead."""
    switch, num_replaced = _ROWS_OF_MICRO_BATCHES.subn("use_dynamic_bsz", key)
    if num_replaced and switch in all_keys():
        return switch
    return None
