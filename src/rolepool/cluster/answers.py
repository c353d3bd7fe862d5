"""Answers of actors: how to wait for them, and what Ray's errors say.

Every wait has a timeout, and says who did not answer.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rolepool.cluster.connection import raise_if_ray_died
from rolepool.cluster.nodes import live_node_ids
from rolepool.errors import RolepoolError, WorkerError, logger

POLL_S = 0.2
START_TIMEOUT_S = 180.0
"""The time in which a process must start and import what it needs, after its resources are
reserved."""

ActorHandle = Any
"""A handle of an actor. Ray's own type does not know which methods the actor has."""
Answer = ray.ObjectRef[Any]
"""The reference of an actor's answer."""
Result = TypeVar("Result")


class Asked(NamedTuple):
    """Who gives an answer: the process and the pool that errors name."""

    who: str
    pool: str


def await_all(
    asked: Mapping[ray.ObjectRef[Result], Asked], what: str, progress: str | None = None
) -> list[Result]:
    """Wait for the answers of all processes and return them. The first error is raised at once.

    `what` says in errors what the processes do, and `progress` is logged after each answer, with
    the number of answers. If a node is lost, that is an error, too: Ray would wait until the node
    returns.
    """
    waiting = list(asked)
    deadline = time.monotonic() + START_TIMEOUT_S
    nodes_before = live_node_ids()
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
        if ready:
            (answer,) = ready
            (outcome,) = outcomes([answer], timeout_s=0)
            if isinstance(outcome, RayError):
                raise _failure(asked[answer], what, outcome) from None
            if progress is not None:
                num_answers = len(asked) - len(waiting)
                logger.info(progress, num_answers, len(asked))
            continue
        raise_if_ray_died()
        who, pool = asked[waiting[0]]
        if nodes_before - live_node_ids():
            raise WorkerError(f"{who} did not {what}, because its node was lost", is_death=True)
        if time.monotonic() > deadline:
            missing = f"{len(waiting)} of {len(asked)} processes have not answered"
            problem = f"{who} did not {what} within {START_TIMEOUT_S:.0f} s; {missing}"
            raise WorkerError(problem, pool=pool)
    return ray.get(list(asked))


def _failure(asked: Asked, what: str, error: RayError) -> RolepoolError:
    """What `await_all` raises for Ray's error: the error of the worker if it says what to change."""
    cause = cause_of(error)
    if isinstance(cause, RolepoolError):
        return cause
    who, pool = asked
    return WorkerError(
        f"{who} could not {what}: {reason_of(cause)}",
        pool=pool,
        is_death=isinstance(cause, RayActorError),
    )


def outcomes(asked: Collection[ray.ObjectRef[Result]], timeout_s: float) -> list[Result | RayError]:
    """Wait for these answers of actors, and return each of them, or Ray's error if there is none.
    It is a GetTimeoutError if the answer has not arrived in time."""
    if not asked:  # Ray would start if it does not run
        return []
    ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    results: list[Result | RayError] = []
    for answer in asked:
        try:
            results.append(ray.get(answer, timeout=0))
        except RayError as error:
            results.append(error)
    return results


def cause_of(error: BaseException) -> BaseException:
    """The exception of the worker, without the exceptions that Ray wraps around it each time it is
    passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def reason_of(error: BaseException) -> str:
    """Ray's message in one line, without its list of possible causes."""
    lines = []
    for line in str(error).splitlines():
        # Lines such as "class_name: WorkerProcess" describe the actor, and not what happened.
        is_field = ":" in line[:20]
        text = line.strip()
        if text and not is_field:
            lines.append(text)
    message = " ".join(lines) or str(error)
    what_happened, _, _ = message.partition("Some common causes include")
    return what_happened.strip()
