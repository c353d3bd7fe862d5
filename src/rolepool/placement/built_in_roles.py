"""The rows of the built-in roles, and the operations of a step.

Owns what actor, rollout, reference, critic and reward model are. mypy checks what a row names: keys
with the classes of the config, and methods with the worker classes. It does so only inside of
functions, because each worker class imports the table, so each row is a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolepool.config import Config
from rolepool.config.schema import key_name
from rolepool.placement.role_spec import MicroBatchKeys, Operation, RoleSpec, WorkerName

if TYPE_CHECKING:
    # Only mypy reads this. The worker classes are to the right of this package, and need torch.
    from rolepool.roles.actor_critic import Actor, Critic, Reference
    from rolepool.roles.reward_model import RewardModel
    from rolepool.roles.rollout import Rollout

UPDATE_WEIGHTS = "update_weights"
"""The operation that sends the actor's weights to the rollout."""

# Work of the driver, which belongs to no role. The last two follow a step.
ADV = Operation("adv", color="#595959", is_per_token=True)
TESTING = Operation("testing", color="#B3B3B3")
SAVE_CHECKPOINT = Operation("save_checkpoint", color="#D9D9D9")


def _actor_computes_old_log_probs(config: Config) -> bool:
    """A step of a user may compute them in any case."""
    return not config.bypasses_old_log_prob or config.trainer.step is not None


def _actor() -> RoleSpec:
    worker: WorkerName[Actor] = WorkerName("rolepool.roles.actor_critic:Actor")
    old_log_prob = Operation(
        "old_log_prob",
        method=worker.method(lambda actor: actor.compute_log_prob),
        color="#56B4E9",
        micro_batch=MicroBatchKeys(
            rows=key_name(
                lambda config: config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
            ),
            tokens=key_name(
                lambda config: config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
            ),
            by_tokens=key_name(
                lambda config: config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
            ),
        ),
        is_used=_actor_computes_old_log_probs,
    )
    update_actor = Operation(
        "update_actor",
        method=worker.method(lambda actor: actor.update_actor),
        color="#0072B2",
        micro_batch=MicroBatchKeys(
            rows=key_name(
                lambda config: config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
            ),
            tokens=key_name(
                lambda config: config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            ),
            by_tokens=key_name(lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz),
        ),
        trains=True,
        is_per_token=True,
    )
    return RoleSpec(
        name="actor",
        worker=worker,
        section=key_name(lambda config: config.actor_rollout_ref.actor),
        model=key_name(lambda config: config.actor_rollout_ref.model),
        fsdp=key_name(lambda config: config.actor_rollout_ref.actor.fsdp_config),
        checkpoints_to_keep=key_name(lambda config: config.trainer.max_actor_ckpt_to_keep),
        sends_weights=True,
        operations=(old_log_prob, update_actor),
    )


def _rollout() -> RoleSpec:
    worker: WorkerName[Rollout] = WorkerName("rolepool.roles.rollout:Rollout")
    actor: WorkerName[Actor] = WorkerName("rolepool.roles.actor_critic:Actor")
    gen = Operation(
        "gen",
        method=worker.method(lambda rollout: rollout.generate_sequences),
        color="#009E73",
        is_per_token=True,
        generates=True,
    )
    # It has the method of `gen`, so a step says itself which of its calls are the baseline.
    baseline = Operation("baseline", method=gen.method, color="#80CEB9")
    update_weights = Operation(
        UPDATE_WEIGHTS,
        method=worker.method(lambda rollout: rollout.take_weights),
        other_methods=(
            worker.method(lambda rollout: rollout.take_weights_here),
            actor.method(lambda actor: actor.export_rows),
            actor.method(lambda actor: actor.sent_receipt),
            worker.method(lambda rollout: rollout.receive_weights),
            actor.method(lambda actor: actor.send_weights),
            actor.method(lambda actor: actor.weights_to_send),
            actor.method(lambda actor: actor.open_meeting),
            # These two are methods of both roles.
            worker.method(lambda rollout: rollout.join_transfers),
            worker.method(lambda rollout: rollout.await_turn),
        ),
        color="#8C8C8C",
    )
    return RoleSpec(
        name="rollout",
        worker=worker,
        section=key_name(lambda config: config.actor_rollout_ref.rollout),
        model=key_name(lambda config: config.actor_rollout_ref.model),
        tensor_parallel=key_name(
            lambda config: config.actor_rollout_ref.rollout.tensor_model_parallel_size
        ),
        memory_key=key_name(lambda config: config.actor_rollout_ref.rollout.gpu_memory_utilization),
        operations=(gen, baseline, update_weights),
    )


def _reference() -> RoleSpec:
    def why_unused(config: Config) -> str | None:
        if config.uses_reference:
            return None
        return "no KL term is used (actor.use_kl_loss, algorithm.use_kl_in_reward)"

    worker: WorkerName[Reference] = WorkerName("rolepool.roles.actor_critic:Reference")
    ref = Operation(
        "ref",
        method=worker.method(lambda reference: reference.compute_ref_log_prob),
        color="#CC79A7",
        micro_batch=MicroBatchKeys(
            rows=key_name(
                lambda config: config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
            ),
            tokens=key_name(
                lambda config: config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
            ),
            by_tokens=key_name(
                lambda config: config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
            ),
        ),
        is_per_token=True,
    )
    return RoleSpec(
        name="ref",
        worker=worker,
        section=key_name(lambda config: config.actor_rollout_ref.ref),
        model=key_name(lambda config: config.actor_rollout_ref.model),
        fsdp=key_name(lambda config: config.actor_rollout_ref.ref.fsdp_config),
        why_unused=why_unused,
        operations=(ref,),
    )


def _critic() -> RoleSpec:
    def why_unused(config: Config) -> str | None:
        if config.uses_critic:
            return None
        return f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"

    worker: WorkerName[Critic] = WorkerName("rolepool.roles.actor_critic:Critic")
    values = Operation(
        "values",
        method=worker.method(lambda critic: critic.compute_values),
        color="#E69F00",
        micro_batch=MicroBatchKeys(
            rows=key_name(lambda config: config.critic.forward_micro_batch_size_per_gpu),
            tokens=key_name(lambda config: config.critic.forward_max_token_len_per_gpu),
            by_tokens=key_name(lambda config: config.critic.use_dynamic_bsz),
        ),
        is_per_token=True,
    )
    update_critic = Operation(
        "update_critic",
        method=worker.method(lambda critic: critic.update_critic),
        color="#D55E00",
        micro_batch=MicroBatchKeys(
            rows=key_name(lambda config: config.critic.ppo_micro_batch_size_per_gpu),
            tokens=key_name(lambda config: config.critic.ppo_max_token_len_per_gpu),
            by_tokens=key_name(lambda config: config.critic.use_dynamic_bsz),
        ),
        trains=True,
        is_per_token=True,
    )
    return RoleSpec(
        name="critic",
        worker=worker,
        section=key_name(lambda config: config.critic),
        model=key_name(lambda config: config.critic.model),
        fsdp=key_name(lambda config: config.critic.model.fsdp_config),
        why_unused=why_unused,
        has_scalar_head=True,
        checkpoints_to_keep=key_name(lambda config: config.trainer.max_critic_ckpt_to_keep),
        operations=(values, update_critic),
    )


def _reward_model() -> RoleSpec:
    def why_unused(config: Config) -> str | None:
        if config.reward_model.enable:
            return None
        return "the reward is a rule (reward_model.enable=false)"

    worker: WorkerName[RewardModel] = WorkerName("rolepool.roles.reward_model:RewardModel")
    reward = Operation(
        "reward",
        method=worker.method(lambda reward_model: reward_model.compute_scores),
        color="#F0E442",
        micro_batch=MicroBatchKeys(
            rows=key_name(lambda config: config.reward_model.micro_batch_size_per_gpu),
            tokens=key_name(lambda config: config.reward_model.forward_max_token_len_per_gpu),
            by_tokens=key_name(lambda config: config.reward_model.use_dynamic_bsz),
        ),
    )
    return RoleSpec(
        name="reward_model",
        worker=worker,
        rule_worker="rolepool.roles.rule_reward:RuleReward",
        section=key_name(lambda config: config.reward_model),
        model=key_name(lambda config: config.reward_model.model),
        max_length=key_name(lambda config: config.reward_model.max_length),
        why_unused=why_unused,
        has_scalar_head=True,
        can_pack=False,
        operations=(reward,),
    )


# The rollout comes after the actor, because it shares the actor's weights if both are in one
# process.
BUILT_IN_ROLES = (_actor(), _rollout(), _reference(), _critic(), _reward_model())

STEP_ORDER = (
    "gen",
    "baseline",
    "reward",
    "values",
    "old_log_prob",
    "ref",
    "adv",
    "update_critic",
    "update_actor",
)
"""Operations in the order of a step. All others follow, in the order of the roles."""


def _operations_in_order() -> dict[str, Operation]:
    by_name: dict[str, Operation] = {}
    for spec in BUILT_IN_ROLES:
        by_name.update({operation.name: operation for operation in spec.operations})
    for operation in (ADV, TESTING, SAVE_CHECKPOINT):
        by_name[operation.name] = operation
    return {name: by_name[name] for name in dict.fromkeys((*STEP_ORDER, *by_name))}


BUILT_IN_OPERATIONS = _operations_in_order()
"""By name, in the order of a step, which is also the order of legends."""
