"""The actor: the policy in training. Log-probs of rollouts, PPO updates, and its weights for whoever generates."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.algorithm import LossCounts, agg_loss, compute_kl_loss, compute_policy_loss_vanilla
from rolepool.config import Config
from rolepool.models.forward import response_log_probs
from rolepool.models.loading import load_policy
from rolepool.models.packing import Batch, rows_on
from rolepool.models.sharding import num_shards, whole_parameters
from rolepool.models.training import TrainedModel
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.less_memory import offloads, remedies
from rolepool.roles.passes import Passes, PassMemory, response_share, shape_of
from rolepool.roles.trained import TrainedRole

INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")


class Actor(TrainedRole):
    def __init__(self, config: Config, num_training_steps: int, dtype: torch.dtype = torch.float32) -> None:
        model_keys = config.actor_rollout_ref.model
        self.config = config
        self.keys = config.actor_rollout_ref.actor
        self.temperature = config.actor_rollout_ref.rollout.temperature
        self.packed = model_keys.use_remove_padding
        self.shape = shape_of(model_keys.path, model_keys.override_config)
        memory = PassMemory(
            self.shape,
            num_shards=num_shards(self.keys.fsdp_config.fsdp_size, self.world_size),
            checkpointing=model_keys.enable_gradient_checkpointing,
            logit_share=response_share(config),
            packed=self.packed,
        )
        tokens_key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        max_tokens = self.keys.ppo_max_token_len_per_gpu if self.keys.use_dynamic_bsz else None
        self.passes = {
            "compute_log_prob": Passes(
                rows_key="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
                rows_per_pass=config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
                tokens_key=tokens_key,
                max_tokens=max_tokens,
                device=self.device,
                bytes_of_pass=memory.scoring,
            ),
            "update_actor": Passes(
                rows_key="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                rows_per_pass=self.keys.ppo_micro_batch_size_per_gpu,
                tokens_key=tokens_key,
                max_tokens=max_tokens,
                device=self.device,
                bytes_of_pass=memory.training,
            ),
        }
        model = load_policy(
            model_keys.path,
            dtype=dtype,
            trust_remote_code=model_keys.trust_remote_code,
            overrides=dict(model_keys.override_config),
            packed=self.packed,
        )
        self.trained = TrainedModel(
            model,
            device=self.device,
            optim=self.keys.optim,
            fsdp=self.keys.fsdp_config,
            grad_clip=self.keys.grad_clip,
            num_training_steps=num_training_steps,
            checkpointing=model_keys.enable_gradient_checkpointing,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=INPUTS)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs and entropys of the response tokens, under the weights as they are."""
        batch = {key: data.batch[key] for key in INPUTS}
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        with self.trained.on_device(training=False) as model, torch.no_grad():
            model.eval()
            for rows in self.passes["compute_log_prob"].cut(batch["attention_mask"]):
                part = rows_on(self.device, batch, rows)
                scores = response_log_probs(model, part, temperature=self.temperature, packed=self.packed)
                parts.update(zip(rows, zip(*scores, strict=True), strict=True))
        log_probs, entropies = (
            torch.stack(column).cpu() for column in zip(*(parts[row] for row in range(len(data))), strict=True)
        )
        return DataProto.from_dict({"old_log_probs": log_probs, "entropys": entropies})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=(*INPUTS, "response_mask", "old_log_probs", "advantages", "ref_log_prob"),
    )
    def update_actor(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.context.dp_size
        metrics = self.update("actor", data, rows, self.passes["update_actor"], self._loss_of, ends_step)
        return {**metrics, "actor/kl_coef": self.keys.kl_loss_coef} if self.keys.use_kl_loss else metrics

    def _loss_of(self, part: Batch, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
        keys, mask, mode = self.keys, part["response_mask"], self.keys.loss_agg_mode
        scores = response_log_probs(self.trained.model, part, temperature=self.temperature, packed=self.packed)
        policy_loss, metrics = compute_policy_loss_vanilla(
            part["old_log_probs"],
            scores.log_probs,
            part["advantages"],
            mask,
            mode,
            clip_ratio_low=keys.clip_ratio_low,
            clip_ratio_high=keys.clip_ratio_high,
            clip_ratio_c=keys.clip_ratio_c,
            counts=counts,
        )
        loss = policy_loss
        metrics["pg_loss"] = policy_loss.detach()
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

    def less_memory(self, method: str) -> list[str]:
        own = self.passes[method].smaller() if method in self.passes else []
        if method == "update_actor" and not self.config.actor_rollout_ref.model.enable_gradient_checkpointing:
            own.append("actor_rollout_ref.model.enable_gradient_checkpointing=true")
        return remedies(self, self.config, own)

    def less_memory_at_rest(self) -> list[str]:
        return offloads("actor_rollout_ref.actor.fsdp_config", self.keys.fsdp_config, self.device)

    # Weights for a rollout in another pool

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def weight_names(self) -> list[str]:
        return list(self.trained.model.state_dict())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def export_weights(self, names: list[str]) -> DataProto:
        """Some weights, whole, as a batch of one row from rank 0 and of none from the others."""
        with self.trained.on_device(training=False) as model:
            whole = whole_parameters(model, set(names))
            rows = {name: tensor.detach().cpu().unsqueeze(0) for name, tensor in whole}
        return DataProto.from_dict({name: row if self.rank == 0 else row[:0] for name, row in rows.items()})
