"""When a call fails: who really died.

Owns reading Ray's errors. A rank whose peer died sees a closed connection; what is reported is the peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from rolepool.cluster.launch import Process

PING_TIMEOUT_S = 2.0

ActorGoneError = (ActorDiedError, ActorUnavailableError)


def cause_of(error: BaseException) -> BaseException:
    """What a worker raised, out of the wrappings that Ray adds each time it is passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def find_deaths(processes: Sequence[Process], cause: BaseException) -> list[tuple[Process, str]]:
    """The processes that are gone, and why: the one that the cause names, or those that do not answer a ping."""
    if isinstance(cause, ActorGoneError):
        return [(process, reason_of(cause)) for process in processes if process.actor_id == cause.actor_id]
    asked = [process.actor.ping.remote() for process in processes]
    ray.wait(asked, num_returns=len(asked), timeout=PING_TIMEOUT_S)
    deaths = []
    for process, answer in zip(processes, asked, strict=True):
        try:
            ray.get(answer, timeout=0)
        except GetTimeoutError:
            continue  # busy, not dead: a process that is gone is answered for by Ray
        except ActorGoneError as error:
            deaths.append((process, reason_of(error)))
        except RayError:
            continue
    return deaths


def reason_of(error: BaseException) -> str:
    """Ray's words on one line, without the paragraph of causes it could think of."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and ":" not in line[:20]]
    text = " ".join(lines) or str(error)
    return text.split("Some common causes include")[0].strip()
