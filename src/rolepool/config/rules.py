"""Rules about several keys: values that are each allowed, but contradict each other.

Owns the rules that depend on the config alone. `placement.checks` has those that depend on pools
and GPU counts.
"""

import math
from collections.abc import Iterator

from rolepool.config import run_keys
from rolepool.config.base import Section, lines_of
from rolepool.config.functions import ENGINES, ENGINES_WITH_A_PROCESS, policy_loss_takes
from rolepool.config.rollout_correction import read_rules_with_bounds
from rolepool.config.schema import Config
from rolepool.config.values import show

CORRECTION = "algorithm.rollout_correction"
GROUPS = "algorithm.filter_groups"


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
        _about_weights(config),
        _about_bypass(config),
        _about_weights_of_tokens(config),
        _about_rejection(config),
        _about_log_probs_to_compare(config),
        _about_loss_type(config),
        _about_losses_without_weights(config),
        _about_groups(config),
        _about_generation_batches(config),
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
        other = None
        path = config.custom_reward_function.path
        if config.reward_model.enable:
            other = "reward_model.enable=true"
        elif path is not None:
            other = f"custom_reward_function.path={path}"
        if other is not None:
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


def _about_weights(config: Config) -> Iterator[str]:
    """Only an engine that keeps its weights can take changes of them."""
    keys = config.actor_rollout_ref.rollout
    takes_changes = keys.engine in ENGINES and keys.engine not in ENGINES_WITH_A_PROCESS
    if keys.weights == "delta" and not takes_changes:
        name = f"actor_rollout_ref.rollout.name={keys.name}"
        yield f"actor_rollout_ref.rollout.weights=delta: {name} takes all weights in every step; use auto"


def _about_bypass(config: Config) -> Iterator[str]:
    """The loss compares the actor's probabilities with the engine's, so both must be those of the
    same distribution."""
    if not config.bypasses_old_log_prob:
        return
    settings = _settings_of_other_probabilities(config)
    if settings:
        reason = "the engine then chooses tokens with other probabilities than the actor computes"
        fix = "remove bypass_mode, or the keys that change how tokens are chosen"
        yield f"{CORRECTION}.bypass_mode=true: contradicts {settings}: {reason}; {fix}"


def _settings_of_other_probabilities(config: Config) -> str:
    """The settings with which the engine samples from another distribution than the actor computes,
    in words."""
    keys = config.actor_rollout_ref.rollout
    wrong: list[str] = []
    if not keys.do_sample:
        wrong.append("do_sample=false")
    if keys.top_k != -1:
        wrong.append(f"top_k={keys.top_k}")
    if keys.top_p != 1:
        wrong.append(f"top_p={keys.top_p}")
    return " and ".join(f"actor_rollout_ref.rollout.{setting}" for setting in wrong)


def _about_weights_of_tokens(config: Config) -> Iterator[str]:
    keys = config.algorithm.rollout_correction
    if keys.rollout_is is not None and keys.rollout_is_threshold is None:
        reason = f"rollout_is={keys.rollout_is} needs a bound of the weights"
        yield f"{CORRECTION}.rollout_is_threshold=null: {reason}; set a number such as 2.0"


def _about_rejection(config: Config) -> Iterator[str]:
    keys = config.algorithm.rollout_correction
    if keys.rollout_rs is None:
        return
    threshold = keys.rollout_rs_threshold
    setting = f"{CORRECTION}.rollout_rs_threshold={show(threshold)}"
    if threshold is None:
        reason = f"rollout_rs={keys.rollout_rs} needs a bound"
        yield f"{setting}: {reason}; set one, such as 0.5_2.0 for k1 and 0.01 for k2 and k3"
        return
    try:
        read_rules_with_bounds(keys.rollout_rs, threshold)
    except ValueError as error:
        yield f"{setting}: {error}"


def _about_log_probs_to_compare(config: Config) -> Iterator[str]:
    """Weights and rules compare the actor with the engine, which must return its log-probs."""
    keys = config.algorithm.rollout_correction
    if not keys.corrects_before_update:  # bypass_mode has rules of its own
        return
    setting = _setting_that_corrects(config)
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        fix = "set actor_rollout_ref.rollout.calculate_log_probs=true"
        yield f"{setting}: the engine must return its log-probs; {fix}"
    settings = _settings_of_other_probabilities(config)
    if settings:
        reason = "the engine then chooses tokens with other probabilities than the actor computes"
        fix = "remove the correction, or the keys that change how tokens are chosen"
        yield f"{setting}: contradicts {settings}: {reason}; {fix}"


def _setting_that_corrects(config: Config) -> str:
    keys = config.algorithm.rollout_correction
    if keys.rollout_is is not None:
        return f"{CORRECTION}.rollout_is={keys.rollout_is}"
    return f"{CORRECTION}.rollout_rs={keys.rollout_rs}"


def _about_loss_type(config: Config) -> Iterator[str]:
    keys = config.algorithm.rollout_correction
    if keys.loss_type != "reinforce":
        return
    setting = f"{CORRECTION}.loss_type=reinforce"
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    if not keys.bypass_mode:
        fix = f"set {CORRECTION}.bypass_mode=true, or {key}=gpg for the same loss without it"
        yield f"{setting}: it is a loss for bypass_mode; {fix}"
    elif loss_mode != "vanilla":
        yield f"{setting}: contradicts {key}={loss_mode}; set only one of them"


def _about_losses_without_weights(config: Config) -> Iterator[str]:
    keys = config.algorithm.rollout_correction
    if not keys.weighs or keys.bypass_mode:
        return
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not policy_loss_takes(loss_mode, "rollout_is_weights"):
        reason = (
            f"it has no argument rollout_is_weights, which {_setting_that_corrects(config)} needs"
        )
        fix = "add the argument (docs/extending.md), or remove rollout_is"
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}: {reason}; {fix}"


def _about_groups(config: Config) -> Iterator[str]:
    """Groups are chosen by scores, before anything is subtracted from these."""
    keys = config.algorithm.filter_groups
    if not keys.enable:
        return
    num_samples = config.actor_rollout_ref.rollout.n
    if num_samples == 1:
        reason = "with actor_rollout_ref.rollout.n=1 a group has one response and no differences"
        fix = "set n to at least 2, or enable to false"
        yield f"{GROUPS}.enable=true: {reason}; {fix}"
    if keys.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        reason = "the KL penalty of algorithm.use_kl_in_reward=true is computed after the choice"
        yield f"{GROUPS}.metric=seq_final_reward: {reason}; use seq_reward, the score without it"


def _about_generation_batches(config: Config) -> Iterator[str]:
    size = config.data.gen_batch_size
    others = (None, config.data.train_batch_size)
    if size not in others and not config.algorithm.filter_groups.enable:
        reason = f"without {GROUPS}.enable=true, data.train_batch_size prompts are generated"
        yield f"data.gen_batch_size={size}: {reason}; set {GROUPS}.enable=true, or remove it"


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
    keys = config.reward_model
    kwargs = keys.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    section = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if buffer.enable and (keys.enable or keys.reward_manager != "dapo"):
        fix = "reward_model.enable=false" if keys.enable else "reward_model.reward_manager=dapo"
        yield f"{section}.enable=true: the penalty is for rules and functions with the manager dapo; set {fix}"
    if buffer.enable and not 0 < buffer.len <= kwargs.max_resp_len:
        most = f"reward_kwargs.max_resp_len={kwargs.max_resp_len}"
        yield f"{section}.len={buffer.len}: must be from 1 to {most}"


def _about_turns(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout
    name = config.environment.name
    section = "actor_rollout_ref.rollout"
    if keys.multi_turn.enable != (name is not None):
        fix = "set both (docs/environments.md), or neither"
        yield f"{section}.multi_turn.enable={keys.multi_turn.enable}: environment.name={name or 'null'}; {fix}"
    size = keys.tensor_model_parallel_size
    if keys.multi_turn.enable and size > 1:
        yield f"{section}.tensor_model_parallel_size={size}: multi_turn.enable=true needs 1; set 1"


def _about_mini_batch(config: Config, section: str) -> Iterator[str]:
    total = config.data.train_batch_size
    mini: int = config.at(section).ppo_mini_batch_size
    if total % mini:
        fix = divisor_near(total, mini)
        yield f"{section}.ppo_mini_batch_size={mini}: must divide data.train_batch_size={total}; use {fix}"


def _about_critics_mini_batch(config: Config) -> Iterator[str]:
    """The critic's size follows the actor's, and then one line is enough."""
    actors = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.uses_critic and config.critic.ppo_mini_batch_size != actors:
        yield from _about_mini_batch(config, "critic")


def _about_tokens(config: Config, section: str) -> Iterator[str]:
    """A micro-batch that is limited by tokens must have room for the longest sequence."""
    keys = config.at(section)
    if keys.use_dynamic_bsz:
        tokens = keys.ppo_max_token_len_per_gpu
        longest = config.tokens_of_longest_row
        if tokens < longest:
            reason = f"one sequence may have {longest} tokens (data.max_prompt_length + data.max_response_length)"
            yield f"{section}.ppo_max_token_len_per_gpu={tokens}: {reason}; use at least {longest}"


def _about_critics_tokens(config: Config) -> Iterator[str]:
    if config.uses_critic:
        yield from _about_tokens(config, "critic")


def divisor_near(number: int, at_most: int) -> int:
    """A divisor of `number` that is at most `at_most`: the largest, if it is found within 10,000
    tries."""
    for candidate in range(at_most, max(0, at_most - 10_000), -1):
        if number % candidate == 0:
            return candidate
    return math.gcd(number, at_most)


def _about_size(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.nnodes * trainer.n_gpus_per_node > run_keys.MAX_SLOTS:
        per_node = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
        problem = f"times {per_node} is more than {run_keys.MAX_SLOTS} GPUs"
        yield f"trainer.nnodes={trainer.nnodes}: {problem}; use fewer"


def _about_placement(config: Config) -> Iterator[str]:
    """A key of another strategy would be ignored, so it is an error."""
    placement = config.placement
    if ":" in placement.strategy:  # a function of the user's own, which may use all keys
        return
    # The strategy that each setting is for.
    strategies: dict[str, str] = {}
    for name, value in _written(placement.split).items():
        strategies[f"split.{name}={value}"] = "split"
    for name in placement.pools:
        strategies[f"pools.{name}"] = "custom"
    for name in placement.roles.model_dump(exclude_none=True):
        strategies[f"roles.{name}"] = "custom"
    for setting, strategy in strategies.items():
        if strategy != placement.strategy:
            needed = f"placement.strategy={strategy}"
            chosen = f"placement.strategy={placement.strategy}"
            yield f"placement.{setting}: is for {needed}, but {chosen}; set {needed}, or remove it"


def _about_split(config: Config) -> Iterator[str]:
    """Only one key may say how the GPUs are divided; an axis may be set together with its own
    number."""
    split = config.placement.split
    written = _written(split)
    if config.placement.strategy != "split" or len(written) < 2:
        return
    number_of_axis = {"gpu": "actor_gpus_per_node", "node": "actor_nodes"}
    if set(written) == {"axis", number_of_axis.get(split.axis)}:
        return
    settings = [f"placement.split.{name}={value}" for name, value in written.items()]
    first, *others = settings
    contradicting = " and ".join(others)
    yield f"{first}: contradicts {contradicting}; set only one of them"


def _written(section: Section) -> dict[str, object]:
    """The keys of a section that do not have their defaults."""
    return section.model_dump(exclude_defaults=True)
