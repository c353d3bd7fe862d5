"""The tools of an environment: which methods of the user's class they are, and calling them in
processes of their own.

Owns the processes, with their limits of time and memory, and what the caller gets if a tool fails.
A process runs any tool of any conversation, because the state of an environment travels with each
call. So a process that is stopped takes nothing with it, and what a tool has changed before it
failed is undone. Does not know tokens.
"""

import asyncio
import inspect
import pickle
import resource
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema

from rolepool.config import Config
from rolepool.config.functions import import_environment
from rolepool.config.run_keys import EnvironmentConfig
from rolepool.data.child_process import ChildProcess
from rolepool.errors import explained, one_line

RESET = "reset"
GET_REWARD = "get_reward"


class Outcome(NamedTuple):
    """What a call returned, or why it failed."""

    value: Any = None
    error: str | None = None


def tools_of(environment: Any) -> list[str]:
    """The names of the tools of a class: its other public methods. A function has none."""
    if not inspect.isclass(environment):
        return []
    names: list[str] = []
    for name, _ in inspect.getmembers(environment, inspect.isfunction):
        if not name.startswith("_") and name not in (RESET, GET_REWARD):
            names.append(name)
    return names


TemplateOptions = Mapping[str, Any]
"""What the chat template of a tokenizer gets besides the messages."""


def template_options(config: Config) -> TemplateOptions:
    """The options of the chat template for prompts: those of the config, and the schemas of the
    environment's tools."""
    environment = import_environment(config.environment.path, config.environment.name)
    options = dict(config.data.apply_chat_template_kwargs)
    schemas = []
    for name in tools_of(environment):
        fix = "write a docstring with a line for each argument under Args:, and type hints"
        tool = f"environment.name={config.environment.name}: the tool {name}"
        with explained(f"{tool} cannot be described", fix, Exception):  # it may raise anything
            schemas.append(get_json_schema(getattr(environment, name)))
    if schemas:
        options["tools"] = schemas
    return options


def call_method(
    environment: type,
    state: bytes | None,
    name: str,
    arguments: dict[str, Any],
) -> tuple[Any, bytes]:
    """Call a method of an instance with this state, or of a new one. Returns the result and the new
    state."""
    if state is None:
        instance = environment()
    else:
        instance = pickle.loads(state)  # noqa: S301  from our own process
    method = getattr(instance, name)
    result = method(**arguments)
    try:
        return result, pickle.dumps(instance)
    except Exception as error:
        fix = "keep connections and files outside of the instance"
        raise TypeError(f"the environment cannot be pickled ({one_line(error)}); {fix}") from error


class ToolProcess(ChildProcess):
    """A child that runs one function at a time. A child that a function holds up, or that died, is
    replaced."""

    def __init__(self, keys: EnvironmentConfig) -> None:
        self._timeout_s = keys.timeout_s
        self._memory_bytes = int(keys.memory_gb * 2**30)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        if self._pid is None:
            self._start_child()
        try:
            self._channel.send((function, arguments))
            await asyncio.wait_for(self._has_answered(), self._timeout_s)
            return Outcome(*self._channel.recv())
        except TimeoutError:
            self._end_child()
            return Outcome(error=f"no result after environment.timeout_s={self._timeout_s:g}")
        except (EOFError, OSError):
            return Outcome(error=f"the process ended ({self._end_child()})")
        except BaseException:  # cancelled: the next call must not read this answer
            self._end_child()
            raise

    async def _has_answered(self) -> None:
        loop = asyncio.get_running_loop()
        fd = self._channel.fileno()
        came = asyncio.Event()
        loop.add_reader(fd, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(fd)

    def _serve(self, channel: Connection) -> None:
        """Run what arrives, until the parent ends."""
        statm = Path("/proc/self/statm").read_text().split()
        num_pages = int(statm[0])
        used_bytes = num_pages * resource.getpagesize()
        limit = used_bytes + self._memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while True:
            function, arguments = channel.recv()
            try:
                result = function(*arguments)
                channel.send(Outcome(result))
            except BaseException as error:  # also sys.exit(), and a result that cannot be sent
                channel.send(Outcome(error=f"{type(error).__name__}: {one_line(error)}"))
