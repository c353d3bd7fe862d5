"""Environments of skyrl-gym as rollout functions.

Owns what an environment of skyrl-gym gets and returns: its arguments, messages, rewards for each turn. Its methods run
in tool processes, and its state travels with each call. Does not know any environment.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import skyrl_gym

from rolepool.data.tokenizer import render_chat, tokenize
from rolepool.data.tools import Outcome
from rolepool.errors import DataError
from rolepool.rollout.environments import Generate, PromptRow, RolloutFunction, Trajectory
from rolepool.rollout.tool_loop import added_tokens


def rollout_of(environment: str, **arguments: Any) -> RolloutFunction:
    """The rollout function of the environment that is registered under this id. Its constructor gets `extras` and these
    arguments."""
    skyrl_gym.spec(environment)  # raises an error if there is none

    async def rollout_with(row: PromptRow, generate: Generate) -> Trajectory:
        return await _converse(environment, arguments, row, generate)

    return rollout_with


async def rollout(row: PromptRow, generate: Generate) -> Trajectory:
    """The rollout function for rows that name their environment in the column `env_class`, as files of SkyRL do."""
    name = row["extra_info"].get("env_class")
    if name is None:
        fix = "add it with the id of a registered environment, or write a file with rollout_of(id)"
        raise DataError(f"{row['origin']} has no column env_class; {fix}")
    return await rollout_of(name)(row, generate)


async def _converse(
    name: str,
    arguments: dict[str, Any],
    row: PromptRow,
    generate: Generate,
) -> Trajectory:
    """Alternate turns of the model and steps of the environment, until the environment or a limit ends it. An error of
    the environment ends it, too, and gives the turn no reward."""
    prompt = row["prompt"]
    origin = row["origin"]
    if isinstance(prompt, str):
        raise DataError(
            f"{origin}: environments of skyrl-gym need a list of messages as prompt; write one"
        )
    trajectory = Trajectory(list(row["prompt_ids"]))
    extras = _extras(row, generate)
    make = partial(skyrl_gym.make, name, extras=extras, **arguments)
    instance = _Instance(make, generate)
    started = await instance.call(trajectory, "init", prompt)
    if started.error is None:
        own_prompt = started.value[0]
        if own_prompt != prompt:
            trajectory.prompt_ids = _prompt_ids(own_prompt, origin, generate)
    rewards: list[float] = []
    while generate.has_room(trajectory):
        completion = await generate(trajectory, generate.turns.max_turn_tokens)
        if started.error:
            step = started
        else:
            step = await instance.call(trajectory, "step", generate.text_of(completion))
        if step.error:
            rewards.append(0.0)
            break
        rewards.append(float(step.value["reward"]))
        if step.value["done"] or generate.is_over(trajectory):
            break
        added = added_tokens(
            generate.tokenizer,
            step.value["observations"],
            origin,
            generate.template_options,
            generate.stop_token_ids,
        )
        trajectory.add(added)
    if started.error is None:
        await instance.call(trajectory, "close")
    trajectory.reward = rewards
    return trajectory


def _prompt_ids(messages: Any, origin: str, generate: Generate) -> list[int]:
    """The tokens of a prompt that an environment has written."""
    text = render_chat(
        generate.tokenizer,
        messages,
        origin,
        options=generate.template_options,
    )
    chat = {"is_chat": True, "text": text}
    return next(tokenize(generate.tokenizer, [chat]))


def _extras(row: PromptRow, generate: Generate) -> dict[str, Any]:
    """The columns of a row, as environments of skyrl-gym read them. They name the answer in different ways."""
    extras: dict[str, Any] = {"reward_spec": row["reward_model"]}
    max_turns = generate.turns.max_assistant_turns
    if max_turns is not None:
        extras["max_turns"] = max_turns
    extras.update(row["extra_info"])
    # A column of the row comes before an entry of extra_info with its name.
    for name in ("data_source", "reward_model", "extra_info"):
        extras[name] = row[name]
    return extras


class _Instance:
    """An environment of skyrl-gym. Only steps count as tool calls."""

    def __init__(self, make: Callable[[], Any], generate: Generate) -> None:
        self._make = make
        self._generate = generate
        self._state: bytes | None = None

    async def call(self, trajectory: Trajectory, method: str, *arguments: Any) -> Outcome:
        outcome = await self._generate.run(
            trajectory,
            _call,
            self._make,
            self._state,
            method,
            *arguments,
        )
        if method != "step":
            trajectory.num_tool_calls -= 1
        if outcome.error is not None:
            return outcome
        value, self._state = outcome.value
        return Outcome(value)


def _call(
    make: Callable[[], Any],
    state: bytes | None,
    method: str,
    *arguments: Any,
) -> tuple[Any, bytes]:
    """Call a method of an environment with this state, or of a new one. Returns the result and the new state. The tools
    of skyrl-gym are functions inside functions, which only cloudpickle can write."""
    environment = make() if state is None else cloudpickle.loads(state)
    result = getattr(environment, method)(*arguments)
    return result, cloudpickle.dumps(environment)
