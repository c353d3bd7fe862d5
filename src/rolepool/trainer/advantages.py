"""Between scoring and updating: rewards, KL penalty, advantages, and the metrics that describe
them.

This is the only place where the driver waits in a step. It fetches only what advantages need, a few
numbers per token. If the reward has no KL penalty, log-probs may still be computed while the
critic's update starts. Columns are ragged outside of this module, and padded to the longest
response here, because the algorithms take padded tensors.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolepool.algorithm.advantages import KLController, apply_kl_penalty, compute_advantage
from rolepool.algorithm.losses import LossCounts, agg_loss, compute_explained_variance
from rolepool.cluster import next_call_number
from rolepool.config import Config
from rolepool.config.functions import adv_estimators
from rolepool.data.prompts import PromptLoader
from rolepool.data.rewards import NUMBERS, PRED
from rolepool.errors import ConfigError
from rolepool.metrics.spans import Span, driver_span
from rolepool.protocol import DataProto, DataProtoFuture, pad_ragged, unpad
from rolepool.protocol.columns import ENVIRONMENT_SCORE, RESPONSE_MASK, TURN_SCORES, sampled_mask


@dataclass(frozen=True)
class Estimated:
    """Advantages and returns for the updates, and what they were estimated from."""

    batch: DataProto
    """Ragged advantages and returns."""
    sizes: DataProto
    """The numbers of prompt and response tokens."""
    scored: DataProto
    tensors: dict[str, Tensor]
    """Padded, [rows, longest response]: token_level_scores and _rewards, advantages, returns, and
    values if any."""
    metrics: dict[str, float]
    mask: Tensor
    """The response tokens that were sampled, of the same shape."""
    config: Config
    span: Span
    """The driver's own work, without the time that it waited."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return sum(self.sizes.batch[key] for key in SIZES).tolist()  # type: ignore[no-any-return]


SIZES = ("num_prompt_tokens", "num_response_tokens")
TURN_COUNTS = ("num_turns", "num_tool_calls", "num_tool_errors")
OF_TURNS = (RESPONSE_MASK, TURN_SCORES, ENVIRONMENT_SCORE, *TURN_COUNTS)
"""The columns of rollouts with several turns."""
PER_TOKEN = ("values", "old_log_probs", "ref_log_prob")


class Estimator:
    """Estimates advantages. Holds the KL controller, whose coefficient changes from step to
    step."""

    def __init__(self, config: Config) -> None:
        self.config, keys = config, config.algorithm
        self.kl_controller = KLController(keys.kl_ctrl)
        self.needs = adv_estimators.needs_of(keys.adv_estimator)
        if "values" in self.needs and not config.uses_critic:
            raise ConfigError(
                f"algorithm.adv_estimator={keys.adv_estimator}: it needs values; set critic.enable=true"
            )

    def estimate(
        self,
        prompts: DataProto,
        rollouts: DataProtoFuture,
        scores: DataProtoFuture,
        baselines: DataProtoFuture | None,
        *per_token: DataProtoFuture | None,
    ) -> Estimated:
        """Advantages and returns. `per_token` are the critic's values, and the log-probs of actor
        and reference if a KL penalty needs them."""
        sizes, scored = rollouts.get(keys=(*SIZES, *OF_TURNS)), scores.get()
        lengths: Tensor = sizes.batch["num_response_tokens"]
        mask = sampled_mask(sizes.batch, lengths)
        tensors = {"token_level_scores": token_level_scores(sizes, scored, mask.shape[1])}
        for future in (future for future in per_token if future is not None):
            columns = future.get(keys=PER_TOKEN).batch
            tensors.update({key: pad_ragged(column) for key, column in columns.items()})
        of_greedy = None
        if baselines is not None:  # one for each prompt, whose samples are next to each other
            scores_of_prompts = baselines.get(keys=["scores"]).batch["scores"]
            of_greedy = scores_of_prompts.repeat_interleave(len(prompts) // len(scores_of_prompts))
        given = (rollouts, scores, baselines, *per_token)
        after = tuple(
            call.number for future in given if future is not None for call in future.calls
        )
        with driver_span("adv", next_call_number(), after) as ended:
            metrics = self._estimate(prompts.non_tensor_batch["uid"], tensors, mask, of_greedy)
            made = DataProto.from_dict(
                {key: unpad(tensors[key], lengths) for key in ("advantages", "returns")}
            )
        return Estimated(made, sizes, scored, tensors, metrics, mask, self.config, ended())

    def _estimate(
        self, uids: Any, tensors: dict[str, Tensor], mask: Tensor, baselines: Tensor | None
    ) -> dict[str, float]:
        """Add token_level_rewards, advantages and returns to the tensors."""
        keys, metrics = self.config.algorithm, dict[str, float]()
        rewards = tensors["token_level_scores"]
        if keys.use_kl_in_reward:
            coefficient = self.kl_controller.value
            log_probs = tensors["old_log_probs"], tensors["ref_log_prob"]
            rewards, current_kl = apply_kl_penalty(
                rewards, *log_probs, mask, coefficient, keys.kl_penalty
            )
            self.kl_controller.update(float(current_kl), len(mask))
            metrics |= {
                "actor/reward_kl_penalty": float(current_kl),
                "actor/reward_kl_penalty_coeff": coefficient,
            }
        settings = keys.model_dump(include={"gamma", "lam", "norm_adv_by_std_in_grpo"})
        inputs = {"values": tensors.get("values"), "index": uids, "reward_baselines": baselines}
        advantages, returns = compute_advantage(
            keys.adv_estimator, rewards, mask, config=keys, **settings, **inputs
        )
        tensors.update(token_level_rewards=rewards, advantages=advantages, returns=returns)
        return metrics


def token_level_scores(rollouts: DataProto, scored: DataProto, num_tokens: int) -> Tensor:
    """[rows, num_tokens]: the score of each row at its last token, which the policy sampled. What
    an environment gave for single turns is at their last tokens."""
    scores, columns = scored.batch["scores"], rollouts.batch
    is_last = torch.arange(num_tokens) == columns["num_response_tokens"][:, None] - 1
    if TURN_SCORES not in columns:
        return torch.where(is_last, scores[:, None], 0.0)
    others = scores - columns[ENVIRONMENT_SCORE].nan_to_num()
    return pad_ragged(columns[TURN_SCORES]) + torch.where(is_last, others[:, None], 0.0)


def describe(estimated: Estimated, scored: DataProto) -> dict[str, float]:
    """Score, reward, advantage, return, value, length and entropy metrics of the batch, by verl's
    definitions.

    A response without tokens is called aborted; its score and reward do not count. If all responses
    are aborted, there are no metrics of scores, rewards, advantages, returns, values and log-probs.
    """
    tensors, mask, sizes = estimated.tensors, estimated.mask, estimated.sizes.batch
    num_prompt, num_response = (sizes[key] for key in SIZES)
    num_sampled = mask.sum(dim=1)
    data_keys, actor_keys = estimated.config.data, estimated.config.actor_rollout_ref.actor
    is_aborted = num_sampled == 0
    is_full = num_response >= data_keys.max_response_length
    lengths = {
        "response_length": (num_sampled, is_full),
        "response_length_non_aborted": (num_sampled[~is_aborted], is_full[~is_aborted]),
        "prompt_length": (num_prompt, num_prompt >= data_keys.max_prompt_length),
    }
    columns = {
        "critic/score": estimated.scored.batch["scores"][~is_aborted],
        "critic/rewards": tensors["token_level_rewards"].sum(dim=1)[~is_aborted],
        "critic/advantages": tensors["advantages"][mask],
        "critic/returns": tensors["returns"][mask],
        **{name: numbers for name, (numbers, _) in lengths.items()},
        **{name: sizes[name] for name in TURN_COUNTS if name in sizes},
    }
    if RESPONSE_MASK in sizes:
        columns["environment_length"] = num_response - num_sampled
    # All modes aggregate the sums or means of rows, so each token can stand for the mean of its
    # row.
    entropies = (scored.batch["entropy_sums"] / num_sampled.clamp(min=1))[:, None].expand(
        mask.shape
    )
    scale = actor_keys.loss_scale_factor
    counts = LossCounts.of(mask, data_keys.max_response_length if scale is None else scale)
    metrics = {
        "actor/entropy": float(agg_loss(entropies, mask, actor_keys.loss_agg_mode, counts=counts)),
        "response/aborted_ratio": float(is_aborted.float().mean()),
        "perf/total_num_tokens": float((num_prompt + num_response).sum()),
    }
    for name, (_, is_clipped) in lengths.items():
        if len(is_clipped):
            metrics[f"{name}/clip_ratio"] = float(is_clipped.float().mean())
    has_tokens = not bool(is_aborted.all())
    if "values" in tensors and has_tokens:
        values = tensors["values"]
        columns["critic/values"] = values[mask]
        metrics["critic/vf_explained_var"] = float(
            compute_explained_variance(tensors["returns"], values, mask)
        )
    if "rollout_log_probs" in scored.batch and has_tokens:
        metrics.update(_probs_diff(scored, mask))
    for name, column in columns.items():
        if not len(column):  # all responses are aborted, so there is no score and no advantage
            continue
        metrics[f"{name}/mean"] = float(column.float().mean())
        metrics[f"{name}/max"] = float(column.max())
        metrics[f"{name}/min"] = float(column.min())
    for name, numbers in reward_numbers(estimated.scored).items():
        metrics[f"{name}/mean"] = float(np.nanmean(numbers))
    return metrics


def _probs_diff(scored: DataProto, mask: Tensor) -> dict[str, float]:
    """How far apart the probabilities of sampled tokens are that rollout and actor compute."""
    of_tokens = (pad_ragged(scored.batch[f"{key}_log_probs"])[mask] for key in ("rollout", "old"))
    rollout, actor = (log_probs.double().exp() for log_probs in of_tokens)
    apart = (rollout - actor).abs()
    found = {"mean": apart.mean(), "max": apart.max(), "std": apart.std()}
    return {f"training/rollout_probs_diff_{name}": float(value) for name, value in found.items()}


def reward_numbers(scored: DataProto) -> dict[str, Any]:
    """The numbers besides the score, as arrays by name. A row that has no number of a name has NaN.

    Those that a reward function returned are `reward/NAME`; a role of the user may return any
    numeric columns.
    """
    columns = dict(scored.non_tensor_batch)
    columns.pop(PRED, None)
    rows = columns.pop(NUMBERS, ())
    names = sorted({name for row in rows for name in row})
    arrays = {f"reward/{name}": np.array([row.get(name, np.nan) for row in rows]) for name in names}
    return {**arrays, **{name: column.astype(float) for name, column in columns.items()}}


def repeated(prompts: DataProto, num_samples: int) -> DataProto:
    """Each prompt `num_samples` times in a row, with the number of the sample in `sample_index`."""
    rows = prompts.repeat(num_samples, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.tile(np.arange(num_samples), len(prompts))
    return rows


class RepeatedPrompts:
    """Training prompts, each as often in a row as it gets responses."""

    def __init__(self, loader: PromptLoader, num_samples: int) -> None:
        self._loader = loader
        self._num_samples = num_samples
        self.state_dict = loader.state_dict
        self.load_state_dict = loader.load_state_dict

    @property
    def epoch(self) -> int:
        return self._loader.epoch

    def next_batch(self) -> DataProto:
        return repeated(self._loader.next_batch(), self._num_samples)
