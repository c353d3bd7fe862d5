"""Conversations of several turns: what an environment is, and what it uses.

Owns the tokens of a conversation: what the model sampled is never tokenized again. Does not know
how an engine generates, nor what a tool does. Classes with tools are in `tool_loop`; running many
conversations at the same time is in `conversations`.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from rolepool.config.model_keys import MultiTurnConfig
from rolepool.data.tools import Outcome, TemplateOptions
from rolepool.rollout.conversation_queue import ConversationQueue
from rolepool.rollout.engine import Completion, Request
from rolepool.seeds import derive_seed

Message = dict[str, Any]
"""A message of a chat, as chat templates read it."""


class PromptRow(TypedDict):
    """What a rollout function gets: a row of the data."""

    prompt: str | list[Message]
    prompt_ids: list[int]
    """The tokens of the prompt."""
    data_source: str
    ground_truth: Any
    """That of `reward_model`, or None."""
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    uid: str
    origin: str
    """The place of the row in its file, for error messages."""


@dataclass
class Trajectory:
    """A conversation in tokens: a prompt, and after it what the model sampled and what the
    environment added."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    """All tokens after the prompt."""
    log_probs: list[float] = field(default_factory=list)
    """The log-prob of each of them when it was sampled; NaN if it was not."""
    turn_ends: list[int] = field(default_factory=list)
    """The number of tokens at the end of each turn of the model."""
    reward: float | Sequence[float] | None = None
    """The score: one number, or one for each turn of the model. With None the reward function is
    asked."""
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    weights_version: int = -1
    """Version of the weights that the last turn was sampled with."""

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Add tokens that the model reads, such as the answer of a tool; with log-probs, a turn of
        the model."""
        self.token_ids.extend(token_ids)
        if log_probs is None:
            self.log_probs.extend([math.nan] * len(token_ids))
        else:
            self.log_probs.extend(log_probs)
            self.turn_ends.append(len(self.token_ids))

    def count(self, outcome: Outcome) -> None:
        """Count a tool call."""
        self.num_tool_calls += 1
        if outcome.error is not None:
            self.num_tool_errors += 1

    @property
    def num_turns(self) -> int:
        return len(self.turn_ends)

    @property
    def num_kept(self) -> int:
        """The tokens up to the last one that was sampled. Nobody reads those after it."""
        return self.turn_ends[-1] if self.turn_ends else 0

    def turn_scores(self) -> list[float]:
        """The reward of each turn. One number for all belongs to the last turn."""
        if self.reward is None or not self.turn_ends:
            return [0.0] * self.num_turns
        if isinstance(self.reward, int | float):
            of_earlier_turns = [0.0] * (self.num_turns - 1)
            return [*of_earlier_turns, float(self.reward)]
        if len(self.reward) != self.num_turns:
            raise ValueError(
                f"the reward has {len(self.reward)} numbers for {self.num_turns} turns"
            )
        return [float(score) for score in self.reward]


@dataclass(frozen=True)
class Generate:
    """What a rollout function uses to talk to the engine and to tools. There is one for each
    conversation."""

    queue: ConversationQueue
    tokenizer: PreTrainedTokenizerBase
    conversation: int
    seed: int
    max_response_length: int
    turns: MultiTurnConfig
    template_options: TemplateOptions
    """The options of the chat template."""
    stop_token_ids: Sequence[int]
    """The tokens that end a turn of the model."""

    def has_room(self, trajectory: Trajectory) -> bool:
        """Whether the model can sample another token: data.max_response_length limits all that
        follows the prompt."""
        return len(trajectory.token_ids) < self.max_response_length

    def is_over(self, trajectory: Trajectory) -> bool:
        """Whether a limit of the config ends the conversation after its last turn."""
        num_turns = trajectory.num_turns
        had_all_turns = num_turns == self.turns.max_assistant_turns
        # Between two turns of the model the environment has one.
        had_all_answers = num_turns - 1 == self.turns.max_user_turns
        return had_all_turns or had_all_answers or not self.has_room(trajectory)

    async def __call__(
        self,
        trajectory: Trajectory,
        max_new_tokens: int | None = None,
    ) -> Completion:
        """Sample the next turn and add it to the trajectory. If it has no room, the turn has no
        tokens."""
        if not self.has_room(trajectory):
            return Completion(
                token_ids=np.zeros(0, np.int64),
                log_probs=np.zeros(0, np.float32),
                finish_reason="length",
                weights_version=-1,
            )
        turn = trajectory.num_turns
        # The first turn has the seed of a response without an environment.
        seed = self.seed
        if turn > 0:
            seed = derive_seed("turn", self.seed, turn)
        room = self.max_response_length - len(trajectory.token_ids)
        request = Request(
            token_ids=[*trajectory.prompt_ids, *trajectory.token_ids],
            seed=seed,
            max_new_tokens=min(room, max_new_tokens or room),
            conversation=self.conversation,
        )
        completion = await self.queue.generate(request)
        trajectory.add(
            completion.token_ids.tolist(),
            completion.log_probs.tolist(),
        )
        trajectory.weights_version = completion.weights_version
        return completion

    async def run(
        self,
        trajectory: Trajectory,
        function: Callable[..., object],
        *arguments: object,
    ) -> Outcome:
        """Call a function of a module in a process of its own, within the limits of the section
        `environment`. An error is returned, not raised, and counted."""
        outcome = await self.queue.run(function, *arguments)
        trajectory.count(outcome)
        return outcome

    def text_of(self, completion: Completion) -> str:
        """The text of a turn, without the token that ended it."""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


RolloutFunction = Callable[[PromptRow, Generate], Awaitable[Trajectory]]
"""An environment: it makes the trajectory of a row."""
