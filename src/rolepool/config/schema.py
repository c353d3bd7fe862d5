"""The complete config, the name, type, default and documentation of each key, and the rules about
several keys.

Owns the key tree and the rules that depend on the config alone. Does not read files. `placement`
checks what depends on pools and GPU counts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, create_model, model_validator
from pydantic.fields import FieldInfo

from rolepool.config import model_keys, run_keys
from rolepool.config.base import MAX_COUNT, Section, lines_of
from rolepool.config.functions import ADV_ESTIMATORS

ROLE_SETTINGS: dict[str, type[Section]] = {}
"""The keys of each added role. `rolepool.placement.roles.register_role` adds them."""


class AddedRolesConfig(Section, extra="allow"):
    """A section for each added role."""

    @model_validator(mode="before")
    @classmethod
    def _validate_each(cls, sections: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {name: (ROLE_SETTINGS[name], ...) for name in sections}
        return dict(create_model("AddedRoles", **fields).model_validate(sections))


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
        return self.estimator_needs_critic if self.critic.enable is None else self.critic.enable

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
    def rows_of_step(self) -> int:
        """Responses that a step samples and trains on."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n


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
        """Whether an unquoted word such as `007` stays text and is not read as a number."""
        return self.field.annotation in (str, str | None)


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
    return frozenset(
        path.rsplit(".", depth)[0] for path in paths for depth in range(1, path.count(".") + 1)
    )


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
        return " or ".join(_type_text(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return "one of " + ", ".join(schema["enum"] if "enum" in schema else [schema["const"]])
    if "$ref" in schema:  # a section in a list, which has a short form
        return f"text or {TYPES['object']}"
    if "prefixItems" in schema:
        return f"a pair, each {_type_text(schema['prefixItems'][0])}"
    if "items" in schema:
        return f"a list, each {_type_text(schema['items'])}"
    bounds = [
        f"{words} {schema[name]}"
        for name, words in BOUNDS.items()
        if schema.get(name, MAX_COUNT) != MAX_COUNT
    ]
    return ", ".join([TYPES[schema["type"]], *bounds])


TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
TYPES |= {"object": "a mapping, such as {name: value}"}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "greater than"}
BOUNDS |= {"maximum": "at most", "exclusiveMaximum": "less than"}


def policy_loss_in_words(config: Config) -> str:
    """The policy loss, and how the losses of tokens become one number."""
    actor = config.actor_rollout_ref.actor
    name, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if name == "geo_mean":
        return f"{name}, always the mean over sequences (actor.loss_agg_mode={mode} is not used)"
    words = f"{name}, aggregated by actor.loss_agg_mode={mode}"
    if name == "gspo" and mode != "seq-mean-token-mean":
        words += " (its authors use seq-mean-token-mean)"
    return words


# Rules about several keys: values that are each allowed, but contradict each other


def contradictions(config: Config) -> list[str]:
    """One line for each rule that the config breaks. It names the keys and what to change.

    Rules that read a key without a value say nothing, so every rule is a check of its own.
    """
    rollout = "actor_rollout_ref.rollout"
    return lines_of(
        _about_critic(config),
        _about_reward_model(config),
        _about_reward_functions(config),
        _about_reward_kwargs(config),
        _about_overlong(config),
        _about_turns(config),
        _about_temperature(config, rollout),
        _about_validation_temperature(config, f"{rollout}.val_kwargs"),
        _about_parity(config),
        _about_resuming(config),
        _about_determinism(config),
        _about_mini_batch(config, "actor_rollout_ref.actor"),
        _about_critics_mini_batch(config),
        _about_tokens(config, "actor_rollout_ref.actor"),
        _about_critics_tokens(config),
        _about_size(config),
        _about_placement(config),
        _about_split(config),
    )


def _about_critic(config: Config) -> Iterator[str]:
    if config.estimator_needs_critic and not config.uses_critic:
        name = config.algorithm.adv_estimator
        yield f"critic.enable=false: algorithm.adv_estimator={name} needs a critic; set critic.enable=null"


def _about_reward_model(config: Config) -> Iterator[str]:
    if config.reward_model.enable and config.reward_model.model.path is None:
        yield "reward_model.model.path=null: reward_model.enable=true needs a model; set its folder or hub id"


def _about_reward_functions(config: Config) -> Iterator[str]:
    """Only one of the three may say what the reward is."""
    if config.reward.functions:
        model, path = config.reward_model.enable, config.custom_reward_function.path
        if model or path is not None:
            other = "reward_model.enable=true" if model else f"custom_reward_function.path={path}"
            yield f"reward.functions: contradicts {other}; set only one of them"


def _about_reward_kwargs(config: Config) -> Iterator[str]:
    keys = config.custom_reward_function
    if keys.reward_kwargs and (config.reward_model.enable or keys.path is None):
        used = "with custom_reward_function.path and reward_model.enable=false"
        yield f"custom_reward_function.reward_kwargs: they are only used {used}; set both, or remove reward_kwargs"


def _about_temperature(config: Config, section: str) -> Iterator[str]:
    """Training divides logits by the temperature, even if decoding is greedy."""
    if config.at(section).temperature == 0:
        fix = f"for greedy decoding set {section}.do_sample=false and do not set the temperature"
        yield f"{section}.temperature=0: must be greater than 0; {fix}"


def _about_validation_temperature(config: Config, section: str) -> Iterator[str]:
    if config.at(section).do_sample:
        yield from _about_temperature(config, section)


def _about_parity(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout
    if keys.parity_check and not keys.has_actors_distribution:
        reason = "top_p, top_k and greedy decoding choose tokens with other probabilities than the actor computes"
        fix = "remove it, or remove top_p, top_k and do_sample"
        yield f"actor_rollout_ref.rollout.parity_check=true: {reason}; {fix}"


def _about_resuming(config: Config) -> Iterator[str]:
    if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path is None:
        fix = "set the folder of a checkpoint, or another resume_mode"
        yield f"trainer.resume_from_path=null: trainer.resume_mode=resume_path; {fix}"


def _about_determinism(config: Config) -> Iterator[str]:
    """vLLM chooses its own kernels, and its batches depend on time."""
    if config.trainer.deterministic and config.actor_rollout_ref.rollout.engine == "vllm":
        reason = "the engine vllm generates in a process of its own, which is not deterministic"
        fix = "set actor_rollout_ref.rollout.name=native, or remove trainer.deterministic"
        yield f"trainer.deterministic=true: {reason}; {fix}"


def _about_overlong(config: Config) -> Iterator[str]:
    """DAPO's penalty needs its reward manager, a score that is not a model's, and a length to
    divide by."""
    keys, kwargs = config.reward_model, config.reward_model.reward_kwargs
    buffer, section = kwargs.overlong_buffer_cfg, "reward_model.reward_kwargs.overlong_buffer_cfg"
    if buffer.enable and (keys.enable or keys.reward_manager != "dapo"):
        fix = "reward_model.enable=false" if keys.enable else "reward_model.reward_manager=dapo"
        yield f"{section}.enable=true: the penalty is for rules and functions with the manager dapo; set {fix}"
    if buffer.enable and not 0 < buffer.len <= kwargs.max_resp_len:
        yield f"{section}.len={buffer.len}: must be from 1 to reward_kwargs.max_resp_len={kwargs.max_resp_len}"


def _about_turns(config: Config) -> Iterator[str]:
    keys, name, section = (
        config.actor_rollout_ref.rollout,
        config.environment.name,
        "actor_rollout_ref.rollout",
    )
    if keys.multi_turn.enable != (name is not None):
        fix = "set both (docs/environments.md), or neither"
        yield f"{section}.multi_turn.enable={keys.multi_turn.enable}: environment.name={name or 'null'}; {fix}"
    if keys.multi_turn.enable and (size := keys.tensor_model_parallel_size) > 1:
        yield f"{section}.tensor_model_parallel_size={size}: multi_turn.enable=true needs 1; set 1"


def _about_mini_batch(config: Config, section: str) -> Iterator[str]:
    total, mini = config.data.train_batch_size, config.at(section).ppo_mini_batch_size
    if total % mini:
        fix = divisor_near(total, mini)
        yield f"{section}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={total}; use {fix}"


def _about_critics_mini_batch(config: Config) -> Iterator[str]:
    """The critic's size follows the actor's, and then one line is enough."""
    if (
        config.uses_critic
        and config.critic.ppo_mini_batch_size != config.actor_rollout_ref.actor.ppo_mini_batch_size
    ):
        yield from _about_mini_batch(config, "critic")


def _about_tokens(config: Config, section: str) -> Iterator[str]:
    """A micro-batch that is limited by tokens must have room for the longest sequence."""
    keys = config.at(section)
    if keys.use_dynamic_bsz:
        tokens = keys.ppo_max_token_len_per_gpu
        longest = config.data.max_prompt_length + config.data.max_response_length
        if tokens < longest:
            reason = f"one sequence may have {longest} tokens (data.max_prompt_length + data.max_response_length)"
            yield f"{section}.ppo_max_token_len_per_gpu={tokens}: {reason}; use at least {longest}"


def _about_critics_tokens(config: Config) -> Iterator[str]:
    if config.uses_critic:
        yield from _about_tokens(config, "critic")


def divisor_near(number: int, at_most: int) -> int:
    """A divisor of `number` that is at most `at_most`: the largest, if it is found within 10,000
    tries."""
    tries = range(at_most, max(0, at_most - 10_000), -1)
    return next(
        (candidate for candidate in tries if number % candidate == 0), math.gcd(number, at_most)
    )


def _about_size(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.nnodes * trainer.n_gpus_per_node > run_keys.MAX_SLOTS:
        product = f"times trainer.n_gpus_per_node={trainer.n_gpus_per_node} is more than {run_keys.MAX_SLOTS} GPUs"
        yield f"trainer.nnodes={trainer.nnodes}: {product}; use fewer"


def _about_placement(config: Config) -> Iterator[str]:
    """A key of another strategy would be ignored, so it is an error."""
    placement = config.placement
    if ":" in placement.strategy:  # a function of the user's own, which may use all keys
        return
    of_split = [
        f"placement.split.{name}={value}" for name, value in _written(placement.split).items()
    ]
    of_pools = [f"placement.pools.{name}" for name in placement.pools]
    of_roles = [f"placement.roles.{name}" for name in placement.roles.model_dump(exclude_none=True)]
    for strategy, keys in {"split": of_split, "custom": of_pools + of_roles}.items():
        if placement.strategy != strategy:
            needed, chosen = (
                f"placement.strategy={strategy}",
                f"placement.strategy={placement.strategy}",
            )
            yield from (
                f"{key}: is for {needed}, but {chosen}; set {needed}, or remove it" for key in keys
            )


def _about_split(config: Config) -> Iterator[str]:
    """Only one key may say how the GPUs are divided; an axis may be set together with its own
    number."""
    split = config.placement.split
    written = _written(split)
    number = {"gpu": "actor_gpus_per_node", "node": "actor_nodes"}.get(split.axis)
    if (
        config.placement.strategy == "split"
        and len(written) > 1
        and set(written) != {"axis", number}
    ):
        first, *others = [f"placement.split.{name}={value}" for name, value in written.items()]
        yield f"{first}: contradicts {' and '.join(others)}; set only one of them"


def _written(section: Section) -> dict[str, Any]:
    """The keys of a section that do not have their defaults."""
    return section.model_dump(exclude_defaults=True)
