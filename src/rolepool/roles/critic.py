"""The critic: a value for every response token, and updates towards the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.algorithm import LossCounts, compute_value_loss, masked_sum
from rolepool.config import Config
from rolepool.models.forward import response_values
from rolepool.models.loading import load_critic
from rolepool.models.packing import Batch, rows_on
from rolepool.models.sharding import num_shards
from rolepool.models.training import TrainedModel
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.roles.actor import INPUTS
from rolepool.roles.less_memory import offloads, remedies
from rolepool.roles.passes import Passes, PassMemory, shape_of
from rolepool.roles.trained import TrainedRole


class Critic(TrainedRole):
    def __init__(self, config: Config, num_training_steps: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.keys = config.critic
        self.packed = self.keys.model.use_remove_padding
        self.shape = shape_of(self.keys.model.path)
        memory = PassMemory(
            self.shape,
            num_shards=num_shards(self.keys.model.fsdp_config.fsdp_size, self.world_size),
            checkpointing=self.keys.model.enable_gradient_checkpointing,
            logit_share=0.0,
            packed=self.packed,
        )
        max_tokens = self.keys.ppo_max_token_len_per_gpu if self.keys.use_dynamic_bsz else None
        self.passes = {
            "compute_values": Passes(
                rows_key="critic.forward_micro_batch_size_per_gpu",
                rows_per_pass=self.keys.forward_micro_batch_size_per_gpu,
                tokens_key="critic.ppo_max_token_len_per_gpu",
                max_tokens=max_tokens,
                device=self.device,
                bytes_of_pass=memory.scoring,
            ),
            "update_critic": Passes(
                rows_key="critic.ppo_micro_batch_size_per_gpu",
                rows_per_pass=self.keys.ppo_micro_batch_size_per_gpu,
                tokens_key="critic.ppo_max_token_len_per_gpu",
                max_tokens=max_tokens,
                device=self.device,
                bytes_of_pass=memory.training,
            ),
        }
        model = load_critic(
            self.keys.model.path,
            dtype=dtype,
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
            packed=self.packed,
        )
        self.trained = TrainedModel(
            model,
            device=self.device,
            optim=self.keys.optim,
            fsdp=self.keys.model.fsdp_config,
            grad_clip=self.keys.grad_clip,
            num_training_steps=num_training_steps,
            checkpointing=self.keys.model.enable_gradient_checkpointing,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=INPUTS)
    def compute_values(self, data: DataProto) -> DataProto:
        """The value of the state before each response token."""
        batch = {key: data.batch[key] for key in INPUTS}
        parts: dict[int, Tensor] = {}
        with self.trained.on_device(training=False) as model, torch.no_grad():
            model.eval()
            for rows in self.passes["compute_values"].cut(batch["attention_mask"]):
                values = response_values(model, rows_on(self.device, batch, rows), packed=self.packed)
                parts.update(zip(rows, values, strict=True))
        return DataProto.from_dict({"values": torch.stack([parts[row] for row in range(len(data))]).cpu()})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=(*INPUTS, "response_mask", "values", "returns"),
    )
    def update_critic(self, data: DataProto, ends_step: bool = True) -> dict[str, float]:
        rows = self.keys.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // self.context.dp_size
        return self.update("critic", data, rows, self.passes["update_critic"], self._loss_of, ends_step)

    def _loss_of(self, part: Batch, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
        mask = part["response_mask"]
        predicted = response_values(self.trained.model, part, packed=self.packed)
        loss, clip_fraction = compute_value_loss(
            predicted,
            part["returns"],
            part["values"],
            mask,
            self.keys.cliprange_value,
            self.keys.loss_agg_mode,
            counts=counts,
        )
        mean = masked_sum(predicted.detach(), mask) / max(counts.num_tokens, 1)
        return loss, {"vf_loss": loss.detach(), "vf_clipfrac": clip_fraction, "vpred_mean": mean}

    def less_memory(self, method: str) -> list[str]:
        own = self.passes[method].smaller() if method in self.passes else []
        if method == "update_critic" and not self.keys.model.enable_gradient_checkpointing:
            own.append("critic.model.enable_gradient_checkpointing=true")
        return remedies(self, self.config, own)

    def less_memory_at_rest(self) -> list[str]:
        return offloads("critic.model.fsdp_config", self.keys.model.fsdp_config, self.device)
