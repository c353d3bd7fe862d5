"""Responses with their texts and scores, as a run records and shows them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rolepool.data.rewards import PRED
from rolepool.protocol import DataProto
from rolepool.protocol.columns import TOKENS, rows_of_responses
from rolepool.trainer.advantages import reward_numbers

NUM_TRAINING_SAMPLES = 8
"""The number of responses of a training step whose texts are recorded."""
MAX_RECORDED_STEPS = 20
"""Some responses are recorded in about this many training steps."""


class ScoredResponse(NamedTuple):
    """A response in a validation: its numbers by variable, and the answer in it if the reward
    function returned one."""

    data_source: str
    numbers: Mapping[str, float]
    pred: str | None = None


def records_responses(step: int, num_steps: int) -> bool:
    """Whether some responses of a training step are recorded: those of the first, of the last, and
    of some others."""
    every = math.ceil(num_steps / MAX_RECORDED_STEPS)
    return step in (1, num_steps) or step % every == 0


def samples_of(
    prompts: DataProto,
    rollouts: Any,
    scored: DataProto,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[dict[str, Any]]:
    """The texts, ground truth, score and data source of each response, and other numbers of the
    reward function. `rollouts` is the future of the generation; only its tokens are fetched."""
    columns = prompts.non_tensor_batch
    graded = scored_responses(columns["data_source"], scored)
    responses = rows_of_responses(rollouts.get(keys=TOKENS).batch)
    for index, response in enumerate(responses):
        numbers = dict(graded[index].numbers)
        reward_model = columns["reward_model"][index] or {}
        prompt_ids = columns["raw_prompt_ids"][index]
        sample = {
            "prompt": tokenizer.decode(prompt_ids, skip_special_tokens=True),
            "question": question_of(columns["raw_prompt"][index]),
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "ground_truth": reward_model.get("ground_truth"),
            "score": numbers.pop("reward"),
            "data_source": columns["data_source"][index],
        }
        for name, number in numbers.items():
            # A number with the name of a column does not replace it.
            sample.setdefault(name, number)
        yield sample


def question_of(prompt: Any) -> str:
    """What a prompt asks, without the words of the chat template: the last message of the user, or
    a prompt that is a plain string."""
    if isinstance(prompt, str):
        return prompt
    of_user = [message for message in prompt if message.get("role") == "user"]
    messages = of_user or list(prompt)
    if not messages:
        return ""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    # The content may have several pieces, such as images. Only texts are shown.
    texts: list[str] = []
    for piece in content or ():
        if not isinstance(piece, Mapping):
            continue
        text = piece.get("text")
        if isinstance(text, str):
            texts.append(text)
    return " ".join(texts)


def scored_responses(data_sources: Iterable[str], scored: DataProto) -> list[ScoredResponse]:
    """The responses in the order of their rows. NaN stands for a number that the reward function
    did not return for a response."""
    scores: list[float] = scored.batch["scores"].tolist()
    no_answers = [None] * len(scores)
    preds = scored.non_tensor_batch.get(PRED, no_answers)
    numbers_of_rows: list[dict[str, float]] = [{} for _ in scores]
    for name, column in reward_numbers(scored).items():
        variable = name.removeprefix("reward/")
        for numbers, number in zip(numbers_of_rows, column, strict=True):
            if not np.isnan(number):
                numbers[variable] = float(number)
    responses: list[ScoredResponse] = []
    rows = zip(
        data_sources,
        numbers_of_rows,
        scores,
        preds,
        strict=True,
    )
    for data_source, numbers, score, pred in rows:
        # Last, so that a number with this name does not replace the score.
        numbers["reward"] = score
        responses.append(ScoredResponse(data_source, numbers, pred))
    return responses
