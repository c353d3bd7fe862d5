"""What a process does that does not return: its state and its Python stacks.

A process that still answers tells its stacks itself. The others are examined on their node: a
signal makes them write their stacks to a file. Which calls take too long, and what happens then, is
the business of `rolepool.cluster.watchdog`.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import psutil
import ray
from ray.exceptions import RayError

from rolepool.cluster.answers import outcomes
from rolepool.cluster.launch import Process
from rolepool.cluster.nodes import pinned_to

STOPPED = "is stopped"
SILENT = "does not answer"
RETURNS_LATE = "does not return"
BY_URGENCY = (STOPPED, SILENT, RETURNS_LATE)
"""The states of a process, the worst one first."""
INSIDE_A_COLLECTIVE = re.compile("distributed_c10d|_functional_collectives|rolepool/weights/group")
"""In the stacks of a process that waits for other ranks, of its pool or of another one."""
ANSWER_TIMEOUT_S = 5.0
HANDLER_TIMEOUT_S = 2.0
"""The time in which the signal handler of a process writes its stacks."""
TASK_TIMEOUT_S = 30.0

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Examined(NamedTuple):
    """What a process does."""

    process: Process
    state: str
    stacks: str

    @property
    def waits_for_others(self) -> bool:
        return INSIDE_A_COLLECTIVE.search(self.stacks) is not None


def examine(processes: Sequence[Process]) -> list[Examined]:
    """What each process does, with its stacks if it can tell them or if its signal handler can
    write them."""
    asked = [process.actor.stacks.remote() for process in processes]
    answers = outcomes(asked, timeout_s=ANSWER_TIMEOUT_S)
    examined = []
    for process, answer in zip(processes, answers, strict=True):
        if not isinstance(answer, RayError):
            examined.append(Examined(process, RETURNS_LATE, stacks=answer))
            continue
        state, stacks = _on_node_of(
            process,
            _look_at,
            process.pid,
            process.stack_file,
        )
        examined.append(Examined(process, state, stacks))
    return examined


def kill_process(process: Process) -> None:
    """Kill a process, which may be stopped, on its node."""
    _on_node_of(process, _kill, process.pid)


def _on_node_of(
    process: Process,
    function: Callable[Args, Result],
    *args: Args.args,
    **kwargs: Args.kwargs,
) -> Result:
    """The result of a function that runs on the node of a process."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        return function(*args, **kwargs)
    task: Any = ray.remote(function).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=pinned_to(process.node_id),
    )
    result: Result = ray.get(task.remote(*args, **kwargs), timeout=TASK_TIMEOUT_S)
    return result


def _look_at(pid: int, stack_file: str) -> tuple[str, str]:
    """The state of a process of this node that does not answer, and its stacks, which its signal
    handler writes."""
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    file = Path(stack_file)
    try:
        if psutil.Process(pid).status() in stopped:
            return STOPPED, ""
        # The file has the stacks of earlier signals, too.
        num_before = len(file.read_bytes())
        os.kill(pid, signal.SIGUSR1)
        time.sleep(HANDLER_TIMEOUT_S)
        written = file.read_bytes()[num_before:]
        return SILENT, written.decode(errors="replace")
    except (psutil.NoSuchProcess, OSError) as error:
        return SILENT, f"no stacks: {error}"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
