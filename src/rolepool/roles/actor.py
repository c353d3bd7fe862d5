"""The actor: the policy in training. Log-probs of rollouts, PPO updates, and its weights for whoever generates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rolepool.algorithm import LossCounts, agg_loss, compute_kl_loss, compute_policy_loss_vanilla
from rolepool.config import Config
from rolepool.models.forward import response_log_probs
from rolepool.models.packing import Batch
from rolepool.models.sharding import whole_parameters
from rolepool.placement import Role
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.model_role import INPUTS, MicroBatches, load_policy_of, offloads
from rolepool.roles.trained import TrainedRole


class Actor(TrainedRole):
    def __init__(
        self,
        config: Config,
        num_training_steps: int,
        dtype: torch.dtype = torch.float32,
        micro_batches: MicroBatches | None = None,
        policy_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] = compute_policy_loss_vanilla,
    ) -> None:
        models = config.actor_rollout_ref
        self.policy_loss = policy_loss
        super().__init__(config, Role.Actor, micro_batches, models.actor, "actor_rollout_ref.model", models.model)
        self.temperature = models.rollout.temperature
        model = load_policy_of(config, dtype, packed=self.packed)
        self.train(model, models.actor.fsdp_config, num_training_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=INPUTS)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs and entropys of the response tokens, under the weights as they are."""
        with self.trained.on_device(training=False) as model, torch.no_grad():
            model.eval()
            log_probs, entropies = self.in_passes(
                "compute_log_prob",
                data,
                lambda part: response_log_probs(model, part, temperature=self.temperature, packed=self.packed),
            )
        return DataProto.from_dict({"old_log_probs": log_probs, "entropys": entropies})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=(*INPUTS, "response_mask", "old_log_probs", "advantages", "ref_log_prob"),
    )
    def update_actor(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        metrics, keys = self.update(data, ends_step), self.config.actor_rollout_ref.actor
        return {**metrics, "actor/kl_coef": keys.kl_loss_coef} if keys.use_kl_loss else metrics

    def loss_of(self, part: Batch, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
        keys, mask = self.config.actor_rollout_ref.actor, part["response_mask"]
        mode = keys.loss_agg_mode
        scores = response_log_probs(self.trained.model, part, temperature=self.temperature, packed=self.packed)
        loss, metrics = self.policy_loss(
            old_log_prob=part["old_log_probs"],
            log_prob=scores.log_probs,
            advantages=part["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=keys,
            clip_ratio_low=keys.clip_ratio_low,
            clip_ratio_high=keys.clip_ratio_high,
            clip_ratio_c=keys.clip_ratio_c,
            counts=counts,
        )
        metrics = {**metrics, "pg_loss": loss.detach()}
        if keys.entropy_coeff != 0:
            entropy = agg_loss(scores.entropies, mask, mode, counts=counts)
            loss = loss - keys.entropy_coeff * entropy
            metrics["entropy"] = entropy.detach()
        if keys.use_kl_loss:
            kl_loss = compute_kl_loss(
                scores.log_probs, part["ref_log_prob"], mask, keys.kl_loss_type, mode, counts=counts
            )
            loss = loss + keys.kl_loss_coef * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        return loss, metrics

    def less_memory_at_rest(self) -> list[str]:
        fsdp = self.config.actor_rollout_ref.actor.fsdp_config
        return offloads("actor_rollout_ref.actor.fsdp_config", fsdp, self.device)

    # Weights for a rollout in another pool

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def weight_names(self) -> list[str]:
        """Of tied weights the first."""
        names: dict[int, str] = {}
        for name, weight in self.trained.model.state_dict(keep_vars=True).items():
            names.setdefault(id(weight), name)
        return list(names.values())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def export_weights(self, names: list[str]) -> DataProto:
        """Some weights, whole, as a batch of one row from rank 0 and of none from the others; as rollouts hold them,
        which on GPUs is in 16 bits."""
        dtype = None if self.device == "cpu" else torch.bfloat16
        with self.trained.on_device(training=False) as model:
            whole = whole_parameters(model, set(names))
            rows = {name: tensor.detach().to(dtype=dtype).cpu().unsqueeze(0) for name, tensor in whole}
        return DataProto.from_dict({name: row if self.rank == 0 else row[:0] for name, row in rows.items()})
