"""Environments of verifiers as rollout functions.

verifiers asks an inference server for the turns of the model: GET /v1/models and POST /inference/v1/generate. Owns this
server, on loopback and with a token, and how a turn is written after the sampled tokens. Does not know any environment.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from renderers import DefaultRendererConfig, RenderedTokens
from renderers.default import DefaultRenderer

from rolepool.errors import DataError, RolepoolError
from rolepool.rollout.environments import Generate, Row, Trajectory, added_tokens

MODEL = "rolepool"
MAX_REQUEST_BYTES = 2**30


def rollout_of(
    environment: Mapping[str, Any], renderer: Mapping[str, Any] | None = None
) -> Callable[[Row, Generate], Awaitable[Trajectory]]:
    """The rollout function of the environment that this config of verifiers describes. A row names its task with
    `extra_info.index`. `renderer` is the config of a renderer of verifiers, or fields for `ChatRenderer`."""
    host = _Host(vf.load_environment(vf.resolve_env_config(dict(environment))), dict(renderer or {}))

    async def rollout(row: Row, generate: Generate) -> Trajectory:
        return await host.converse(row, generate)

    return rollout


class ChatRenderer(DefaultRenderer):  # type: ignore[misc]
    """Writes messages with the chat template of any model. Later turns follow the sampled tokens as they are."""

    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], messages: Any, *, tools: Any = None
    ) -> RenderedTokens:
        options = {**(self.config.model_extra or {}), **({"tools": tools} if tools else {})}
        added = added_tokens(self._tokenizer, messages, "a message of verifiers", options)
        before, last = [*prompt_ids, *completion_ids], len(messages) - 1
        owners = [-1] * len(before) + [last] * len(added)
        roles = [message["role"] for message in messages]
        return RenderedTokens(token_ids=[*before, *added], message_indices=owners, message_roles=roles)


@dataclass
class _Conversation:
    """A conversation that verifiers runs, as the server sees it."""

    generate: Generate
    trace: Any
    trajectory: Trajectory = field(default_factory=lambda: Trajectory([]))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_rewritten: bool = False

    def read(self, token_ids: list[int]) -> str | None:
        """Take the tokens of a request. Returns the reason if the model must not answer."""
        trajectory, turns = self.trajectory, self.generate.turns
        before = [*trajectory.prompt_ids, *trajectory.token_ids]
        if not trajectory.turn_ends:
            trajectory.prompt_ids = token_ids
        elif token_ids[: len(before)] != before:
            self.is_rewritten = True
            return "the request does not continue the conversation"
        else:
            trajectory.add(token_ids[len(before) :])
        too_many = turns.max_user_turns is not None and trajectory.num_turns > turns.max_user_turns
        if too_many or trajectory.num_turns == turns.max_assistant_turns or not self.generate.has_room(trajectory):
            self.trace.stop("max_total_tokens")  # not an error: verifiers scores what there is
            return "the conversation has reached a limit"
        return None


class _Host:
    """The environment and the server. They run while conversations use them, in the event loop of these."""

    def __init__(self, environment: Any, renderer: dict[str, Any]) -> None:
        self._environment, self._renderer = environment, renderer
        self._tasks: list[Any] = []
        self._token = f"Bearer {secrets.token_urlsafe(32)}"
        self._socket: socket.socket | None = None
        """One for all event loops, because verifiers remembers what it has learned about an address."""
        self._conversations: dict[str, _Conversation] = {}
        self._num_users = 0

    @cached_property
    def _more_tasks(self) -> Iterator[Any]:
        return iter(self._environment.taskset)

    async def converse(self, row: Row, generate: Generate) -> Trajectory:
        task, conversations = self._task(row), list[_Conversation]()

        def opened(trace: Any) -> None:
            conversations.append(_Conversation(generate, trace))
            self._conversations[trace.id] = conversations[-1]

        async with self._running():
            episode = await self._environment.run_episode(task, self._context(generate), on_trace=opened)
        for conversation in conversations:
            del self._conversations[conversation.trace.id]
        errors = [error.message for source in (episode, *episode.traces) for error in source.errors]
        if any(conversation.is_rewritten for conversation in conversations):
            fix = "use an environment that only adds messages, or another renderer"
            raise RolepoolError(f"verifiers changed earlier tokens of a conversation, for {row['origin']}; {fix}")
        if len(episode.traces) != 1 or not conversations[-1].trajectory.turn_ends:
            problem = f"{len(episode.traces)} agents of verifiers answered, and one must; errors: {errors[:1]}"
            raise RolepoolError(f"{problem}, for {row['origin']}")
        trajectory = conversations[-1].trajectory
        trajectory.reward = float(episode.traces[0].reward) if episode.ok else 0.0
        trajectory.num_tool_errors += not episode.ok
        generate.queue.errors.extend(errors[:1])
        return trajectory

    def _task(self, row: Row) -> Any:
        index = row["extra_info"].get("index", -1)
        self._tasks.extend(islice(self._more_tasks, max(0, index + 1 - len(self._tasks))))
        if not 0 <= index < len(self._tasks):
            problem = f"{row['origin']}: extra_info.index={index} is not the number of a task"
            raise DataError(f"{problem}; the taskset has {len(self._tasks)} or more, counted from 0")
        return self._tasks[index]

    def _context(self, generate: Generate) -> Any:
        """What verifiers needs to reach the server. The token is a header, because programs inherit variables."""
        assert self._socket is not None
        chat = {"name": "custom", "import_path": f"{__name__}.{ChatRenderer.__name__}", **generate.template_options}
        client = {
            "base_url": f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1",
            "headers": {"Authorization": self._token},
            "renderer": {**chat, **self._renderer} if "name" not in self._renderer else self._renderer,
            "renderer_model_name": generate.tokenizer.name_or_path,
        }
        return vf.ModelContext(MODEL, vf.TrainClientConfig.model_validate(client))

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The first conversation starts the server, and the last one stops it."""
        if not self._num_users:
            self._stack = AsyncExitStack()
            self._starting = asyncio.ensure_future(self._start(self._stack))
        self._num_users += 1
        try:
            await self._starting
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        self._socket = self._socket or socket.create_server(("127.0.0.1", 0))
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, self._socket.dup()).start()
        await stack.enter_async_context(self._environment.serving())

    def _check_token(self, request: Any) -> None:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._token.encode()):
            raise web.HTTPUnauthorized

    async def _models(self, request: Any) -> Any:
        self._check_token(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _generate(self, request: Any) -> Any:
        """Sample a turn after the tokens of the request."""
        self._check_token(request)
        body, conversation = await request.json(), self._conversations.get(request.headers.get("X-Session-ID", ""))
        if conversation is None:
            raise web.HTTPNotFound
        async with conversation.turn:
            reason = conversation.read(body["token_ids"])
            if reason is not None:
                return web.json_response({"error": {"message": reason}}, status=400)
            limits = (body["sampling_params"].get("max_tokens"), conversation.generate.turns.max_turn_tokens)
            limit = min((number for number in limits if number is not None), default=None)
            completion = await conversation.generate(conversation.trajectory, limit)
        tokens = completion.token_ids.tolist()
        pairs = zip(tokens, completion.log_probs.tolist(), strict=True)
        content = [{"token": f"token_id:{token}", "logprob": log_prob} for token, log_prob in pairs]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": completion.finish_reason}
        return web.json_response({"choices": [{**choice, "logprobs": {"content": content}}]})
