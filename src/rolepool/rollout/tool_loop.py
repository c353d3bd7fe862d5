"""Environments that are classes with tools: the model calls methods of a class until it answers
without a call.

Owns what the model reads of a tool's answer. Templates only add tokens after what the model
sampled. Does not know how tools run (`data.tools`), nor how an engine generates.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.config.functions import import_object
from rolepool.data import tools
from rolepool.data.tokenizer import render_chat, tokenize
from rolepool.data.tools import Outcome, TemplateOptions
from rolepool.errors import DataError, one_line
from rolepool.rollout.conversation_queue import ConversationQueue
from rolepool.rollout.environments import Generate, Message, PromptRow, Trajectory

ToolArguments = dict[str, Any]
ToolCalls = Iterable[tuple[str, ToolArguments]]
"""The names and arguments of tool calls."""


def parse_hermes(text: str) -> ToolCalls:
    """The calls that a text contains as `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`."""
    texts = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    entries = [json.loads(text_of_call) for text_of_call in texts]
    calls: list[tuple[str, ToolArguments]] = []
    for entry in entries:
        name = entry["name"]
        arguments = dict(entry.get("arguments", {}))
        calls.append((name, arguments))
    return calls


class ToolLoop:
    """The rollout of a class of the user: the model calls its methods until it answers without a
    call."""

    def __init__(self, environment: type, config: Config) -> None:
        self._class = environment
        self._tools = tools.tools_of(environment)
        name = config.actor_rollout_ref.rollout.multi_turn.format
        self._parse: Callable[[str], ToolCalls] = parse_hermes
        if name != "hermes":
            self._parse = import_object("actor_rollout_ref.rollout.multi_turn.format", name)
        get_reward = getattr(environment, tools.GET_REWARD, None)
        self._reward_arguments: list[str] | None = None
        """The argument of `get_reward`, if it has one. It gets the text of the last turn. None if
        the class has no `get_reward`."""
        if get_reward is not None:
            names = list(inspect.signature(get_reward).parameters)
            self._reward_arguments = names[1:]  # without `self`

    async def __call__(self, row: PromptRow, generate: Generate) -> Trajectory:
        trajectory = Trajectory(list(row["prompt_ids"]))
        instance = _Instance(self._class, generate.queue)
        outcome = await instance.call(tools.RESET, _reset_arguments(row))
        is_ready = outcome.error is None
        if isinstance(outcome.value, str):
            trajectory.prompt_ids = _prompt_with(row, outcome.value, generate)

        last_text = await self._converse(
            row,
            trajectory,
            generate,
            instance=instance if is_ready else None,
        )
        if self._reward_arguments is not None:
            if is_ready:
                arguments = dict.fromkeys(self._reward_arguments, last_text)
                outcome = await instance.call(tools.GET_REWARD, arguments)
            trajectory.reward = outcome.value if outcome.error is None else 0.0
        # The error of `reset`, or of `get_reward`; those of tools are counted.
        if outcome.error is not None:
            trajectory.num_tool_errors += 1
        return trajectory

    async def _converse(
        self,
        row: PromptRow,
        trajectory: Trajectory,
        generate: Generate,
        instance: "_Instance | None",
    ) -> str:
        """Turns of the model and answers of tools in turn, until the model calls none or a limit
        ends it; the text of the model's last turn. Without an instance the model has one turn."""
        keys = generate.turns
        while True:
            completion = await generate(trajectory, keys.max_turn_tokens)
            text = generate.text_of(completion)
            if instance is None or generate.is_over(trajectory):
                return text
            messages = []
            outcomes = await self._call_tools(text, instance)
            for name, outcome in outcomes:
                trajectory.count(outcome)
                message = _message(name, outcome, keys.max_tool_response_length)
                messages.append(message)
            if not messages:
                return text
            answer_ids = added_tokens(
                generate.tokenizer,
                messages,
                row["origin"],
                generate.template_options,
                generate.stop_token_ids,
            )
            trajectory.add(answer_ids)

    async def _call_tools(self, text: str, instance: "_Instance") -> list[tuple[str, Outcome]]:
        """The names and outcomes of the tool calls in a text, one after another."""
        try:
            calls = list(self._parse(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"the tool call cannot be read: {one_line(error)}"
            return [("", Outcome(error=problem))]
        outcomes = []
        for name, arguments in calls:
            if name in self._tools:
                outcome = await instance.call(name, arguments)
            else:
                known = ", ".join(self._tools)
                outcome = Outcome(error=f"there is no such tool; the tools are {known}")
            outcomes.append((name, outcome))
        return outcomes


def _reset_arguments(row: PromptRow) -> ToolArguments:
    """What `reset` gets: the entries of extra_info, and columns, which win."""
    return {
        **row["extra_info"],
        "prompt": row["prompt"],
        "data_source": row["data_source"],
        "ground_truth": row["ground_truth"],
        "extra_info": row["extra_info"],
    }


def _message(name: str, outcome: Outcome, limit: int) -> Message:
    """What the model reads of an outcome, at most about `limit` characters."""
    if outcome.error is None:
        text = str(outcome.value)
    else:
        text = f"Error: {outcome.error}"
    if len(text) > limit:
        half = limit // 2
        beginning = text[:half]
        end = text[len(text) - half :]
        text = f"{beginning}...(truncated)...{end}"
    return {"role": "tool", "name": name, "content": text}


def _prompt_with(row: PromptRow, observation: str, generate: Generate) -> list[int]:
    """The tokens of the prompt with an observation at the end of its last message."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        text = prompt + observation
        return _tokens_of(generate.tokenizer, text, is_chat=False)
    *earlier, last = prompt
    content = last["content"] + observation
    chat = [*earlier, {**last, "content": content}]
    text = render_chat(
        generate.tokenizer,
        chat,
        row["origin"],
        **generate.template_options,
    )
    return _tokens_of(generate.tokenizer, text, is_chat=True)


def _tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, *, is_chat: bool) -> list[int]:
    """The tokens of one text."""
    row = {"is_chat": is_chat, "text": text}
    return next(tokenize(tokenizer, [row]))


@dataclass
class _Instance:
    """An instance of the user's class, whose methods run in tool processes."""

    environment: type
    queue: ConversationQueue
    state: bytes | None = None
    """The pickled instance; None before its first call."""

    async def call(self, name: str, arguments: ToolArguments) -> Outcome:
        """Call a method. If it fails, the instance is as it was before."""
        outcome = await self.queue.run(
            tools.call_method,
            self.environment,
            self.state,
            name,
            arguments,
        )
        if outcome.error is not None:
            return outcome
        value, self.state = outcome.value
        return Outcome(value)


def added_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: str,
    options: TemplateOptions,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """The tokens that a template writes after a turn of the model, which ended with one of the stop
    tokens (the tokenizer's end token is always one): the messages, and the beginning of the next
    turn. They are taken from another conversation, so the model's turn is not tokenized again."""
    question = {"role": "user", "content": "?"}
    turn = {"role": "assistant", "content": "="}
    before = render_chat(
        tokenizer,
        [question],
        origin,
        turn["content"],
        **options,
    )
    after = render_chat(
        tokenizer,
        [question, turn, *messages],
        origin,
        **options,
    )
    if not after.startswith(before):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} changes earlier messages when others "
            "follow; use another template, or an environment that is an async function"
        )
    # What follows the token that ended the model's turn, which the model has sampled itself. A
    # template without such a token adds all that follows the text of the turn.
    stop_tokens = tokenizer.convert_ids_to_tokens(list(stop_token_ids))
    ends: list[int] = []
    for token in (str(tokenizer.eos_token), *stop_tokens):
        if token in before:
            ends.append(before.rindex(token) + len(token))
    start = max(ends, default=len(before))
    return _tokens_of(tokenizer, after[start:], is_chat=True)
