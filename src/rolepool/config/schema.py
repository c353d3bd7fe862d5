"""The complete config, and the name, type, default and documentation of each key.

Owns the key tree. Does not read files. `config.rules` has the rules about several keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, create_model, model_validator
from pydantic.fields import FieldInfo

from rolepool.config import model_keys, run_keys
from rolepool.config.base import MAX_COUNT, KeyName, Section, Value, name_read_by
from rolepool.config.functions import ADV_ESTIMATORS
from rolepool.config.values import show

ROLE_SETTINGS: dict[str, type[Section]] = {}
"""The keys of each added role. `rolepool.placement.roles.register_role` adds them."""


class AddedRolesConfig(Section, extra="allow"):
    """A section for each added role."""

    @model_validator(mode="before")
    @classmethod
    def _validate_each(cls, sections: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {name: (ROLE_SETTINGS[name], ...) for name in sections}
        return dict(create_model("AddedRoles", **fields).model_validate(sections))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The section of an added role, which mypy cannot know."""


class Config(Section):
    """All keys, resolved and checked. `rolepool.config.load_config` creates it."""

    data: run_keys.DataConfig
    actor_rollout_ref: model_keys.ActorRolloutRefConfig
    critic: model_keys.CriticConfig
    reward_model: model_keys.MainRewardModelConfig
    custom_reward_function: run_keys.CustomRewardFunctionConfig
    reward: run_keys.RewardConfig
    environment: run_keys.EnvironmentConfig
    algorithm: run_keys.AlgorithmConfig
    trainer: run_keys.TrainerConfig
    placement: run_keys.PlacementConfig
    ray_kwargs: run_keys.RayKwargsConfig
    roles: AddedRolesConfig = Field(default_factory=AddedRolesConfig)

    @property
    def uses_critic(self) -> bool:
        """`critic.enable`; if that is null, whether the advantage estimator needs values."""
        if self.critic.enable is None:
            return self.estimator_needs_critic
        return self.critic.enable

    @property
    def estimator_needs_critic(self) -> bool:
        """What is known without importing it: a `module:function` does not say so until training
        starts."""
        return "values" in ADV_ESTIMATORS.get(self.algorithm.adv_estimator, ())

    @property
    def uses_reference(self) -> bool:
        """A reference is needed for a KL term, in the loss or in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def bypasses_old_log_prob(self) -> bool:
        """Whether the engine's log-probs of the sampled tokens are the old log-probs."""
        return self.algorithm.rollout_correction.bypass_mode

    @property
    def returns_log_probs(self) -> bool:
        """Whether rollouts have the engine's log-probs as `rollout_log_probs`."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.calculate_log_probs or rollout.checks_parity

    @property
    def rows_of_step(self) -> int:
        """Responses that a step samples and trains on."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def prompts_of_generation(self) -> int:
        """Prompts in one batch of generation. A step has several of them if groups are
        filtered."""
        data = self.data
        if self.algorithm.filter_groups.enable and data.gen_batch_size is not None:
            return data.gen_batch_size
        return data.train_batch_size

    @property
    def rows_of_generation(self) -> int:
        """Responses of one batch of generation."""
        return self.prompts_of_generation * self.actor_rollout_ref.rollout.n

    def rows_of_mini_batch(self, keys: model_keys.ActorConfig | model_keys.CriticConfig) -> int:
        """Responses of one optimizer step of the role with these keys."""
        return keys.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def tokens_of_longest_row(self) -> int:
        """The tokens of the longest prompt and of the longest response to it."""
        return self.data.max_prompt_length + self.data.max_response_length


def key_name(read: Callable[[Config], Value]) -> KeyName[Value]:
    """The name of the key, or of the section, that a function reads: `critic.model.path` for
    `lambda config: config.critic.model.path`. mypy checks that the key exists."""
    return KeyName(name_read_by(read))


@dataclass(frozen=True)
class Key:
    """One leaf of the config."""

    path: str
    field: FieldInfo

    @property
    def doc(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def default(self) -> Any:
        """The default as YAML data."""
        default = self.field.get_default(call_default_factory=True, validated_data={})
        return list(default) if isinstance(default, tuple) else default

    @cached_property
    def type_text(self) -> str:
        """The type and its limits, in words."""
        annotated: Any = Annotated[self.field.annotation, self.field]
        return _type_text(TypeAdapter(annotated).json_schema())

    @property
    def is_text(self) -> bool:
        """Whether an unquoted word such as `007` stays text and is not read as a number. YAML would
        read the two bounds `0.5_5` as the number 0.55."""
        return self.field.annotation in (str, str | None, float | str | None)


def add_role_keys(role: str, settings: type[Section]) -> None:
    """Add the keys of a role that is not built in: `placement.roles.ROLE`, and its settings as
    `roles.ROLE.*`."""
    ROLE_SETTINGS[role] = settings
    all_keys.cache_clear()
    all_sections.cache_clear()


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every leaf by its dotted path, in the order of the schema; keys of added roles come last."""
    keys = [*_walk(Config, "")]
    for role, settings in ROLE_SETTINGS.items():
        pool = FieldInfo(annotation=str | None, default=None, description=f"Pool of {role}.")
        keys += [Key(f"placement.roles.{role}", pool), *_walk(settings, f"roles.{role}.")]
    return {key.path: key for key in keys}


@lru_cache(maxsize=1)
def all_sections() -> frozenset[str]:
    """Dotted paths of all sections. `roles` is one even if no role was added."""
    paths = [*all_keys(), "roles.NAME"]
    sections: set[str] = set()
    for path in paths:
        for depth in range(1, path.count(".") + 1):
            sections.add(path.rsplit(".", depth)[0])
    return frozenset(sections)


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{path}.")
        else:
            yield Key(path, field)


def _type_text(schema: dict[str, Any]) -> str:
    """A JSON schema in words: `an integer, at least 1`, `one of fixed, adaptive`, `text or
    null`."""
    if "anyOf" in schema:
        return " or ".join(_type_text(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "const" in schema:
        return f"one of {schema['const']}"
    if "$ref" in schema:  # a section in a list, which has a short form
        return f"text or {TYPES['object']}"
    if "prefixItems" in schema:
        return f"a pair, each {_type_text(schema['prefixItems'][0])}"
    if "items" in schema:
        return f"a list, each {_type_text(schema['items'])}"
    words = [TYPES[schema["type"]]]
    for name, relation in BOUNDS.items():
        # A bound that every count has says nothing.
        if schema.get(name, MAX_COUNT) != MAX_COUNT:
            words.append(f"{relation} {schema[name]}")
    return ", ".join(words)


TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "a mapping, such as {name: value}",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "greater than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def correction_in_words(config: Config) -> str:
    """How differences between rollout and actor are corrected; empty if they are not."""
    keys = config.algorithm.rollout_correction
    words: list[str] = []
    if keys.weighs:
        what = f"weights of {keys.rollout_is} ratios, bounded by {show(keys.rollout_is_threshold)}"
        if keys.rollout_is_batch_normalize:
            what += ", with mean 1"
        words.append(what)
    if keys.rollout_rs is not None:
        threshold = show(keys.rollout_rs_threshold)
        words.append(f"left out of losses by {keys.rollout_rs}, bounded by {threshold}")
    if keys.loss_type == "reinforce":
        words.append("the policy loss is reinforce")
    return "; ".join(words)


def policy_loss_in_words(config: Config) -> str:
    """The policy loss, and how the losses of tokens become one number."""
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    mode = actor.loss_agg_mode
    if name == "geo_mean":
        return f"{name}, always the mean over sequences (actor.loss_agg_mode={mode} is not used)"
    words = f"{name}, aggregated by actor.loss_agg_mode={mode}"
    if name == "gspo" and mode != "seq-mean-token-mean":
        words += " (its authors use seq-mean-token-mean)"
    return words
