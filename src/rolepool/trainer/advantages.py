"""Between scoring and updating: rewards, KL penalty, advantages, and the metrics that describe them.

The only place where the driver waits in a step. It fetches what advantages need, a few numbers per token, and leaves
the rest where it is: where the reward has no KL penalty, log-probs may still be computed while the critic's update
starts.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from rolepool.algorithm.registry import adv_estimators
from rolepool.cluster import next_call_number
from rolepool.config import Config
from rolepool.errors import ConfigError
from rolepool.metrics.spans import Span, driver_span
from rolepool.protocol import DataProto, DataProtoFuture


@dataclass(frozen=True)
class Estimated:
    """What updates need beside what was computed by roles, and what it was estimated from."""

    batch: DataProto
    masks: DataProto
    scored: DataProto
    values: Tensor | None
    metrics: dict[str, float]
    span: Span
    """Of the driver's own work, the waiting not included."""

    @property
    def lengths(self) -> list[int]:
        """Of each row in tokens."""
        return self.masks.batch["attention_mask"].sum(dim=1).tolist()  # type: ignore[no-any-return]


class Estimator:
    """Estimates advantages; holds the KL controller, which learns from step to step."""

    def __init__(self, config: Config) -> None:
        self.keys = config.algorithm
        ctrl = self.keys.kl_ctrl
        self.kl_controller = get_kl_controller(ctrl.type, ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        needs = adv_estimators.needs_of(self.keys.adv_estimator)
        self.needs_baselines = "reward_baselines" in needs
        if "values" in needs and not config.uses_critic:
            raise ConfigError(
                f"algorithm.adv_estimator={self.keys.adv_estimator}: it needs values; set critic.enable=true"
            )

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
        masks = rollouts.get(keys=["response_mask", "attention_mask"])
        scored = scores.get()
        tensors: dict[str, Tensor] = {"token_level_scores": scored.batch["token_level_scores"]}
        of_tokens = (values, old, ref) if self.keys.use_kl_in_reward else (values,)
        for future in of_tokens:
            tensors.update(future.get().batch.items() if future is not None else ())
        of_greedy = None
        if baselines is not None:  # one for each prompt, whose samples stand side by side
            scores_of_prompts = baselines.get().batch["token_level_scores"].sum(dim=1)
            of_greedy = scores_of_prompts.repeat_interleave(len(prompts) // len(scores_of_prompts))
        given = (rollouts, scores, *of_tokens, baselines)
        after = tuple(call.number for future in given if future is not None for call in future.calls)
        with driver_span("adv", next_call_number(), after) as ended:
            metrics = self._estimate(prompts.non_tensor_batch["uid"], tensors, masks.batch["response_mask"], of_greedy)
        made = {key: tensors[key] for key in ("token_level_scores", "token_level_rewards", "advantages", "returns")}
        return Estimated(DataProto.from_dict(made), masks, scored, tensors.get("values"), metrics, ended())

    def _estimate(
        self, uids: Any, tensors: dict[str, Tensor], mask: Tensor, baselines: Tensor | None
    ) -> dict[str, float]:
        """Add token_level_rewards, advantages and returns to the tensors."""
        keys, metrics = self.keys, dict[str, float]()
        rewards = tensors["token_level_scores"]
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
            config=keys,
            gamma=keys.gamma,
            lam=keys.lam,
            norm_adv_by_std_in_grpo=keys.norm_adv_by_std_in_grpo,
            values=tensors.get("values"),
            index=uids,
            reward_baselines=baselines,
        )
        tensors.update(token_level_rewards=rewards, advantages=advantages, returns=returns)
        return metrics


def describe(estimated: Estimated, entropies: Tensor) -> dict[str, float]:
    """Score, reward, advantage, return, value and length metrics of the batch."""
    tensors, values = estimated.batch.batch, estimated.values
    mask, attention_mask = (estimated.masks.batch[name] for name in ("response_mask", "attention_mask"))
    response = mask.sum(dim=1).float()
    columns = {
        "critic/score": tensors["token_level_scores"].sum(dim=1),
        "critic/rewards": tensors["token_level_rewards"].sum(dim=1),
        "critic/advantages": tensors["advantages"][mask.bool()],
        "critic/returns": tensors["returns"][mask.bool()],
        "response_length": response,
        "prompt_length": attention_mask.sum(dim=1).float() - response,
    }
    metrics = {"actor/entropy": float(masked_mean(entropies, mask))}
    if values is not None:
        columns["critic/values"] = values[mask.bool()]
        metrics["critic/vf_explained_var"] = float(compute_explained_variance(tensors["returns"], values, mask))
    for name, column in columns.items():
        metrics[f"{name}/mean"] = float(column.float().mean())
        metrics[f"{name}/max"] = float(column.max())
        metrics[f"{name}/min"] = float(column.min())
    limits = {"response_length": mask.shape[1], "prompt_length": attention_mask.shape[1] - mask.shape[1]}
    for name, limit in limits.items():
        metrics[f"{name}/clip_ratio"] = float((columns[name] >= limit).float().mean())
    for name, array in estimated.scored.non_tensor_batch.items():
        metrics[f"{name}/mean"] = float(np.nanmean(array.astype(float)))
    metrics["perf/total_num_tokens"] = float(attention_mask.sum())
    return metrics


def repeated(prompts: DataProto, num_samples: int) -> DataProto:
    """Each prompt `num_samples` times, side by side, with the number of the sample in `sample_index`."""
    rows = prompts.repeat(num_samples, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.tile(np.arange(num_samples), len(prompts))
    return rows
