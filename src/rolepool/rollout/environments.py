"""Conversations of several turns: what an environment is, and running many of them at the same time over one engine.

Owns the tokens of a conversation: what the model sampled is never tokenized again, and templates only add tokens after
it. All conversations of a batch run on one event loop. Between two steps of the engine, those that wait for neither the
engine nor a tool go on, and their requests join the batch. Does not know how an engine generates, nor what a tool does.
"""

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.config.functions import import_object
from rolepool.data.prompts import load_tokenizer, render_chat, tokenize
from rolepool.data.tools import (
    GET_REWARD,
    RESET,
    Outcome,
    ToolProcess,
    Tools,
    call_method,
    load_environment,
    template_options,
    tools_of,
)
from rolepool.errors import DataError, RolepoolError, one_line
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.ragged import ENVIRONMENT_SCORE, INPUT_IDS, NUM_PROMPT_TOKENS, RESPONSE_MASK, TURN_SCORES
from rolepool.rollout.engine import Completion, Engine, Request, Sampling, Session
from rolepool.seeds import derive_seed

logger = logging.getLogger(__name__)


@dataclass
class Trajectory:
    """A conversation in tokens: a prompt, and after it what the model sampled and what the environment added."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    """All tokens after the prompt."""
    is_sampled: list[bool] = field(default_factory=list)
    """For each of them whether the model sampled it."""
    log_probs: list[float] = field(default_factory=list)
    """For each of them its log-prob when it was sampled; 0 if it was not."""
    turn_ends: list[int] = field(default_factory=list)
    """The number of tokens at the end of each turn of the model."""
    reward: float | Sequence[float] | None = None
    """The score: one number, or one for each turn of the model. With None the reward function is asked."""
    num_tool_calls: int = 0
    num_tool_errors: int = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the model reads, such as the answer of a tool."""
        self._extend(token_ids, [0.0] * len(token_ids), is_sampled=False)

    def add_sampled(self, completion: Completion) -> None:
        """Add a turn of the model."""
        self._extend(completion.token_ids.tolist(), completion.log_probs.tolist(), is_sampled=True)
        self.turn_ends.append(len(self.token_ids))

    def _extend(self, token_ids: Sequence[int], log_probs: Sequence[float], *, is_sampled: bool) -> None:
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.is_sampled.extend([is_sampled] * len(token_ids))

    @property
    def num_kept(self) -> int:
        """The tokens up to the last one that was sampled. Nobody reads those after it."""
        return self.turn_ends[-1] if self.turn_ends else 0

    @property
    def turn_scores(self) -> Any:
        """The reward at the last token of each turn, or at the last token of all. Raises ValueError if it has another
        number of turns."""
        scores = np.zeros(self.num_kept, dtype=np.float32)
        if self.reward is not None and self.turn_ends:
            rewards = [float(self.reward)] if isinstance(self.reward, int | float) else list(map(float, self.reward))
            ends = self.turn_ends[-1:] if isinstance(self.reward, int | float) else self.turn_ends
            np.add.at(scores, np.asarray(ends) - 1, rewards)
        return scores


Row = Mapping[str, Any]
"""What a rollout function gets: `ROW_COLUMNS` and `ground_truth`."""
ROW_COLUMNS = {"prompt": "raw_prompt", "prompt_ids": "raw_prompt_ids"}
ROW_COLUMNS |= {name: name for name in ("data_source", "reward_model", "extra_info", "uid", "origin")}
Rollout = Callable[[Row, "Generate"], Awaitable[Trajectory]]


@dataclass(frozen=True)
class Generate:
    """What a rollout function uses to talk to the engine. There is one for each conversation."""

    queue: "_Queue"
    tools: Tools
    tokenizer: PreTrainedTokenizerBase
    conversation: int
    seed: int
    max_response_length: int

    def has_room(self, trajectory: Trajectory) -> bool:
        """Whether the model can sample another token. data.max_response_length limits all that follows the prompt."""
        return len(trajectory.token_ids) < self.max_response_length

    async def __call__(self, trajectory: Trajectory, max_new_tokens: int | None = None) -> Completion:
        """Sample the next turn and add it to the trajectory. If there is no room for a token, the turn has none and its
        `finish_reason` is "length"."""
        turn, room = len(trajectory.turn_ends), self.max_response_length - len(trajectory.token_ids)
        if room < 1:
            return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "length", -1)
        seed = derive_seed("turn", self.seed, turn) if turn else self.seed
        limit = min(room, max_new_tokens or room)
        request = Request([*trajectory.prompt_ids, *trajectory.token_ids], seed, limit, self.conversation)
        completion = await self.queue.generate(request)
        trajectory.add_sampled(completion)
        return completion

    async def run(self, trajectory: Trajectory, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call a function in a process of its own, with the limits of the section `environment`. An error is returned,
        not raised, and counted."""
        outcome = await self.tools.call(function, *arguments)
        trajectory.num_tool_calls += 1
        trajectory.num_tool_errors += outcome.error is not None
        if outcome.error is not None:
            self.queue.errors.append(outcome.error)
        return outcome

    def text_of(self, completion: Completion) -> str:
        """The text of a turn, without the token that ended it."""
        ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


# --- classes ------------------------------------------------------------------------------------------------------


def parse_hermes(text: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The calls that a text contains as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Raises ValueError
    if one of them cannot be read."""
    calls = []
    for written in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        call = json.loads(written)
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict) or "name" not in call:
            raise ValueError('a tool call must be {"name": ..., "arguments": {...}}')
        calls.append((str(call["name"]), call.get("arguments", {})))
    return calls


class ToolLoop:
    """The rollout of a class of the user: the model calls its methods until it answers without a call."""

    def __init__(self, environment: type, config: Config) -> None:
        self._class, self._keys = environment, config.actor_rollout_ref.rollout.multi_turn
        self._tools, self._options = tools_of(environment), template_options(config)
        score = getattr(environment, GET_REWARD, None)
        self._reward_arguments = None if score is None else list(inspect.signature(score).parameters)[1:]
        """The argument of `get_reward`, which is the text of the last turn, if it has one."""
        name = self._keys.format
        self._parse: Callable[[str], Iterable[tuple[str, dict[str, Any]]]] = (
            parse_hermes if name == "hermes" else import_object("actor_rollout_ref.rollout.multi_turn.format", name)
        )

    async def __call__(self, row: Row, generate: Generate) -> Trajectory:
        trajectory = Trajectory(list(row["prompt_ids"]))
        instance = _Instance(self._class, trajectory, generate)
        columns = {name: row[name] for name in ("prompt", "data_source", "ground_truth", "extra_info")}
        observation = await instance.call(RESET, {**row["extra_info"], **columns})
        if isinstance(observation.value, str):
            trajectory.prompt_ids = self._prompt_ids(row, observation.value, generate.tokenizer)
        max_turns, max_answers = self._keys.max_assistant_turns, self._keys.max_user_turns
        is_open, num_answers = observation.error is None, 0
        while True:
            completion = await generate(trajectory, self._keys.max_turn_tokens)
            if not is_open or len(trajectory.turn_ends) == max_turns or not generate.has_room(trajectory):
                break
            answers = [] if num_answers == max_answers else await self._answer(generate.text_of(completion), instance)
            if not answers:
                break
            num_answers += 1
            trajectory.add(added_tokens(generate.tokenizer, answers, row["origin"], self._options))
        if self._reward_arguments is not None:
            arguments = dict.fromkeys(self._reward_arguments, generate.text_of(completion))
            scored = await instance.call(GET_REWARD, arguments) if is_open else observation
            trajectory.reward = 0.0 if scored.error is not None else scored.value
        return trajectory

    def _prompt_ids(self, row: Row, observation: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt with an observation at the end of its last message."""
        prompt, is_chat = row["prompt"], not isinstance(row["prompt"], str)
        if is_chat:
            chat = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
            text = render_chat(tokenizer, chat, row["origin"], options=self._options)
        else:
            text = prompt + observation
        return next(tokenize(tokenizer, [{"is_chat": is_chat, "text": text}]))

    async def _answer(self, text: str, instance: "_Instance") -> list[dict[str, Any]]:
        """The messages that answer the tool calls in a text, one for each call."""
        try:
            calls = list(self._parse(text))
        except ValueError as error:
            return [self._message("", instance.failed(f"the tool call cannot be read: {one_line(error)}"))]
        messages = []
        for name, arguments in calls:
            if name in self._tools:
                outcome = await instance.call(name, arguments)
            else:
                outcome = instance.failed(f"there is no tool {name}; the tools are {', '.join(self._tools)}")
            messages.append(self._message(name, outcome))
        return messages

    def _message(self, name: str, outcome: Outcome) -> dict[str, Any]:
        text = str(outcome.value) if outcome.error is None else f"Error: {outcome.error}"
        limit = self._keys.max_tool_response_length
        if len(text) > limit:
            text = f"{text[: limit // 2]}...(truncated)...{text[len(text) - limit // 2 :]}"
        return {"role": "tool", "name": name, "content": text}


class _Instance:
    """An instance of the user's class, whose methods run in tool processes."""

    def __init__(self, environment: type, trajectory: Trajectory, generate: Generate) -> None:
        self._class, self._trajectory, self._generate = environment, trajectory, generate
        self._state: bytes | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Call a method. If it fails, the instance is as it was before. Only tools are counted as tool calls."""
        outcome = await self._generate.run(self._trajectory, call_method, self._class, self._state, name, arguments)
        self._trajectory.num_tool_calls -= name in (RESET, GET_REWARD)
        if outcome.error is not None:
            return outcome
        value, self._state = outcome.value
        return Outcome(value)

    def failed(self, reason: str) -> Outcome:
        """A call that could not be made."""
        self._trajectory.num_tool_calls += 1
        self._trajectory.num_tool_errors += 1
        return Outcome(error=reason)


def added_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], origin: str, options: Mapping[str, Any]
) -> list[int]:
    """The tokens that a template writes after a turn of the model, which ended with an end token: the messages, and the
    beginning of the next turn. They are taken from another conversation, so the model's turn is not tokenized again."""
    chat = [{"role": "user", "content": "?"}]
    before = render_chat(tokenizer, chat, origin, answer="=", options=options)
    turn = {"role": "assistant", "content": "="}
    after = render_chat(tokenizer, [*chat, turn, *messages], origin, options=options)
    if not after.startswith(before):
        problem = f"the chat template of {tokenizer.name_or_path} changes earlier messages when others follow"
        raise DataError(f"{problem}; use another template, or an environment that is an async function")
    end = str(tokenizer.eos_token)
    start = before.rindex(end) + len(end) if end in before else len(before)
    return next(tokenize(tokenizer, [{"is_chat": True, "text": after[start:]}]))


# --- running them -------------------------------------------------------------------------------------------------


class _Queue:
    """The requests of all conversations, and the session that answers them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: dict[int, asyncio.Future[Completion]] = {}
        self._changed = asyncio.Event()
        self.errors: list[str] = []
        """The errors of tools."""

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._changed.set()
        return await future

    async def serve(self, tasks: Sequence[asyncio.Task[Trajectory]]) -> None:
        """Run the engine until all tasks have ended. They run between its steps."""
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if self._waiting:
                requests, futures = zip(*self._waiting, strict=True)
                self._waiting.clear()
                self._running.update(zip(self._session.submit(requests), futures, strict=True))
            if self._running:
                for number, completion in self._session.step():
                    self._running.pop(number).set_result(completion)
            else:
                self._changed.clear()
                await self._changed.wait()


@dataclass(frozen=True)
class Conversations:
    """Runs an environment for the rows of a batch."""

    rollout: Rollout
    tokenizer: PreTrainedTokenizerBase
    processes: Sequence[ToolProcess]
    limits: tuple[int, int]
    """The largest numbers of tokens of a prompt and of everything after it."""

    def run(self, engine: Engine, sampling: Sampling, rows: Sequence[Row], seeds: Sequence[int]) -> list[Trajectory]:
        """The trajectory of each row, which has this seed. It does not depend on the order in which tools answer."""
        with engine.session(replace(sampling, max_new_tokens=self.limits[1]), len(rows), sum(self.limits)) as session:
            return asyncio.run(self._run(session, rows, seeds))

    async def _run(self, session: Session, rows: Sequence[Row], seeds: Sequence[int]) -> list[Trajectory]:
        queue, tools = _Queue(session), Tools(self.processes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                    generate = Generate(queue, tools, self.tokenizer, number, seed, self.limits[1])
                    tasks.append(group.create_task(self._one(row, generate)))
                group.create_task(queue.serve(tasks))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if queue.errors:
            logger.warning("%d calls of tools failed; the first: %s", len(queue.errors), queue.errors[0])
        return [task.result() for task in tasks]

    async def _one(self, row: Row, generate: Generate) -> Trajectory:
        """The trajectory of a row, checked."""
        try:
            trajectory = await self.rollout(row, generate)
            trajectory.turn_scores  # noqa: B018  its length is checked there
        except RolepoolError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise RolepoolError(f"environment.name: the rollout failed with {problem}, for {row['origin']}") from error
        if len(trajectory.prompt_ids) > self.limits[0]:
            problem = f"the environment's prompt has {len(trajectory.prompt_ids)} tokens"
            raise DataError(f"data.max_prompt_length={self.limits[0]}: {problem}, for {row['origin']}; raise it")
        return trajectory


def conversations_of(config: Config) -> Conversations | None:
    """What runs the environment that the config names; None if it names none."""
    environment, keys = load_environment(config), config.actor_rollout_ref.model
    if environment is None:
        return None
    rollout = ToolLoop(environment, config) if isinstance(environment, type) else environment
    tokenizer = load_tokenizer(keys.path, trust_remote_code=keys.trust_remote_code)
    processes = [ToolProcess(config.environment) for _ in range(config.environment.num_processes)]
    limits = config.data.max_prompt_length, config.data.max_response_length
    return Conversations(rollout, tokenizer, processes, limits)


# --- rows ---------------------------------------------------------------------------------------------------------


def rows_of(prompts: DataProto) -> list[Row]:
    """The rows of a batch of prompts, as a rollout function gets them."""
    columns = zip(*(prompts.non_tensor_batch[column] for column in ROW_COLUMNS.values()), strict=True)
    rows = [dict(zip(ROW_COLUMNS, values, strict=True)) for values in columns]
    return [{**row, "ground_truth": row["reward_model"].get("ground_truth")} for row in rows]


def batch_of(trajectories: Sequence[Trajectory], *, with_log_probs: bool) -> DataProto:
    """Trajectories as rows of a batch: tokens, which of them were sampled, scores and counts."""
    num_prompt, num_response = (
        torch.tensor(lengths)
        for lengths in ([len(one.prompt_ids) for one in trajectories], [one.num_kept for one in trajectories])
    )

    def column(values: Iterable[Iterable[Any]], dtype: Any, lengths: Tensor = num_response) -> Tensor:
        return ragged(torch.from_numpy(np.fromiter(chain.from_iterable(values), dtype)), lengths)

    ids = ([*one.prompt_ids, *one.token_ids[: one.num_kept]] for one in trajectories)
    scores = [one.turn_scores for one in trajectories]
    given = [np.nan if one.reward is None else float(row.sum()) for one, row in zip(trajectories, scores, strict=True)]
    columns = {
        INPUT_IDS: column(ids, np.int64, num_prompt + num_response),
        NUM_PROMPT_TOKENS: num_prompt,
        "num_response_tokens": num_response,
        RESPONSE_MASK: column((one.is_sampled[: one.num_kept] for one in trajectories), np.bool_),
        TURN_SCORES: column(scores, np.float32),
        ENVIRONMENT_SCORE: torch.tensor(given, dtype=torch.float32),
        "num_turns": torch.tensor([len(one.turn_ends) for one in trajectories]),
        "num_tool_calls": torch.tensor([one.num_tool_calls for one in trajectories]),
        "num_tool_errors": torch.tensor([one.num_tool_errors for one in trajectories]),
    }
    if with_log_probs:
        columns["rollout_log_probs"] = column((one.log_probs[: one.num_kept] for one in trajectories), np.float32)
    return DataProto.from_dict(columns)
