"""The whole config, and what can be asked of its keys: names, types, defaults, documentation.

Owns the key tree. Does not read files and does not judge combinations of values.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from rolepool.config.base import Section
from rolepool.config.model_keys import ActorRolloutRef, Critic, RewardModel
from rolepool.config.run_keys import Algorithm, CustomRewardFunction, Data, Placement, Pool, RayKwargs, Trainer


class Config(Section):
    """All keys, resolved and checked. Made by `rolepool.config.load_config`."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward_model: RewardModel
    custom_reward_function: CustomRewardFunction
    algorithm: Algorithm
    trainer: Trainer
    placement: Placement
    ray_kwargs: RayKwargs

    @property
    def uses_critic(self) -> bool:
        """`critic.enable`, or what the advantage estimator needs where that is null."""
        if self.critic.enable is None:
            return self.algorithm.adv_estimator == "gae"
        return self.critic.enable

    @property
    def uses_reference(self) -> bool:
        """A reference is needed as soon as a KL term is, in the loss or in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward


@dataclass(frozen=True)
class Key:
    """One leaf of the config."""

    path: str
    type_text: str
    default: Any
    doc: str
    is_text: bool
    is_mapping: bool


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every leaf by its dotted path, in the order of the schema."""
    return {key.path: key for key in _walk(Config, "")}


@lru_cache(maxsize=1)
def all_sections() -> frozenset[str]:
    """Dotted paths of all groups of keys."""
    return frozenset(path.rsplit(".", depth)[0] for path in all_keys() for depth in range(1, path.count(".") + 1))


def default_tree() -> dict[str, Any]:
    """The defaults as a nested dict, those that follow another key as `${...}`."""
    tree: dict[str, Any] = {}
    for key in all_keys().values():
        *parents, leaf = key.path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = list(key.default) if isinstance(key.default, tuple) else key.default
    return tree


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{path}.")
        else:
            yield Key(
                path=path,
                type_text=_type_text(field.annotation, field.metadata),
                default=field.get_default(call_default_factory=True, validated_data={}),
                doc=(field.description or "").strip(),
                is_text=_allows_text(field.annotation),
                is_mapping=get_origin(field.annotation) is dict,
            )


def _allows_text(annotation: Any) -> bool:
    """Whether a bare word such as `007` is to be taken as written and not as a number."""
    return annotation is str or (_is_union(annotation) and str in get_args(annotation))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _type_text(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """The type as a user would say it: `int, at least 1`, `one of gae, grpo`, `text or null`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0], args[1:])
    if _is_union(annotation):
        return " or ".join("null" if arg is type(None) else _type_text(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        items = "pair" if len(args) == 2 and args[1] is not Ellipsis else "list"
        return f"{items} of {_type_text(args[0])}"
    if origin is dict:
        value = get_args(annotation)[1]
        return "mapping of names to pools" if value is Pool else "mapping"
    name = {int: "int", float: "float", bool: "bool", str: "text"}[annotation]
    bounds = _bounds_text(metadata)
    return f"{name}, {bounds}" if bounds else name


def _bounds_text(metadata: list[Any] | tuple[Any, ...]) -> str:
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    words = []
    for item in flat:
        if isinstance(item, annotated_types.Ge):
            words.append(f"at least {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            words.append(f"over {item.gt}")
        elif isinstance(item, annotated_types.Le) and item.le != 2**31 - 1:
            words.append(f"at most {item.le}")
        elif isinstance(item, annotated_types.Lt):
            words.append(f"under {item.lt}")
    return ", ".join(words)
