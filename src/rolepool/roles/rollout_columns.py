"""Between the columns of a batch and what environments and engines use: rows of prompts,
trajectories and completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.protocol.batches import EnvironmentPrompts, Rollouts
from rolepool.protocol.columns import Ragged, ragged
from rolepool.rollout.engine import Completion
from rolepool.rollout.environments import PromptRow, Trajectory

TokenIds = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Kept:
    """Which columns a batch of rollouts has, besides tokens, counts and versions of weights."""

    log_probs: bool
    """The log-probs of the engine, as `rollout_log_probs`."""
    old_log_probs: bool = False
    """The log-probs of the engine, as `old_log_probs`, with which the loss compares."""
    dtype: torch.dtype = torch.float32
    """That of log-probs. It is the actor's, because a loss in float32 would be computed in float64
    if the engine's numbers were in float64."""


def rows_of(prompts: EnvironmentPrompts) -> list[PromptRow]:
    """The rows of a batch of prompts, as a rollout function gets them."""
    rows: list[PromptRow] = []
    for number, reward_model in enumerate(prompts.reward_model):
        row = PromptRow(
            prompt=prompts.raw_prompt[number],
            prompt_ids=prompts.raw_prompt_ids[number],
            data_source=prompts.data_source[number],
            ground_truth=reward_model.get("ground_truth"),
            reward_model=reward_model,
            extra_info=prompts.extra_info[number],
            uid=prompts.uid[number],
            origin=prompts.origin[number],
        )
        rows.append(row)
    return rows


def rollouts_of(
    prompts: Sequence[TokenIds],
    completions: Sequence[Completion],
    kept: Kept,
) -> Rollouts:
    """Responses of one turn, all of whose tokens were sampled."""
    responses = [completion.token_ids for completion in completions]
    log_probs = [completion.log_probs for completion in completions]
    versions = [completion.weights_version for completion in completions]
    rollouts = _tokens_of(prompts, responses, versions)
    return _with_log_probs(rollouts, torch.from_numpy(np.concatenate(log_probs)), kept)


def rollouts_of_turns(trajectories: Sequence[Trajectory], kept: Kept) -> Rollouts:
    """Conversations: tokens, which of them were sampled, scores and counts."""
    responses: list[list[int]] = []
    log_probs: list[float] = []
    for trajectory in trajectories:
        num_kept = trajectory.num_kept
        responses.append(trajectory.token_ids[:num_kept])
        log_probs += trajectory.log_probs[:num_kept]
    prompts = [trajectory.prompt_ids for trajectory in trajectories]
    versions = [trajectory.weights_version for trajectory in trajectories]
    rollouts = _tokens_of(prompts, responses, versions)

    def of_tokens(values: Tensor) -> Ragged:
        return ragged(values, rollouts.num_response_tokens)

    # Tokens that were not sampled have NaN as log-prob.
    numbers = torch.tensor(log_probs, dtype=torch.float64)
    turn_scores = [_score_of_each_token(trajectory) for trajectory in trajectories]
    scores = [_score_of(trajectory) for trajectory in trajectories]
    nums_turns = [trajectory.num_turns for trajectory in trajectories]
    nums_calls = [trajectory.num_tool_calls for trajectory in trajectories]
    nums_errors = [trajectory.num_tool_errors for trajectory in trajectories]
    return replace(
        _with_log_probs(rollouts, numbers.nan_to_num(), kept),
        response_mask=of_tokens(~numbers.isnan()),
        turn_scores=of_tokens(torch.cat(turn_scores)),
        environment_score=torch.tensor(scores),
        num_turns=torch.tensor(nums_turns),
        num_tool_calls=torch.tensor(nums_calls),
        num_tool_errors=torch.tensor(nums_errors),
    )


def _with_log_probs(rollouts: Rollouts, log_probs: Tensor, kept: Kept) -> Rollouts:
    """The rollouts with these log-probs of their response tokens, in the columns that are kept."""
    if not (kept.log_probs or kept.old_log_probs):
        return rollouts
    column = ragged(log_probs.to(kept.dtype), rollouts.num_response_tokens)
    return replace(
        rollouts,
        rollout_log_probs=column if kept.log_probs else None,
        old_log_probs=column if kept.old_log_probs else None,
    )


def _score_of_each_token(trajectory: Trajectory) -> Tensor:
    """The score of each turn at its last token, and 0 elsewhere."""
    scores = torch.zeros(trajectory.num_kept)
    ends = torch.tensor(trajectory.turn_ends, dtype=torch.int64)
    last_tokens = ends - 1
    scores[last_tokens] = torch.tensor(trajectory.turn_scores())
    return scores


def _score_of(trajectory: Trajectory) -> float:
    """The sum of all turns; NaN if the environment gave none."""
    if trajectory.reward is None:
        return math.nan
    return sum(trajectory.turn_scores())


def _tokens_of(
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    versions: Sequence[int],
) -> Rollouts:
    """Prompt and response of each row as one ragged column, and the number of tokens of each."""
    num_prompt = torch.tensor([len(prompt) for prompt in prompts])
    num_response = torch.tensor([len(response) for response in responses])
    pieces: list[npt.NDArray[np.int64]] = []
    for prompt, response in zip(prompts, responses, strict=True):
        pieces.append(np.asarray(prompt, dtype=np.int64))
        pieces.append(np.asarray(response, dtype=np.int64))
    token_ids = torch.from_numpy(np.concatenate(pieces))
    lengths = num_prompt + num_response
    return Rollouts(
        input_ids=ragged(token_ids, lengths),
        num_prompt_tokens=num_prompt,
        num_response_tokens=num_response,
        weights_version=torch.tensor(versions),
    )
