"""Lanes: processes that work on a list of jobs side by side, each with a Ray of its own.

Owns starting, feeding and ending these processes. A job that fails, hangs or kills its lane does not
harm the others: its lane is replaced, and every job gets an outcome, also if the time is over.
Several lanes can share one GPU: a Ray then counts more GPUs than there are, and all of them are the
same one.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray

from rolepool.config.fitting import gpu_memories

NUM_GPUS = 4
"""What the Ray of a lane counts, if `share_one_gpu` was called."""
NUM_CPUS = 8
"""Ray starts as many idle processes at first, and no plan has more than four."""
STORE_BYTES = 256 * 2**20
GPUS_TIMEOUT_S = 60.0
SECONDS_BETWEEN_STARTS = 1.0
POLL_S = 0.5
MARK = "===== "
"""Begins the line in a lane's log with which a job begins."""
LOG_CHARACTERS = 6000
ONE_GPU = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Lets several ranks of an NCCL from 2.30 on use one GPU. An older torch needs LD_PRELOAD of such
an NCCL."""


class Job(NamedTuple):
    """Something to do: `work(argument)` in a lane."""

    name: str
    argument: Any


@dataclass
class Outcome:
    """How a job ended: its result, or what went wrong."""

    name: str
    result: Any = None
    problem: str | None = None
    seconds: float = 0.0
    log: str = ""
    """The end of what a job printed that did not end well."""


def share_one_gpu() -> None:
    """Let all processes that start from now on take the first GPU, if the machine has fewer than a
    lane needs."""
    if len(gpu_memories()) < NUM_GPUS:
        for name, value in ONE_GPU.items():
            os.environ.setdefault(name, value)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    # Drivers that join the Ray of a lane need no token then.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def start_ray(device: str) -> None:
    """A Ray of this process alone."""
    options: dict[str, Any] = {"num_gpus": NUM_GPUS} if device == "cuda" else {}
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        logging_level="ERROR",
        log_to_driver=False,
        **options,
    )


def await_free_gpus() -> None:
    """Wait until all GPUs that the Ray of this process counts are free. Just after a run some may
    not be, and the next plan would not get the ones with the lowest numbers."""
    deadline = time.monotonic() + GPUS_TIMEOUT_S
    num_gpus = ray.cluster_resources().get("GPU", 0)
    while ray.available_resources().get("GPU", 0) < num_gpus:
        if time.monotonic() > deadline:
            free = ray.available_resources().get("GPU", 0)
            raise TimeoutError(
                f"{free:g} of {num_gpus:g} GPUs are free after {GPUS_TIMEOUT_S:.0f} s"
            )
        time.sleep(POLL_S)


class Lane:
    """A process that runs one job after another."""

    def __init__(self, number: int, work: Callable[[Any], Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(other, work, str(log)))
        self.process.start()
        other.close()
        self.log = log
        self.number = number
        self.job: Job | None = None
        self.since_s = 0.0

    @property
    def end_of_log(self) -> str:
        """The end of what the present job has printed so far."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text.rpartition(MARK)[2][-LOG_CHARACTERS:]

    def begin(self, job: Job) -> None:
        self.job = job
        self.since_s = time.monotonic()
        self.connection.send(job)

    def kill(self) -> None:
        """End the process and all that it has started, such as its Ray."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
            for member in family:
                with suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(family, timeout=10)


def _serve(connection: Connection, work: Callable[[Any], Any], log: str) -> None:
    """The life of a lane's process. What it prints goes to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            break
        print(f"{MARK}{job.name}", flush=True)
        try:
            connection.send((work(job.argument), None))
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            connection.send((None, f"{type(error).__name__}: {error}"))
    ray.shutdown()


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Any], Any],
    *,
    num_lanes: int,
    folder: Path,
    limit_s: float,
    job_limit_s: float,
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Run all jobs, as many at a time as there are lanes, the first ones first.

    `work` must be a function of a module. `on_outcome` gets the outcome of each job when it ends.
    After `limit_s` seconds all jobs that have not ended get an outcome that says so.
    """
    deadline = time.monotonic() + limit_s
    waiting = list(jobs)
    lanes: list[Lane] = []
    num_started = 0
    try:
        while (waiting or any(lane.job for lane in lanes)) and time.monotonic() < deadline:
            if waiting and len(lanes) < min(num_lanes, len(jobs)):
                if num_started:
                    time.sleep(SECONDS_BETWEEN_STARTS)
                lanes.append(Lane(num_started, work, folder / f"lane-{num_started}.log"))
                num_started += 1
            for lane in lanes:
                if lane.job is None and waiting:
                    lane.begin(waiting.pop(0))
            busy = [lane.connection for lane in lanes if lane.job]
            ready = multiprocessing.connection.wait(busy, timeout=POLL_S) if busy else []
            for lane in list(lanes):
                outcome = _outcome_of(lane, lane.connection in ready, job_limit_s)
                if outcome is None:
                    continue
                lane.job = None
                if not lane.process.is_alive() or outcome.problem is not None:
                    # What a failed job has left must not harm the next one.
                    lane.kill()
                    lanes.remove(lane)
                on_outcome(outcome)
    finally:
        for lane in lanes:
            if lane.job is not None:
                seconds = time.monotonic() - lane.since_s
                problem = "still running when the time was over"
                on_outcome(Outcome(lane.job.name, None, problem, seconds, lane.end_of_log))
            lane.kill()
        for job in waiting:
            on_outcome(Outcome(job.name, None, "not run, because the time was over"))


def _outcome_of(lane: Lane, is_ready: bool, job_limit_s: float) -> Outcome | None:
    """The outcome of a lane's job if it has ended or takes too long, which ends the lane."""
    if lane.job is None:
        return None
    seconds = time.monotonic() - lane.since_s
    if is_ready:
        try:
            result, problem = lane.connection.recv()
        except (EOFError, OSError):
            result, problem = None, f"its process died: exit code {lane.process.exitcode}"
        log = "" if problem is None else lane.end_of_log
        return Outcome(lane.job.name, result, problem, seconds, log)
    if seconds > job_limit_s:
        lane.kill()
        problem = f"still running after {job_limit_s:.0f} s"
        return Outcome(lane.job.name, None, problem, seconds, lane.end_of_log)
    return None
