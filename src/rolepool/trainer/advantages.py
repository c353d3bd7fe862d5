"""Between scoring and updating: rewards, KL penalty, advantages, and the metrics that describe them.

The only place where the driver waits in a step. It fetches what advantages need, a few numbers per token, and leaves
the rest where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rolepool.algorithm import (
    apply_kl_penalty,
    compute_advantage,
    compute_explained_variance,
    get_kl_controller,
    masked_mean,
)
from rolepool.cluster import next_call_number
from rolepool.config import Config
from rolepool.metrics.spans import Span, driver_span
from rolepool.protocol import DataProto, DataProtoFuture


@dataclass(frozen=True)
class Estimated:
    """What updates need beside the rollouts, the rows' lengths in tokens, and metrics."""

    batch: DataProto
    lengths: list[int]
    metrics: dict[str, float]
    span: Span
    """Of the driver's own work, the waiting not included."""


@dataclass
class Estimator:
    """Estimates advantages; holds the KL controller, which learns from step to step."""

    config: Config
    kl_controller: Any = field(init=False)

    def __post_init__(self) -> None:
        keys = self.config.algorithm.kl_ctrl
        self.kl_controller = get_kl_controller(keys.type, keys.kl_coef, keys.target_kl, keys.horizon)

    @property
    def needs_baselines(self) -> bool:
        return self.config.algorithm.adv_estimator == "remax"

    def estimate(
        self,
        prompts: DataProto,
        rollouts: DataProtoFuture,
        scores: DataProtoFuture,
        values: DataProtoFuture | None,
        old: DataProtoFuture,
        ref: DataProtoFuture | None,
        baselines: DataProtoFuture | None,
    ) -> Estimated:
        rows = rollouts.get(keys=["response_mask", "attention_mask"]).batch
        scored = scores.get()
        tensors: dict[str, Tensor] = {"token_level_scores": scored.batch["token_level_scores"]}
        for future in (old, values, ref):
            tensors.update(future.get().batch.items() if future is not None else ())
        if baselines is not None:
            tensors["baselines"] = baselines.get().batch["token_level_scores"].sum(dim=1)
        given = (rollouts, scores, old, values, ref, baselines)
        after = tuple(call.number for future in given if future is not None for call in future.calls)
        with driver_span("adv", next_call_number(), after) as ended:
            lengths = rows["attention_mask"].sum(dim=1).tolist()
            metrics = self._estimate(prompts, tensors, rows["response_mask"])
            metrics.update(self._describe(tensors, rows["response_mask"], rows["attention_mask"], scored))
            batch = DataProto.from_dict({name: tensor for name, tensor in tensors.items() if name != "baselines"})
        return Estimated(batch, lengths, metrics, ended())

    def _estimate(self, prompts: DataProto, tensors: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
        """Add token_level_rewards, advantages and returns to the tensors."""
        keys = self.config.algorithm
        metrics: dict[str, float] = {}
        rewards = tensors["token_level_scores"].to(tensors["old_log_probs"].dtype)
        if keys.use_kl_in_reward:
            coefficient = self.kl_controller.value
            rewards, current_kl = apply_kl_penalty(
                rewards, tensors["old_log_probs"], tensors["ref_log_prob"], mask, coefficient, keys.kl_penalty
            )
            self.kl_controller.update(float(current_kl), len(mask))
            metrics["actor/reward_kl_penalty"] = float(current_kl)
            metrics["actor/reward_kl_penalty_coeff"] = float(coefficient)
        advantages, returns = compute_advantage(
            keys.adv_estimator,
            rewards,
            mask,
            gamma=keys.gamma,
            lam=keys.lam,
            norm_adv_by_std_in_grpo=keys.norm_adv_by_std_in_grpo,
            values=tensors.get("values"),
            index=prompts.non_tensor_batch["uid"],
            reward_baselines=tensors.get("baselines"),
        )
        tensors.update(token_level_rewards=rewards, advantages=advantages, returns=returns)
        return metrics

    def _describe(
        self, tensors: dict[str, Tensor], mask: Tensor, attention_mask: Tensor, scored: DataProto
    ) -> dict[str, float]:
        """Score, reward, advantage, return, value and length metrics of the batch."""
        kept = mask.bool()
        columns = {
            "critic/score": tensors["token_level_scores"].sum(dim=1),
            "critic/rewards": tensors["token_level_rewards"].sum(dim=1),
            "critic/advantages": tensors["advantages"][kept],
            "critic/returns": tensors["returns"][kept],
        }
        metrics = {"actor/entropy": float(masked_mean(tensors["entropys"], mask))}
        if "values" in tensors:
            columns["critic/values"] = tensors["values"][kept]
            metrics["critic/vf_explained_var"] = float(
                compute_explained_variance(tensors["returns"], tensors["values"], mask)
            )
        response = mask.sum(dim=1).float()
        prompt = attention_mask.sum(dim=1).float() - response
        columns.update({"response_length": response, "prompt_length": prompt})
        for name, column in columns.items():
            metrics[f"{name}/mean"] = float(column.float().mean())
            metrics[f"{name}/max"] = float(column.max())
            metrics[f"{name}/min"] = float(column.min())
        limits = {"response_length": mask.shape[1], "prompt_length": attention_mask.shape[1] - mask.shape[1]}
        for name, limit in limits.items():
            metrics[f"{name}/clip_ratio"] = float((columns[name] >= limit).float().mean())
        for name, array in scored.non_tensor_batch.items():
            metrics[f"{name}/mean"] = float(np.nanmean(array.astype(float)))
        metrics["perf/total_num_tokens"] = float(attention_mask.sum())
        return metrics


def repeated(prompts: DataProto, num_samples: int) -> DataProto:
    """Each prompt `num_samples` times, side by side, with the number of the sample in `sample_index`."""
    rows = prompts.repeat(num_samples, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.tile(np.arange(num_samples), len(prompts))
    return rows
