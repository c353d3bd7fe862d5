"""Between the columns of a batch and what environments and engines use: rows of prompts,
trajectories and completions."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rolepool.protocol import DataProto, ragged
from rolepool.protocol.columns import (
    ENVIRONMENT_SCORE,
    INPUT_IDS,
    NUM_PROMPT_TOKENS,
    RESPONSE_MASK,
    TURN_SCORES,
)
from rolepool.rollout.environments import ROW_COLUMNS, PromptRow, Trajectory

TokenIds = Sequence[int] | npt.NDArray[np.int64]


def rows_of(prompts: DataProto) -> list[PromptRow]:
    """The rows of a batch of prompts, as a rollout function gets them."""
    columns = [prompts.non_tensor_batch[column] for column in ROW_COLUMNS.values()]
    rows: list[PromptRow] = []
    for values in zip(*columns, strict=True):
        row = dict(zip(ROW_COLUMNS, values, strict=True))
        row["ground_truth"] = row["reward_model"].get("ground_truth")
        rows.append(row)
    return rows


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Trajectories as columns of a batch: tokens, which of them were sampled, scores and counts."""
    responses = []
    log_probs = []
    for trajectory in trajectories:
        num_kept = trajectory.num_kept
        responses.append(trajectory.token_ids[:num_kept])
        log_probs.append(np.array(trajectory.log_probs[:num_kept], np.float32))
    columns = token_columns(
        prompts=[trajectory.prompt_ids for trajectory in trajectories],
        responses=responses,
        log_probs=log_probs,
        versions=[trajectory.weights_version for trajectory in trajectories],
    )
    num_response = columns["num_response_tokens"]
    # Tokens that were not sampled have NaN as log-prob.
    all_log_probs = torch.from_numpy(np.concatenate(log_probs))
    columns["rollout_log_probs"] = ragged(all_log_probs.nan_to_num(), num_response)
    columns[RESPONSE_MASK] = ragged(~all_log_probs.isnan(), num_response)
    token_scores = [_score_of_each_token(trajectory) for trajectory in trajectories]
    columns[TURN_SCORES] = ragged(torch.cat(token_scores), num_response)
    scores = [_score_of(trajectory) for trajectory in trajectories]
    columns[ENVIRONMENT_SCORE] = torch.tensor(scores)
    for name in ("num_turns", "num_tool_calls", "num_tool_errors"):
        counts = [getattr(trajectory, name) for trajectory in trajectories]
        columns[name] = torch.tensor(counts)
    return columns


def _score_of_each_token(trajectory: Trajectory) -> torch.Tensor:
    """The score of each turn at its last token, and 0 elsewhere."""
    scores = torch.zeros(trajectory.num_kept)
    last_tokens = torch.tensor(trajectory.turn_ends, dtype=torch.int64) - 1
    scores[last_tokens] = torch.tensor(trajectory.turn_scores())
    return scores


def _score_of(trajectory: Trajectory) -> float:
    """The sum of all turns; NaN if the environment gave none."""
    if trajectory.reward is None:
        return math.nan
    return sum(trajectory.turn_scores())


def token_columns(
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    log_probs: Sequence[npt.NDArray[np.float32]],
    versions: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Prompt and response of each row as one ragged column, the number of tokens of each, and what
    the engine said."""
    num_prompt = torch.tensor([len(prompt) for prompt in prompts])
    num_response = torch.tensor([len(response) for response in responses])
    pieces = []
    for prompt, response in zip(prompts, responses, strict=True):
        pieces.append(np.asarray(prompt, dtype=np.int64))
        pieces.append(np.asarray(response, dtype=np.int64))
    input_ids = torch.from_numpy(np.concatenate(pieces))
    return {
        INPUT_IDS: ragged(input_ids, num_prompt + num_response),
        NUM_PROMPT_TOKENS: num_prompt,
        "num_response_tokens": num_response,
        "rollout_log_probs": ragged(torch.from_numpy(np.concatenate(log_probs)), num_response),
        "weights_version": torch.tensor(versions),
    }
