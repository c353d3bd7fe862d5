"""The reference: the policy as it was, for KL terms."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.models.forward import response_log_probs
from rolepool.models.frozen import FrozenModel
from rolepool.models.loading import load_policy
from rolepool.models.packing import rows_on
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.roles.actor import INPUTS
from rolepool.roles.less_memory import offloads, remedies
from rolepool.roles.passes import Passes, PassMemory, response_share, shape_of


class Reference(Worker):
    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.keys = config.actor_rollout_ref.ref
        model_keys = config.actor_rollout_ref.model
        memory = PassMemory(
            shape_of(model_keys.path, model_keys.override_config),
            num_shards=self.world_size,
            checkpointing=False,
            logit_share=response_share(config),
            packed=model_keys.use_remove_padding,
        )
        self.passes = Passes(
            rows_key="actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            rows_per_pass=self.keys.log_prob_micro_batch_size_per_gpu,
            tokens_key="actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            max_tokens=self.keys.log_prob_max_token_len_per_gpu if self.keys.log_prob_use_dynamic_bsz else None,
            device=self.device,
            bytes_of_pass=memory.scoring,
        )
        model = load_policy(
            model_keys.path,
            dtype=dtype if self.device == "cpu" else torch.bfloat16,
            trust_remote_code=model_keys.trust_remote_code,
            overrides=dict(model_keys.override_config),
            packed=model_keys.use_remove_padding,
        )
        self.frozen = FrozenModel(model, device=self.device, offload=self.keys.fsdp_config.param_offload)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=INPUTS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the first weights."""
        batch = {key: data.batch[key] for key in INPUTS}
        parts: dict[int, Tensor] = {}
        with self.frozen.on_device() as model:
            for rows in self.passes.cut(batch["attention_mask"]):
                scores = response_log_probs(
                    model,
                    rows_on(self.device, batch, rows),
                    temperature=self.config.actor_rollout_ref.rollout.temperature,
                    packed=self.config.actor_rollout_ref.model.use_remove_padding,
                )
                parts.update(zip(rows, scores.log_probs, strict=True))
        return DataProto.from_dict({"ref_log_prob": torch.stack([parts[row] for row in range(len(data))]).cpu()})

    def less_memory(self, method: str) -> list[str]:
        return remedies(self, self.config, self.passes.smaller())

    def less_memory_at_rest(self) -> list[str]:
        return offloads("actor_rollout_ref.ref.fsdp_config", self.keys.fsdp_config, self.device)
