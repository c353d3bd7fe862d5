"""From YAML files and `key=value` overrides to a checked Config, or to a list of all problems.

Owns merging, `${...}` references (with OmegaConf), what a key means, the messages about single keys, and the decision
about keys of other trainers (the table is `other_keys.yaml`). Rules about combinations of keys are in `schema`.
"""

import copy
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rolepool.config.base import Items, Section, read_table
from rolepool.config.fitting import fitted_defaults, num_slots
from rolepool.config.functions import OTHER_ENGINES, import_extensions
from rolepool.config.schema import Config, all_keys, all_sections, contradictions
from rolepool.config.sources import load_file
from rolepool.errors import ConfigError, collected, explained, first_few, one_line

KEY_PATTERN = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
MIN_SIMILARITY = 0.9
"""How similar a key must be to the one that the user wrote. 1.0 is equal."""
NULL_IS_UNSET = ("reward_model.", "custom_reward_function.")
"""Sections in which null in a file means that the key is not set: newer files of verl have these sections twice."""
UNPARSABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError)


FALLBACK = "set actor_rollout_ref.rollout.fallback=native to generate with rolepool's own engine"


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

    def value_of(self, path: str) -> Any:
        """The value of a key as plain data."""
        return reduce(getitem, path.split("."), self.config.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Every key with its value."""
        return yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def why_not_trained(self) -> list[str]:
        """A line for each key that can be planned, but not trained."""
        problems: list[str] = []
        rollout, lora_rank = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model.lora_rank
        if lora_rank:
            fix = "not implemented yet, only 0 works; remove it"
            problems.append(f"actor_rollout_ref.model.lora_rank={lora_rank}: {fix}")
        if rollout.engine in OTHER_ENGINES:
            problems.append(f"actor_rollout_ref.rollout.name={rollout.name}: not implemented yet; {FALLBACK}")
        if rollout.engine == "transformers" and (size := rollout.tensor_model_parallel_size) > 1:
            key, fix = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}", "use 1, or rollout.name=native"
            problems.append(f"{key}: the transformers engine has all weights in one process; {fix}")
        if rollout.engine == "vllm" and not Path(rollout.vllm_python).expanduser().is_file():
            where = f"there is no actor_rollout_ref.rollout.vllm_python={rollout.vllm_python}"
            fix = f"run scripts/setup_vllm.sh, which makes .venv-vllm, or {FALLBACK}"
            problems.append(f"actor_rollout_ref.rollout.name=vllm: {where}; {fix}")
        for key in ("trainer.test_freq", "trainer.val_only"):
            if (self.value_of(key) or 0) > 0 and not self.config.data.val_files:
                fix = f"set data.val_files, or remove {key}"
                problems.append(f"{key}={show(self.value_of(key))}: there are no validation prompts; {fix}")
        for name in self.config.trainer.logger:
            if name in ("tensorboard", "wandb", "mlflow") and find_spec(name) is None:
                fix = f"pip install 'rolepool[{name}]', or remove it from the list"
                problems.append(f"trainer.logger: {name} is not installed; {fix}")
        return problems

    def notes(self) -> list[str]:
        """A line that lists the settings that were accepted and change nothing, if there are any."""
        names = first_few([setting.partition("=")[0] for setting in self.without_effect], 3)
        return [f"no effect here: {names}; `rolepool config` with the same arguments says why"] if names else []

    def explain(self, path: str) -> str:
        """Meaning, type, default and current value of a key; for a section, one entry for each of its keys."""
        below = [key for key in all_keys().values() if key.path.startswith(f"{path}.")]
        if below:
            return "\n".join(f"{key.path} = {show(self.value_of(key.path))}\n  {key.doc}" for key in below)
        if path not in all_keys():
            raise ConfigError(f"{show(path)}: {unknown_key(path)}")
        key = all_keys()[path]
        lines = [f"{path} = {show(self.value_of(path))}", key.doc, f"type: {key.type_text}"]
        return "\n  ".join([*lines, f"default: {show(key.default)}"])


def load_config(files: Iterable[str | Mapping[str, Any]] = (), overrides: Iterable[str] = ()) -> LoadedConfig:
    """Merge defaults, files from left to right and overrides, then check. Raises ConfigError with all problems.

    A file may also be the name of a recipe, or a mapping with keys and values. A name in a mapping may be a dotted key.
    """
    problems: list[str] = []
    leaves: dict[str, Any] = {}
    others: dict[str, Any] = {}
    overrides = list(overrides)
    extensions = [text for text in overrides if text.lstrip("+").startswith("trainer.extensions=")]
    for text in extensions[-1:]:  # first of all, because other overrides may set keys that an extension adds
        _import_extensions(_parse_override(text))
    sources = [partial(_read_source, file) for file in files]
    sources += [partial(_parse_override, override) for override in overrides]
    for read in sources:
        tree: dict[str, Any] = {}
        with collected(problems):
            tree = read()
        if not extensions:
            _import_extensions(tree)
        for path, value in _flatten(tree):
            if value is None and read.func is _read_source and path.startswith(NULL_IS_UNSET):
                continue
            if path in all_keys():
                leaves[path] = _merged(leaves.get(path), _usual(path, value), path)
            elif path not in all_sections() and find_other(path) is not None:
                others[path] = value
            else:
                problems.append(f"{path}={show(value)}: {unknown_key(path)}")
    for path in [path for path, value in leaves.items() if value == "???"]:
        del leaves[path]
        problems.append(f"{path}=???: has no value yet; set one, or remove the key to use its default")
    resolved, broken = _resolve(leaves, others, problems)
    without_effect, warnings = _judge(others, problems)
    config = _validate(resolved, broken, leaves, problems)
    if fitted := fitted_defaults(config, leaves):
        config = _validate(_set_all(resolved, fitted), broken, leaves, [])
    problems.extend(rule for rule in contradictions(config) if not any(path in rule for path in broken))
    ConfigError.raise_if_any(dict.fromkeys(problems))
    return LoadedConfig(config, frozenset(leaves), without_effect | _unused(config, leaves), warnings)


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
    """Why this name cannot be set, and the keys of the section, or the key that the user most likely means."""
    if path in all_sections():
        examples = ", ".join([key for key in all_keys() if key.startswith(f"{path}.")][:2])
        return f"is a section; set one of its keys, such as {examples}"
    keys, leaf = list(all_keys()), path.rpartition(".")[2]
    without_first_sections = [key for key in keys if key.endswith(f".{path}")]
    similar = difflib.get_close_matches(path, keys, n=1, cutoff=MIN_SIMILARITY)
    in_other_sections = [key for key in keys if "_" in leaf and key.endswith(f".{leaf}")]
    only_one = in_other_sections if len(in_other_sections) == 1 else []
    found = without_first_sections or similar or only_one
    return f"unknown key; did you mean {found[0]}?" if found else "unknown key; `rolepool config` lists all keys"


# Reading files and overrides


def _import_extensions(tree: dict[str, Any]) -> None:
    """Import the modules that `trainer.extensions` names, if it is well-formed. They may add keys."""
    names = dict(_flatten(tree)).get("trainer.extensions", ())
    names = [names] if isinstance(names, str) else names
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        import_extensions(names)


def _read_source(source: str | Mapping[str, Any]) -> dict[str, Any]:
    return _read_file(source) if isinstance(source, str) else _read_values(source)


def _read_file(file: str) -> dict[str, Any]:
    fix = "give a YAML file, or key=value for an override; `rolepool recipes` lists the recipes"
    with explained(f"config file {show(file)}: cannot be read", fix, *UNPARSABLE):
        try:
            content = _plain(load_file(file))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise ConfigError(f"config file {show(file)}{where}: not valid YAML ({error.problem}); fix it") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config file {show(file)}: must contain keys and values, not a list")
    return {str(name): value for name, value in content.items()}


def _read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values that a Python program set, as plain data: paths become texts, and tuples become lists."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        with explained(f"{name}={show(value)}: cannot be stored", "use texts, numbers, lists and dicts", *UNPARSABLE):
            plain[str(name)] = json.loads(json.dumps(value, default=os.fspath))
    return plain


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as `{a: {b: c}}`. Hydra's `+a.b=c` and `++a.b=c` mean the same."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if path.startswith("~"):
        raise ConfigError(f"{show(text)}: keys cannot be deleted; do not set {show(path[1:])} to use its default")
    path = renamed(path.removeprefix("+").removeprefix("+"))
    if not equals or not KEY_PATTERN.fullmatch(path):
        raise ConfigError(f"{show(text)}: not an override; write key=value, such as trainer.nnodes=2")
    stripped, key = value.strip(), all_keys().get(path)
    with explained(f"{path}={show(value)}: not valid YAML or ${{...}}", "put text in quotes", *UNPARSABLE):
        if key is not None and key.is_text and stripped[:1] not in ("'", '"') and stripped not in ("null", "~"):
            tree = OmegaConf.create()  # an unquoted word stays text for a text key
            OmegaConf.update(tree, path, stripped)
        else:
            if stripped[:1] in ("{", "["):  # `{a:1}` needs no space after the colon; in a list, `my.py:f` is text
                mapping = r"\{[^{}]*\}" if stripped[:1] == "[" else r"(?s).+"
                value = re.sub(mapping, lambda found: re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", found[0]), value)
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
        if isinstance(value, dict) and (path in all_sections() or (value and path not in all_keys())):
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
        old = {name: {"per_node": pool} if isinstance(pool, list) else pool for name, pool in old.items()}
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


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


def _resolve(leaves: dict[str, Any], others: dict[str, Any], problems: list[str]) -> tuple[DictConfig, set[str]]:
    """The defaults, replaced by the user's values; and the keys whose `${...}` cannot be resolved.

    A reference may also name a key that rolepool does not have, if the user set it. Values of `others` are resolved in
    place.
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
                problems.append(f"{path}={show(value)}: the reference cannot be resolved ({one_line(error)})")
                broken.add(path)
    return tree, broken


def _resolved(tree: DictConfig, path: str) -> Any:
    value = OmegaConf.select(tree, path, throw_on_resolution_failure=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _judge(others: dict[str, Any], problems: list[str]) -> tuple[dict[str, str], list[str]]:
    """Check the keys that rolepool does not have. Returns why each accepted one has no effect, and warnings."""
    accepted, warnings = dict[str, str](), list[str]()
    for path, value in others.items():
        other, setting = find_other(path), f"{path}={show(value)}"
        assert other is not None
        if other.works == "if_off" and not other.is_off(value):
            problems.append(f"{setting}: not supported: {other.reason}")
            continue
        accepted[setting] = other.reason
        if other.works == "warned" and not other.is_off(value):
            warnings.append(f"{setting}: no effect: {other.reason}")
    return accepted, warnings


def _unused(config: Config, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Why settings of rolepool's own keys have no effect in this config."""
    unused: dict[str, str] = {}
    for key, value in leaves.items():
        # A size of micro-batches in sequences, and the key of its section that limits them by tokens instead.
        switch = re.sub(r"(ppo_|forward_)?micro_batch_size_per_gpu$", "use_dynamic_bsz", key)
        if switch != key and switch in all_keys() and value is not None and config.at(switch):
            unused[f"{key}={show(value)}"] = f"{switch}=true limits micro-batches by tokens"
    rollout = config.actor_rollout_ref.rollout
    if rollout.engine_kwargs.vllm and rollout.engine != "vllm":
        unused["actor_rollout_ref.rollout.engine_kwargs.vllm"] = f"the engine is {rollout.engine}"
    if rollout.engine != rollout.name:
        unused[f"actor_rollout_ref.rollout.name={rollout.name}"] = f"fallback={rollout.engine} generates"
    return unused


def _validate(tree: DictConfig, broken: set[str], leaves: dict[str, Any], problems: list[str]) -> Config:
    """Check every key. Wrong keys are added to `broken` and get their defaults, so that the rest can be checked too.

    A key that follows a wrong key is wrong too, but the user did not write it: only the written key is reported.
    """
    _set_all(tree, {path: all_keys()[path].default for path in broken})
    if tree.trainer.n_gpus_per_node is None:
        tree.trainer.n_gpus_per_node = num_slots(tree.trainer.device)
    try:
        return Config.model_validate(OmegaConf.to_container(tree, resolve=True))
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    for item in wrong:
        place = "".join(f"{part}." for part in item["loc"])
        leaf = next(path for path in all_keys() if place.startswith(f"{path}."))
        broken.add(leaf)
        if leaf in leaves:
            problems.append(_sentence(leaf, item))
    return _validate(tree, broken, leaves, [])


def _sentence(leaf: str, item: Any) -> str:
    """One pydantic error as key, value and allowed values."""
    path = ".".join(str(part) for part in item["loc"] if part != "[key]")
    allowed = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if path == leaf and item["type"] not in ("value_error", "finite_number", "less_than_equal"):
        allowed = f"must be {all_keys()[path].type_text}"
    allowed += "; put it in quotes" if item["type"] == "string_type" else ""
    allowed += f"; see `rolepool config {leaf}`" if path != leaf else ""
    value = "" if item["type"] == "missing" else f"={show(item['input'])}"
    return f"{path}{value}: {allowed}"


# Keys of verl that rolepool does not have: other names of its own keys, keys without effect, keys that it refuses


class OtherKey(Section):
    """Keys, or sections, of another trainer that are treated in the same way."""

    keys: Items[str]
    """Their names, as patterns. A section stands for all keys below it."""
    works: Literal["any", "warned", "if_off"]
    """Which values are accepted: any value; any value, and the user is warned unless it is off; or off alone."""
    reason: str
    """Why they have no effect, or why they are refused and what to write instead."""
    same: Items[Any] = ()
    """Values that mean what rolepool does in any case. They count as off."""

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing that rolepool does not do."""
        return value in (None, False, "", "???") or value in ([], {}, *self.same)


class OtherKeys(Section):
    """The table."""

    renamed: dict[str, str]
    """Other names of keys and sections, as patterns. A new name may be renamed again by a later pattern."""
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
