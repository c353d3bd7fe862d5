"""Which processes have died, and why, as Ray tells it."""

from collections.abc import Sequence
from typing import NamedTuple

from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayActorError

from rolepool.cluster.answers import outcomes, reason_of
from rolepool.cluster.launch import Process

PING_TIMEOUT_S = 2.0


class Death(NamedTuple):
    """A process that died."""

    process: Process
    reason: str


def has_died(process: Process) -> bool:
    """Whether Ray has told the driver that the process died. This sends no message."""
    state = process.actor._get_local_state()
    return bool(state == ActorTableData.ActorState.DEAD)


def is_death_of(process: Process, error: object) -> bool:
    """Whether an error of Ray says that this process died."""
    return isinstance(error, RayActorError) and error.actor_id == process.actor_id


def find_deaths(processes: Sequence[Process]) -> list[Death]:
    """Ask these processes whether they live. Returns those that died, and why."""
    # A process that does not answer in time is busy. If it were dead, Ray would answer.
    pings = [process.actor.ping.remote() for process in processes]
    answers = outcomes(pings, PING_TIMEOUT_S)
    deaths: list[Death] = []
    for process, answer in zip(processes, answers, strict=True):
        if isinstance(answer, RayActorError) and is_death_of(process, answer):
            deaths.append(Death(process, reason_of(answer)))
    return deaths


def death_named_by(error: RayActorError, processes: Sequence[Process]) -> list[Death]:
    """The death that an error of Ray is about, if it is that of one of these processes."""
    dead = [process for process in processes if is_death_of(process, error)]
    return [Death(process, reason_of(error)) for process in dead]
