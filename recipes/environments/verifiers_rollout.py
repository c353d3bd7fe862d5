"""Environments of verifiers as rollout functions.

verifiers asks an inference server for the turns of the model: GET /v1/models and POST /inference/v1/generate. Owns this
server, on loopback and with a token, and how messages are written after sampled tokens. Does not know any environment.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from renderers import DefaultRenderer, DefaultRendererConfig, RenderedTokens

from rolepool.errors import ConfigError, DataError, RolepoolError
from rolepool.rollout.environments import Generate, PromptRow, RolloutFunction, Trajectory
from rolepool.rollout.tool_loop import added_tokens

HOST = "127.0.0.1"
MODEL = "rolepool"


def rollout_of(
    environment: Mapping[str, Any], renderer: Mapping[str, Any] | None = None
) -> RolloutFunction:
    """The rollout function of the environment that this config of verifiers describes. A row names its task with
    `extra_info.index`. `renderer` is the config of a renderer of verifiers; None takes `ChatRenderer`."""
    config = vf.resolve_env_config(dict(environment))
    loaded = vf.load_environment(config)
    if not loaded.taskset.bounded:
        raise ConfigError(
            f"taskset.id={loaded.taskset.config.id}: it has no end; use one that ends"
        )
    return _Host(loaded, renderer).converse


class ChatRenderer(DefaultRenderer):  # type: ignore[misc]
    """Writes messages with the chat template of any model. New messages follow the sampled tokens as they are."""

    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self,
        prompt: list[int],
        completion: list[int],
        messages: Any,
        *,
        tools: Any = None,
    ) -> Any:
        options = dict(self.config.model_extra or {})
        if tools:
            options["tools"] = tools
        earlier = [*prompt, *completion]
        added = added_tokens(self._tokenizer, messages, "a message of verifiers", options)
        # Earlier tokens belong to no message, and the new ones to the last message.
        last_message = len(messages) - 1
        owners = [-1] * len(earlier) + [last_message] * len(added)
        return RenderedTokens(
            token_ids=earlier + added,
            message_indices=owners,
            message_roles=[message["role"] for message in messages],
        )


@dataclass
class _Conversation:
    """A conversation of verifiers with the model."""

    trace: Any
    generate: Generate
    trajectory: Trajectory = field(default_factory=lambda: Trajectory([]))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, token_ids: list[int], max_new_tokens: int | None) -> dict[str, Any]:
        """Sample a turn after these tokens, which must continue those of the turn before."""
        async with self.turn:
            trajectory = self.trajectory
            earlier = [*trajectory.prompt_ids, *trajectory.token_ids]
            num_earlier = len(earlier)
            if token_ids[:num_earlier] != earlier:
                raise web.HTTPBadRequest(
                    text="the request changes earlier tokens; use another renderer"
                )
            trajectory.prompt_ids = trajectory.prompt_ids or token_ids
            # The tokens of the first request are the prompt, and add nothing to it.
            new_ids = token_ids[num_earlier:] if earlier else []
            trajectory.add(new_ids)
            if self.generate.is_over(trajectory):
                self.trace.stop("max_total_tokens")  # not an error: verifiers scores what there is
                raise web.HTTPBadRequest(text="the conversation has reached a limit")
            completion = await self.generate(trajectory, max_new_tokens)
        sampled_ids = completion.token_ids.tolist()
        log_probs = completion.log_probs.tolist()
        content: list[dict[str, Any]] = []
        for token_id, log_prob in zip(sampled_ids, log_probs, strict=True):
            content.append({"token": f"token_id:{token_id}", "logprob": log_prob})
        return {
            "token_ids": sampled_ids,
            "logprobs": {"content": content},
            "finish_reason": completion.finish_reason,
        }


@cache
def _listener() -> socket.socket:
    """One for all event loops of the process. verifiers asks once what it must know about an address, under a lock that
    works in one event loop only."""
    return socket.create_server((HOST, 0))


@dataclass
class _Host:
    """The environment and the server. They run while conversations use them, in the event loop of these."""

    environment: Any
    renderer: Mapping[str, Any] | None
    token: str = field(default_factory=lambda: f"Bearer {secrets.token_urlsafe(32)}", repr=False)
    conversations: dict[str, _Conversation] = field(default_factory=dict)
    """Those that run, by what verifiers sends as X-Session-ID."""
    num_users: int = 0

    @cached_property
    def tasks(self) -> list[Any]:
        return list(self.environment.taskset)

    async def converse(self, row: PromptRow, generate: Generate) -> Trajectory:
        """Run the task of a row."""

        def opened(trace: Any) -> None:
            self.conversations[trace.id] = _Conversation(trace, generate)

        origin = row["origin"]
        num_tasks = len(self.tasks)
        index = row["extra_info"].get("index", -1)
        if not 0 <= index < num_tasks:
            raise DataError(f"{origin}: extra_info.index={index}: write a number below {num_tasks}")
        async with self._running():
            episode = await self.environment.run_episode(
                self.tasks[index],
                self._context(generate),
                on_trace=opened,
            )
            # Inside of the block, because the last conversation that ends removes them all.
            trajectories = [self.conversations[trace.id].trajectory for trace in episode.traces]
        errors: list[str] = []
        for source in (episode, *episode.traces):
            errors += [error.message for error in source.errors]
        if len(trajectories) != 1 or not trajectories[0].turn_ends:
            raise RolepoolError(f"verifiers: one agent must answer, for {origin}; errors: {errors}")
        generate.queue.errors.extend(errors[:1])
        trajectory = trajectories[0]
        trajectory.reward = 0.0
        if episode.ok:
            trajectory.reward = float(episode.traces[0].reward)
        else:
            trajectory.num_tool_errors += 1
        return trajectory

    def _context(self, generate: Generate) -> Any:
        """How verifiers reaches the server. The token is not in a variable, because programs would inherit it."""
        chat = {
            "name": "custom",
            "import_path": f"{__name__}.ChatRenderer",
            **generate.template_options,
        }
        _, port = _listener().getsockname()
        client = vf.TrainClientConfig(
            base_url=f"http://{HOST}:{port}/v1",
            headers={"Authorization": self.token},
            renderer=chat if self.renderer is None else self.renderer,
            renderer_model_name=generate.tokenizer.name_or_path,
        )
        sampling = vf.Sampling(max_tokens=generate.turns.max_turn_tokens)
        return vf.ModelContext(MODEL, client, sampling)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The first conversation starts the server, and the last one stops it."""
        if not self.num_users:
            self._stack = AsyncExitStack()
            self._started = asyncio.ensure_future(self._start(self._stack))
        self.num_users += 1
        try:
            await self._started
            yield
        finally:
            self.num_users -= 1
            if not self.num_users:
                await self._stack.aclose()
                self.conversations.clear()

    async def _start(self, stack: AsyncExitStack) -> None:
        for name in ("httpx", "aiohttp.access"):  # they log every request
            logging.getLogger(name).setLevel(logging.WARNING)
        application = web.Application(client_max_size=2**30)
        routes = [
            web.get("/v1/models", self._serve),
            web.post("/inference/v1/generate", self._serve),
        ]
        application.add_routes(routes)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        # A copy of the socket, because the site closes its own.
        site = web.SockSite(runner, _listener().dup())
        await site.start()
        await stack.enter_async_context(self.environment.serving())

    async def _serve(self, request: Any) -> Any:
        """Answer a request of either route."""
        token = request.headers.get("Authorization", "")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            raise web.HTTPUnauthorized
        if request.method == "GET":
            return web.json_response({"data": [{"id": MODEL}]})
        body = await request.json()
        conversation = self.conversations[request.headers["X-Session-ID"]]
        max_tokens = body["sampling_params"].get("max_tokens")
        choice = await conversation.answer(body["token_ids"], max_tokens)
        return web.json_response({"choices": [choice]})
