"""Between scoring and updating: rewards, KL penalty, advantages, corrections of the rollout, and
the metrics that describe them.

This is the only place where the driver waits in a step. It fetches only what it computes with, a
few numbers per token. If neither a KL penalty nor a correction needs log-probs, they may still be
computed while the critic's update starts. Columns are ragged outside of this module, and padded to
the longest response here, because the algorithms take padded tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.algorithm.advantages import (
    GroupIndex,
    KLController,
    apply_kl_penalty,
    compute_advantage,
)
from rolepool.algorithm.losses import LossCounts, agg_loss, compute_explained_variance
from rolepool.algorithm.rollout_correction import Correction, correct_batch, mismatch_metrics
from rolepool.cluster import next_call_number
from rolepool.config import Config
from rolepool.config.functions import adv_estimators
from rolepool.data.prompts import PromptLoader
from rolepool.data.rewards import NUMBERS, PRED
from rolepool.errors import ConfigError
from rolepool.metrics.spans import Span, driver_span
from rolepool.protocol import DataProto, DataProtoFuture, pad_ragged, unpad
from rolepool.protocol.batches import Estimates, Scores, Sizes
from rolepool.protocol.columns import sampled_mask

PER_TOKEN = ("values", "old_log_probs", "ref_log_prob")
"""What roles compute for each response token and an estimate needs."""
ROLLOUT_LOG_PROBS = "rollout_log_probs"
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimated:
    """Advantages and returns for the updates, and what they were estimated from."""

    batch: DataProto
    """Ragged advantages and returns."""
    sizes: Sizes
    scored: DataProto
    """What the reward returned."""
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
        sizes = self.sizes
        num_tokens = sizes.num_prompt_tokens + sizes.num_response_tokens
        lengths: list[int] = num_tokens.tolist()
        return lengths


class Estimator:
    """Estimates advantages. Holds the KL controller, whose coefficient changes from step to
    step."""

    def __init__(self, config: Config) -> None:
        keys = config.algorithm
        self.config = config
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
        """Advantages and returns, and what tokens are corrected by. `per_token` are the critic's
        values, and the log-probs of actor and reference if a KL penalty or a correction needs
        them."""
        corrects = self.config.algorithm.rollout_correction.corrects_before_update
        columns_of_rollouts = [*Sizes.names()]
        if corrects:
            columns_of_rollouts.append(ROLLOUT_LOG_PROBS)
        generated = rollouts.get(keys=columns_of_rollouts)
        sizes = Sizes.of(generated)
        scored: DataProto = scores.get()
        mask = sampled_mask(sizes.response_mask, sizes.num_response_tokens)
        at_tokens = token_level_scores(sizes, Scores.of(scored).scores, width=mask.shape[1])
        tensors = {"token_level_scores": at_tokens}
        for future in per_token:
            if future is None:
                continue
            columns = future.get(keys=PER_TOKEN).batch
            for name, column in columns.items():
                tensors[name] = pad_ragged(column)
        of_greedy: Tensor | None = None
        if baselines is not None:
            of_prompts = Scores.of(baselines.get(keys=["scores"])).scores
            # The samples of a prompt are next to each other.
            num_samples = len(prompts) // len(of_prompts)
            of_greedy = of_prompts.repeat_interleave(num_samples)

        waited_for: list[int] = []
        for future in (rollouts, scores, baselines, *per_token):
            if future is not None:
                waited_for += [call.number for call in future.calls]
        with driver_span("adv", next_call_number(), tuple(waited_for)) as ended:
            metrics = self._estimate(
                prompts.non_tensor_batch["uid"],
                tensors,
                mask,
                of_greedy,
            )
            corrected = Correction(None, None)
            if corrects:
                engine = pad_ragged(generated.batch[ROLLOUT_LOG_PROBS])
                corrected, of_correction = self._correct(tensors, engine, mask)
                metrics.update(of_correction)
            estimates = _estimates(tensors, corrected, sizes.num_response_tokens)
        return Estimated(
            batch=estimates.to_proto(),
            sizes=sizes,
            scored=scored,
            tensors=tensors,
            metrics=metrics,
            mask=mask,
            config=self.config,
            span=ended(),
        )

    def _estimate(
        self,
        uids: GroupIndex,
        tensors: dict[str, Tensor],
        mask: Tensor,
        baselines: Tensor | None,
    ) -> dict[str, float]:
        """Add token_level_rewards, advantages and returns to the tensors. Returns metrics."""
        keys = self.config.algorithm
        metrics: dict[str, float] = {}
        rewards = tensors["token_level_scores"]
        if keys.use_kl_in_reward:
            coefficient = self.kl_controller.value
            rewards, current_kl = apply_kl_penalty(
                scores=rewards,
                old_log_probs=tensors["old_log_probs"],
                ref_log_prob=tensors["ref_log_prob"],
                response_mask=mask,
                kl_coef=coefficient,
                kl_penalty=keys.kl_penalty,
            )
            penalty = float(current_kl)
            self.kl_controller.update(penalty, len(mask))
            metrics["actor/reward_kl_penalty"] = penalty
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
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
        tensors["token_level_rewards"] = rewards
        tensors["advantages"] = advantages
        tensors["returns"] = returns
        return metrics

    def _correct(
        self,
        tensors: Mapping[str, Tensor],
        engine: Tensor,
        mask: Tensor,
    ) -> tuple[Correction, dict[str, float]]:
        """What the losses of tokens are corrected by, and metrics. `engine` are the log-probs of
        the engine."""
        keys = self.config.algorithm.rollout_correction
        old_log_probs = tensors.get("old_log_probs")
        if old_log_probs is None:
            raise ConfigError(
                f"trainer.step={self.config.trainer.step}: it gives the estimator no old log-probs, "
                "which algorithm.rollout_correction needs; end it with rolepool.trainer.step.learn"
            )
        return correct_batch(old_log_probs, engine, mask, keys)


def _estimates(
    tensors: Mapping[str, Tensor], corrected: Correction, num_response_tokens: Tensor
) -> Estimates:
    """What updates read, as ragged columns."""
    weights = None
    if corrected.weights is not None:
        weights = unpad(corrected.weights.to(tensors["old_log_probs"].dtype), num_response_tokens)
    loss_mask = None
    if corrected.kept is not None:
        loss_mask = unpad(corrected.kept, num_response_tokens)
    return Estimates(
        advantages=unpad(tensors["advantages"], num_response_tokens),
        returns=unpad(tensors["returns"], num_response_tokens),
        rollout_is_weights=weights,
        loss_mask=loss_mask,
    )


def token_level_scores(sizes: Sizes, scores: Tensor, width: int) -> Tensor:
    """[rows, width]: the score of each row at its last token, which the policy sampled. What an
    environment gave for single turns is at their last tokens."""
    last_places = sizes.num_response_tokens[:, None] - 1
    is_last = torch.arange(width) == last_places
    if sizes.turn_scores is None or sizes.environment_score is None:
        return torch.where(is_last, scores[:, None], 0.0)
    others = scores - sizes.environment_score.nan_to_num()
    others_at_last = torch.where(is_last, others[:, None], 0.0)
    return pad_ragged(sizes.turn_scores) + others_at_last


# Metrics


def describe(estimated: Estimated, scored: DataProto) -> dict[str, float]:
    """Score, reward, advantage, return, value, length and entropy metrics of the batch, by verl's
    definitions. `scored` has the sums of entropies if the actor computed old log-probs, and both
    log-probs if they are compared.

    A response without tokens is called aborted; its score and reward do not count. If all responses
    are aborted, there are no metrics of scores, rewards, advantages, returns, values and log-probs.
    """
    sizes = estimated.sizes
    tensors = estimated.tensors
    mask = estimated.mask
    is_aborted = mask.sum(dim=1) == 0
    num_tokens = sizes.num_prompt_tokens + sizes.num_response_tokens
    # With the engine's log-probs there is nothing to compare, and the batch has no columns.
    compared: Mapping[str, Tensor] = {} if scored.batch is None else scored.batch
    metrics = {
        "response/aborted_ratio": float(is_aborted.float().mean()),
        "perf/total_num_tokens": float(num_tokens.sum()),
    }
    scores = Scores.of(estimated.scored).scores
    rewards = tensors["token_level_rewards"].sum(dim=1)
    if "entropy_sums" in compared:  # otherwise the update tells it
        metrics["actor/entropy"] = _entropy(estimated, compared["entropy_sums"])
    columns = {
        "critic/score": scores[~is_aborted],
        "critic/rewards": rewards[~is_aborted],
        "critic/advantages": tensors["advantages"][mask],
        "critic/returns": tensors["returns"][mask],
    }
    for name, lengths, is_clipped in _lengths(estimated):
        columns[name] = lengths
        if len(is_clipped):
            metrics[f"{name}/clip_ratio"] = float(is_clipped.float().mean())
    columns.update(_turns(estimated))
    if not bool(is_aborted.all()):
        if "values" in tensors:
            values = tensors["values"]
            columns["critic/values"] = values[mask]
            explained = compute_explained_variance(tensors["returns"], values, mask)
            metrics["critic/vf_explained_var"] = float(explained)
        if ROLLOUT_LOG_PROBS in compared:
            metrics.update(_probs_diff(scored, mask))
            metrics.update(_mismatch(scored, mask))
    for name, column in columns.items():
        # If all responses are aborted, there is no score and no advantage.
        if not len(column):
            continue
        metrics[f"{name}/mean"] = float(column.float().mean())
        metrics[f"{name}/max"] = float(column.max())
        metrics[f"{name}/min"] = float(column.min())
    for name, numbers in reward_numbers(estimated.scored).items():
        metrics[f"{name}/mean"] = float(np.nanmean(numbers))
    return metrics


def _entropy(estimated: Estimated, entropy_sums: Tensor) -> float:
    """The mean entropy of sampled tokens, in the mode in which the actor's loss is aggregated."""
    keys = estimated.config.actor_rollout_ref.actor
    mask = estimated.mask
    num_sampled = mask.sum(dim=1)
    # All modes aggregate the sums or means of rows, so each token can stand for the mean of its
    # row.
    of_rows = entropy_sums / num_sampled.clamp(min=1)
    of_tokens = of_rows[:, None].expand(mask.shape)
    scale = keys.loss_scale_factor
    if scale is None:
        scale = estimated.config.data.max_response_length
    counts = LossCounts.of(mask, scale)
    entropy = agg_loss(of_tokens, mask, keys.loss_agg_mode, counts=counts)
    return float(entropy)


def _lengths(estimated: Estimated) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The names of lengths, the lengths, and which of them are as long as the config allows."""
    keys = estimated.config.data
    sizes = estimated.sizes
    num_sampled = estimated.mask.sum(dim=1)
    has_tokens = num_sampled > 0
    is_full = sizes.num_response_tokens >= keys.max_response_length
    yield "response_length", num_sampled, is_full
    yield "response_length_non_aborted", num_sampled[has_tokens], is_full[has_tokens]

    prompt_lengths = sizes.num_prompt_tokens
    is_full_prompt = prompt_lengths >= keys.max_prompt_length
    yield "prompt_length", prompt_lengths, is_full_prompt


def _turns(estimated: Estimated) -> dict[str, Tensor]:
    """What only conversations of several turns have."""
    sizes = estimated.sizes
    columns = {
        "num_turns": sizes.num_turns,
        "num_tool_calls": sizes.num_tool_calls,
        "num_tool_errors": sizes.num_tool_errors,
    }
    if sizes.response_mask is not None:
        num_sampled = estimated.mask.sum(dim=1)
        columns["environment_length"] = sizes.num_response_tokens - num_sampled
    return {name: column for name, column in columns.items() if column is not None}


def _probs_diff(scored: DataProto, mask: Tensor) -> dict[str, float]:
    """How far apart the probabilities of sampled tokens are that rollout and actor compute."""

    def probs_of(name: str) -> Tensor:
        log_probs = pad_ragged(scored.batch[name])
        return log_probs[mask].double().exp()

    of_rollout = probs_of(ROLLOUT_LOG_PROBS)
    of_actor = probs_of("old_log_probs")
    apart = (of_rollout - of_actor).abs()
    return {
        "training/rollout_probs_diff_mean": float(apart.mean()),
        "training/rollout_probs_diff_max": float(apart.max()),
        "training/rollout_probs_diff_std": float(apart.std()),
    }


def _mismatch(scored: DataProto, mask: Tensor) -> dict[str, float]:
    """How far the actor, with its old log-probs, is from the policy of the engine."""
    return mismatch_metrics(
        actor=pad_ragged(scored.batch["old_log_probs"]),
        engine=pad_ragged(scored.batch[ROLLOUT_LOG_PROBS]),
        mask=mask,
    )


def reward_numbers(scored: DataProto) -> dict[str, Numbers]:
    """The numbers besides the score, as arrays by name. A row that has no number of a name has NaN.

    Those that a reward function returned are `reward/NAME`; a role of the user may return any
    numeric columns.
    """
    columns = dict(scored.non_tensor_batch)
    columns.pop(PRED, None)
    numbers_of_rows: list[Mapping[str, float]] = list(columns.pop(NUMBERS, ()))
    names: set[str] = set()
    for numbers in numbers_of_rows:
        names.update(numbers)
    arrays: dict[str, Numbers] = {}
    for name in sorted(names):
        values = [numbers.get(name, np.nan) for numbers in numbers_of_rows]
        arrays[f"reward/{name}"] = np.array(values)
    for name, column in columns.items():
        arrays[name] = column.astype(float)
    return arrays


def repeated(prompts: DataProto, num_samples: int) -> DataProto:
    """Each prompt `num_samples` times in a row, with the number of the sample in `sample_index`."""
    rows = prompts.repeat(num_samples, interleave=True)
    indices_of_prompt = np.arange(num_samples)
    rows.non_tensor_batch["sample_index"] = np.tile(indices_of_prompt, len(prompts))
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

    @property
    def num_batches_per_epoch(self) -> int:
        return self._loader.num_batches_per_epoch

    def next_batch(self) -> DataProto:
        prompts = self._loader.next_batch()
        return repeated(prompts, self._num_samples)
