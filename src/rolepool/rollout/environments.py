"""Conversations of several turns: what an environment is, and running many of them at the same time
over one engine.

Owns the tokens of a conversation: what the model sampled is never tokenized again, and templates
only add tokens after it. All conversations of a batch run on one event loop. Between two steps of
the engine, those that wait for neither the engine nor a tool go on, and their requests join the
batch. Does not know how an engine generates, nor what a tool does.
"""

import asyncio
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.config.functions import import_environment, import_object
from rolepool.config.model_keys import MultiTurnConfig
from rolepool.data import tools
from rolepool.data.prompts import load_tokenizer, render_chat, tokenize
from rolepool.data.tools import Outcome
from rolepool.errors import DataError, RolepoolError, logger, one_line
from rolepool.protocol import DataProto, ragged
from rolepool.protocol.columns import (
    ENVIRONMENT_SCORE,
    INPUT_IDS,
    NUM_PROMPT_TOKENS,
    RESPONSE_MASK,
    TURN_SCORES,
)
from rolepool.rollout.engine import Completion, Engine, Request, Sampling, Session
from rolepool.seeds import derive_seed

Row = Mapping[str, Any]
"""What a rollout function gets: `ROW_COLUMNS` and `ground_truth`."""
ROW_COLUMNS = {"prompt": "raw_prompt", "prompt_ids": "raw_prompt_ids"}
ROW_COLUMNS |= {
    name: name for name in ("data_source", "reward_model", "extra_info", "uid", "origin")
}
Calls = Iterable[tuple[str, dict[str, Any]]]
"""The names and arguments of tool calls."""


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
        self.log_probs.extend([math.nan] * len(token_ids) if log_probs is None else log_probs)
        if log_probs is not None:
            self.turn_ends.append(len(self.token_ids))

    def count(self, outcome: Outcome) -> Outcome:
        """Count a tool call."""
        self.num_tool_calls += 1
        self.num_tool_errors += outcome.error is not None
        return outcome

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
            return [0.0] * (self.num_turns - 1) + [float(self.reward)]
        if len(self.reward) != self.num_turns:
            raise ValueError(
                f"the reward has {len(self.reward)} numbers for {self.num_turns} turns"
            )
        return list(map(float, self.reward))


@dataclass(frozen=True)
class Generate:
    """What a rollout function uses to talk to the engine and to tools. There is one for each
    conversation."""

    queue: "_Queue"
    tokenizer: PreTrainedTokenizerBase
    conversation: int
    seed: int
    max_response_length: int
    turns: MultiTurnConfig
    template_options: Mapping[str, Any]
    """The options of the chat template."""
    stop_token_ids: Sequence[int]
    """The tokens that end a turn of the model."""

    def has_room(self, trajectory: Trajectory) -> bool:
        """Whether the model can sample another token: data.max_response_length limits all that
        follows the prompt."""
        return len(trajectory.token_ids) < self.max_response_length

    def is_over(self, trajectory: Trajectory) -> bool:
        """Whether a limit of the config ends the conversation after its last turn."""
        num_turns, keys = trajectory.num_turns, self.turns
        is_last = num_turns == keys.max_assistant_turns or num_turns - 1 == keys.max_user_turns
        return is_last or not self.has_room(trajectory)

    async def __call__(
        self, trajectory: Trajectory, max_new_tokens: int | None = None
    ) -> Completion:
        """Sample the next turn and add it to the trajectory. If it has no room, the turn has no
        tokens."""
        if not self.has_room(trajectory):
            return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "length", -1)
        turn, room = trajectory.num_turns, self.max_response_length - len(trajectory.token_ids)
        seed = derive_seed("turn", self.seed, turn) if turn else self.seed
        context, limit = (
            [*trajectory.prompt_ids, *trajectory.token_ids],
            min(room, max_new_tokens or room),
        )
        completion = await self.queue.generate(Request(context, seed, limit, self.conversation))
        trajectory.add(completion.token_ids.tolist(), completion.log_probs.tolist())
        trajectory.weights_version = completion.weights_version
        return completion

    async def run(
        self, trajectory: Trajectory, function: Callable[..., Any], *arguments: Any
    ) -> Outcome:
        """Call a function of a module in a process of its own, within the limits of the section
        `environment`. An error is returned, not raised, and counted."""
        return trajectory.count(await self.queue.run(function, *arguments))

    def text_of(self, completion: Completion) -> str:
        """The text of a turn, without the token that ended it."""
        ids = (
            completion.token_ids[:-1]
            if completion.finish_reason == "stop"
            else completion.token_ids
        )
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


# --- classes with tools -------------------------------------------------------------------------------------------


def parse_hermes(text: str) -> Calls:
    """The calls that a text contains as `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`."""
    written = map(json.loads, re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL))
    return [(call["name"], dict(call.get("arguments", {}))) for call in written]


class ToolLoop:
    """The rollout of a class of the user: the model calls its methods until it answers without a
    call."""

    def __init__(self, environment: type, config: Config) -> None:
        self._class, self._tools = environment, tools.tools_of(environment)
        key, name = (
            "actor_rollout_ref.rollout.multi_turn.format",
            config.actor_rollout_ref.rollout.multi_turn.format,
        )
        self._parse: Callable[[str], Calls] = (
            parse_hermes if name == "hermes" else import_object(key, name)
        )
        score = getattr(environment, tools.GET_REWARD, None)
        self._reward_arguments = (
            None if score is None else list(inspect.signature(score).parameters)[1:]
        )
        """The argument of `get_reward`, if it has one. It gets the text of the last turn."""

    async def __call__(self, row: Row, generate: Generate) -> Trajectory:
        trajectory, keys = Trajectory(list(row["prompt_ids"])), generate.turns
        instance = _Instance(self._class, generate.queue)
        columns = {
            name: row[name] for name in ("prompt", "data_source", "ground_truth", "extra_info")
        }
        outcome = await instance.call(tools.RESET, {**row["extra_info"], **columns})
        if isinstance(outcome.value, str):
            trajectory.prompt_ids = _prompt_with(row, outcome.value, generate)
        is_ready = outcome.error is None
        while True:
            text = generate.text_of(await generate(trajectory, keys.max_turn_tokens))
            if not is_ready or generate.is_over(trajectory):
                break
            called = await self._call_tools(text, instance)
            messages = [
                _message(name, trajectory.count(one), keys.max_tool_response_length)
                for name, one in called
            ]
            if not messages:
                break
            ids = added_tokens(
                generate.tokenizer,
                messages,
                row["origin"],
                generate.template_options,
                generate.stop_token_ids,
            )
            trajectory.add(ids)
        if self._reward_arguments is not None:
            if is_ready:
                outcome = await instance.call(
                    tools.GET_REWARD, dict.fromkeys(self._reward_arguments, text)
                )
            trajectory.reward = outcome.value if outcome.error is None else 0.0
        trajectory.num_tool_errors += outcome.error is not None
        return trajectory

    async def _call_tools(self, text: str, instance: "_Instance") -> list[tuple[str, Outcome]]:
        """The names and outcomes of the tool calls in a text, one after another."""
        try:
            calls = list(self._parse(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return [("", Outcome(error=f"the tool call cannot be read: {one_line(error)}"))]
        unknown = Outcome(error=f"there is no such tool; the tools are {', '.join(self._tools)}")
        return [
            (name, await instance.call(name, arguments) if name in self._tools else unknown)
            for name, arguments in calls
        ]


def _message(name: str, outcome: Outcome, limit: int) -> dict[str, Any]:
    """What the model reads of an outcome, at most about `limit` characters."""
    text = str(outcome.value) if outcome.error is None else f"Error: {outcome.error}"
    if len(text) > limit:
        text = f"{text[: limit // 2]}...(truncated)...{text[len(text) - limit // 2 :]}"
    return {"role": "tool", "name": name, "content": text}


def _prompt_with(row: Row, observation: str, generate: Generate) -> list[int]:
    """The tokens of the prompt with an observation at the end of its last message."""
    prompt, is_chat = row["prompt"], not isinstance(row["prompt"], str)
    if is_chat:
        longer = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    else:
        longer = prompt + observation
    text = render_chat(generate.tokenizer, longer, row["origin"], **generate.template_options)
    return next(tokenize(generate.tokenizer, [{"is_chat": is_chat, "text": text}]))


@dataclass
class _Instance:
    """An instance of the user's class, whose methods run in tool processes."""

    environment: type
    queue: "_Queue"
    state: bytes | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Call a method. If it fails, the instance is as it was before."""
        outcome = await self.queue.run(
            tools.call_method, self.environment, self.state, name, arguments
        )
        if outcome.error is None:
            value, self.state = outcome.value
            return Outcome(value)
        return outcome


def added_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    origin: str,
    options: Mapping[str, Any],
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """The tokens that a template writes after a turn of the model, which ended with one of the stop
    tokens (the tokenizer's end token is always one): the messages, and the beginning of the next
    turn. They are taken from another conversation, so the model's turn is not tokenized again."""
    question, turn = {"role": "user", "content": "?"}, {"role": "assistant", "content": "="}
    before = render_chat(tokenizer, [question], origin, turn["content"], **options)
    after = render_chat(tokenizer, [question, turn, *messages], origin, **options)
    if not after.startswith(before):
        problem = f"the chat template of {tokenizer.name_or_path} changes earlier messages when others follow"
        raise DataError(
            f"{problem}; use another template, or an environment that is an async function"
        )
    ends = [str(tokenizer.eos_token), *tokenizer.convert_ids_to_tokens(list(stop_token_ids))]
    start = max(
        (before.rindex(end) + len(end) for end in ends if end in before), default=len(before)
    )
    return next(tokenize(tokenizer, [{"is_chat": True, "text": after[start:]}]))


# --- running them -------------------------------------------------------------------------------------------------


class _Queue:
    """The requests of all conversations and the session that answers them, and the processes for
    tools."""

    def __init__(self, session: Session, processes: Sequence[tools.ToolProcess]) -> None:
        self._session = session
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: dict[int, asyncio.Future[Completion]] = {}
        self._changed = asyncio.Event()
        self.errors: list[str] = []
        """The errors of tools."""
        self._idle_processes: asyncio.LifoQueue[tools.ToolProcess] = asyncio.LifoQueue()
        for process in processes:
            self._idle_processes.put_nowait(process)

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._changed.set()
        return await future

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call a function in the next process that is idle."""
        process = await self._idle_processes.get()
        try:
            outcome = await process.call(function, *arguments)
        finally:
            self._idle_processes.put_nowait(process)
        self.errors.extend([] if outcome.error is None else [outcome.error])
        return outcome

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
                    future = self._running.pop(number)
                    if not future.cancelled():  # a rollout function may stop waiting
                        future.set_result(completion)
            else:
                self._changed.clear()
                await self._changed.wait()


RolloutFunction = Callable[[Row, Generate], Awaitable[Trajectory]]


@dataclass(frozen=True)
class Conversations:
    """Runs an environment for the rows of a batch."""

    rollout: RolloutFunction
    tokenizer: PreTrainedTokenizerBase
    processes: Sequence[tools.ToolProcess]
    limits: tuple[int, int]
    """The largest numbers of tokens of a prompt and of everything after it."""
    turns: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, engine: Engine, sampling: Sampling, rows: Sequence[Row], seeds: Sequence[int]
    ) -> list[Trajectory]:
        """The trajectory of each row, which has this seed. It does not depend on the order in which
        tools answer."""
        with engine.session(
            replace(sampling, max_new_tokens=self.limits[1]), len(rows), sum(self.limits)
        ) as session:
            return asyncio.run(self._run(session, rows, seeds, sampling.stop_token_ids))

    async def _run(
        self,
        session: Session,
        rows: Sequence[Row],
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> list[Trajectory]:
        queue, tasks = _Queue(session, self.processes), []
        try:
            async with asyncio.TaskGroup() as group:
                for number, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                    options = (self.limits[1], self.turns, self.template_options, stop_token_ids)
                    generate = Generate(queue, self.tokenizer, number, seed, *options)
                    tasks.append(group.create_task(self._one(row, generate)))
                group.create_task(queue.serve(tasks))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if queue.errors:
            logger.warning(
                "%d calls of tools failed; the first: %s", len(queue.errors), queue.errors[0]
            )
        return [task.result() for task in tasks]

    async def _one(self, row: Row, generate: Generate) -> Trajectory:
        """The trajectory of a row, checked."""
        try:
            trajectory = await self.rollout(row, generate)
            num_prompt, _ = len(trajectory.prompt_ids), trajectory.turn_scores()
        except RolepoolError:
            raise
        except Exception as error:
            problem = f"the environment failed with {type(error).__name__}: {one_line(error)}"
            raise RolepoolError(f"{problem}, for {row['origin']}") from error
        if num_prompt > self.limits[0]:
            problem = f"the environment's prompt has {num_prompt} tokens, for {row['origin']}"
            raise DataError(f"data.max_prompt_length={self.limits[0]}: {problem}; raise it")
        return trajectory


def conversations_of(config: Config) -> Conversations | None:
    """What runs the environment that the config names; None if it names none."""
    environment = import_environment(config.environment.path, config.environment.name)
    if environment is None:
        return None
    rollout = ToolLoop(environment, config) if isinstance(environment, type) else environment
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    processes = [
        tools.ToolProcess(config.environment) for _ in range(config.environment.num_processes)
    ]
    limits, turns = (
        (config.data.max_prompt_length, config.data.max_response_length),
        config.actor_rollout_ref.rollout,
    )
    return Conversations(
        rollout, tokenizer, processes, limits, turns.multi_turn, tools.template_options(config)
    )


# --- rows ---------------------------------------------------------------------------------------------------------


def rows_of(prompts: DataProto) -> list[Row]:
    """The rows of a batch of prompts, as a rollout function gets them."""
    columns = zip(
        *(prompts.non_tensor_batch[column] for column in ROW_COLUMNS.values()), strict=True
    )
    rows = [dict(zip(ROW_COLUMNS, values, strict=True)) for values in columns]
    return [{**row, "ground_truth": row["reward_model"].get("ground_truth")} for row in rows]


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Trajectories as columns of a batch: tokens, which of them were sampled, scores and counts."""
    tokens = [one.token_ids[: one.num_kept] for one in trajectories]
    log_probs = [np.array(one.log_probs[: one.num_kept], dtype=np.float32) for one in trajectories]
    versions = [one.weights_version for one in trajectories]
    columns = token_columns([one.prompt_ids for one in trajectories], tokens, log_probs, versions)
    num_response, of_tokens = (
        columns["num_response_tokens"],
        torch.from_numpy(np.concatenate(log_probs)),
    )
    scores = [torch.zeros(one.num_kept) for one in trajectories]
    for one, of_turns in zip(trajectories, scores, strict=True):
        of_turns[torch.tensor(one.turn_ends, dtype=torch.int64) - 1] = torch.tensor(
            one.turn_scores()
        )
    given = [math.nan if one.reward is None else sum(one.turn_scores()) for one in trajectories]
    counts = ("num_turns", "num_tool_calls", "num_tool_errors")
    return {
        **columns,
        "rollout_log_probs": ragged(of_tokens.nan_to_num(), num_response),
        RESPONSE_MASK: ragged(~of_tokens.isnan(), num_response),
        TURN_SCORES: ragged(torch.cat(scores), num_response),
        ENVIRONMENT_SCORE: torch.tensor(given),
        **{name: torch.tensor([getattr(one, name) for one in trajectories]) for name in counts},
    }


def token_columns(
    prompts: Sequence[Any],
    responses: Sequence[Any],
    log_probs: Sequence[Any],
    versions: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Prompt and response of each row as one ragged column, the number of tokens of each, and what
    the engine said."""
    num_prompt, num_response = (
        torch.tensor([len(row) for row in rows]) for rows in (prompts, responses)
    )
    tokens = [
        np.asarray(half, dtype=np.int64)
        for row in zip(prompts, responses, strict=True)
        for half in row
    ]
    return {
        INPUT_IDS: ragged(torch.from_numpy(np.concatenate(tokens)), num_prompt + num_response),
        NUM_PROMPT_TOKENS: num_prompt,
        "num_response_tokens": num_response,
        "rollout_log_probs": ragged(torch.from_numpy(np.concatenate(log_probs)), num_response),
        "weights_version": torch.tensor(versions),
    }
