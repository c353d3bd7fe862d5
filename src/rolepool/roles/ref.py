"""The reference: the policy as it was, for KL terms."""

from __future__ import annotations

import torch
from torch import Tensor

from rolepool.config import Config
from rolepool.models.forward import response_log_probs
from rolepool.models.loading import load_policy
from rolepool.models.sharding import shard
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.roles.actor import INPUTS
from rolepool.roles.passes import cut_into_passes


class Reference(Worker):
    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.keys = config.actor_rollout_ref.ref
        model_keys = config.actor_rollout_ref.model
        model = load_policy(
            model_keys.path,
            dtype=dtype,
            trust_remote_code=model_keys.trust_remote_code,
            overrides=dict(model_keys.override_config),
        )
        self.model = shard(model.requires_grad_(False), self.device, -1).eval()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=INPUTS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the response tokens under the first weights."""
        batch = {key: data.batch[key].to(self.device) for key in INPUTS}
        passes = cut_into_passes(
            batch["attention_mask"],
            rows_per_pass=self.keys.log_prob_micro_batch_size_per_gpu,
            max_tokens=self.keys.log_prob_max_token_len_per_gpu if self.keys.log_prob_use_dynamic_bsz else None,
            device=self.device,
        )
        parts: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in passes:
                scores = response_log_probs(
                    self.model,
                    {key: value[rows] for key, value in batch.items()},
                    temperature=self.config.actor_rollout_ref.rollout.temperature,
                    packed=self.config.actor_rollout_ref.model.use_remove_padding,
                )
                parts.update(zip(rows, scores.log_probs, strict=True))
        return DataProto.from_dict({"ref_log_prob": torch.stack([parts[row] for row in range(len(data))]).cpu()})
