"""Which processes have died, and why, as Ray tells it."""

from collections.abc import Sequence

from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayActorError

from rolepool.cluster.answers import outcomes, reason_of
from rolepool.cluster.launch import Process

PING_TIMEOUT_S = 2.0


def has_died(process: Process) -> bool:
    """Whether Ray has told the driver that the process died. This sends no message."""
    return bool(process.actor._get_local_state() == ActorTableData.ActorState.DEAD)


def is_death_of(process: Process, error: object) -> bool:
    """Whether an error of Ray says that this process died."""
    return isinstance(error, RayActorError) and error.actor_id == process.actor_id


def find_deaths(
    processes: Sequence[Process], cause: BaseException | None = None
) -> list[tuple[Process, str]]:
    """The processes that died, and why: the one that the cause names. If it names none, every
    process gets a ping."""
    deaths: list[tuple[Process, str]] = []
    if isinstance(cause, RayActorError):
        for process in processes:
            if is_death_of(process, cause):
                deaths.append((process, reason_of(cause)))
        return deaths
    # A process that does not answer in time is busy. If it were dead, Ray would answer.
    pings = [process.actor.ping.remote() for process in processes]
    answers = outcomes(pings, PING_TIMEOUT_S)
    for process, answer in zip(processes, answers, strict=True):
        if isinstance(answer, RayActorError) and is_death_of(process, answer):
            deaths.append((process, reason_of(answer)))
    return deaths
