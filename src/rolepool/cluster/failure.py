"""When a call fails: who really died, in one WorkerError.

Owns reading Ray's errors. A rank whose peer died sees a closed connection; what is reported is the peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from rolepool.cluster.launch import Process
from rolepool.errors import WorkerError
from rolepool.protocol.remote import Producer

PING_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Death:
    """A process that is gone, and what Ray says of it."""

    pool: str
    process: Process
    reason: str

    def as_error(self, role: str, method: str) -> WorkerError:
        rank, node, pid = self.process.rank, self.process.address, self.process.pid
        return Producer(self.pool, role, rank, node, pid, method).error(
            f"{self.pool} rank {rank} (node {node}, pid {pid}) died during {role}.{method}: {self.reason}"
        )


def cause_of(error: BaseException) -> BaseException:
    """What a worker raised, out of the wrappings that Ray adds each time it is passed on."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def find_deaths(processes: Iterable[tuple[str, Process]]) -> list[Death]:
    """Ask every process whether it lives; those for whom Ray answers that they do not."""
    asked = [(pool, process, process.actor.ping.remote()) for pool, process in processes]
    ray.wait([ref for _, _, ref in asked], num_returns=len(asked), timeout=PING_TIMEOUT_S)
    deaths = []
    for pool, process, ref in asked:
        try:
            ray.get(ref, timeout=0)
        except GetTimeoutError:
            continue  # busy, not dead: a process that is gone is answered for by Ray
        except (ActorDiedError, ActorUnavailableError) as error:
            deaths.append(Death(pool, process, reason_of(error)))
        except RayError:
            continue
    return deaths


def reason_of(error: BaseException) -> str:
    """Ray's words on one line, without the paragraph of causes it could think of."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and ":" not in line[:20]]
    text = " ".join(lines) or str(error)
    return text.split("Some common causes include")[0].strip()
