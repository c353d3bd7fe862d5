"""The whole config, and what can be asked of its keys: names, types, defaults, documentation.

Owns the key tree. Does not read files and does not judge combinations of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from rolepool.config.base import MAX_COUNT, Section
from rolepool.config.model_keys import ActorRolloutRef, Critic, RewardModel
from rolepool.config.run_keys import Algorithm, CustomRewardFunction, Data, Placement, RayKwargs, Trainer


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
    field: FieldInfo

    @property
    def doc(self) -> str:
        return (self.field.description or "").strip()

    @property
    def default(self) -> Any:
        """As YAML would hold it."""
        default = self.field.get_default(call_default_factory=True, validated_data={})
        return list(default) if isinstance(default, tuple) else default

    @cached_property
    def type_text(self) -> str:
        """What it may hold, in words."""
        annotated: Any = Annotated[self.field.annotation, self.field]
        return _type_text(TypeAdapter(annotated).json_schema())

    @property
    def is_text(self) -> bool:
        """Whether a bare word such as `007` is to be taken as written and not as a number."""
        return self.field.annotation in (str, str | None)


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every leaf by its dotted path, in the order of the schema."""
    return {key.path: key for key in _walk(Config, "")}


@lru_cache(maxsize=1)
def all_sections() -> frozenset[str]:
    """Dotted paths of all groups of keys."""
    return frozenset(path.rsplit(".", depth)[0] for path in all_keys() for depth in range(1, path.count(".") + 1))


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{path}.")
        else:
            yield Key(path, field)


def _type_text(schema: dict[str, Any]) -> str:
    """A JSON schema as a user would say it: `a whole number, at least 1`, `one of gae, grpo`, `text or null`."""
    if "anyOf" in schema:
        return " or ".join(_type_text(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(schema["enum"] if "enum" in schema else [schema["const"]])
    if "prefixItems" in schema:
        return f"a pair, each {_type_text(schema['prefixItems'][0])}"
    if "items" in schema:
        return f"a list, each {_type_text(schema['items'])}"
    bounds = [f"{words} {schema[name]}" for name, words in BOUNDS.items() if schema.get(name, MAX_COUNT) != MAX_COUNT]
    return ", ".join([TYPES[schema["type"]], *bounds])


TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a mapping, such as {name: value}",
    "null": "null",
}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "over", "maximum": "at most", "exclusiveMaximum": "under"}
