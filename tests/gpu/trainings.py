"""Trainings that tests look at: they run in the background, side by side, while other tests run.

Owns which trainings share a process and its Ray, the time limits, and the end of all processes.
What a process does is in `training_process.py`. Does not know what tests compare.

A process trains one after another, because starting Python and Ray takes longer than a training of
a few steps. Trainings that compile have processes of their own, because all others run with
TORCH_COMPILE_DISABLE=1. So have trainings of several ranks: their Ray counts more GPUs than there
are.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from rolepool.cluster.titles import PREFIX
from rolepool.data.demo import make_demo
from rolepool.report.run import ReadRun, read_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICE = os.environ.get("ROLEPOOL_GPU_TESTS_ON", "cuda")
"""`cpu` runs the trainings on CPU slots, which shows whether the tests themselves are right."""
MOST_RANKS = 4
LIMIT_S = 150.0
"""The time for one training. It includes the start of Python and Ray, if it is a process's first."""
END_TIMEOUT_S = 20.0
POLL_S = 0.2
LOG_LINES = 60
STACKS_S = 1.0
"""The time in which a process writes its stacks."""
STACKS_BYTES = 5000
NUM_LANES = 3
"""Processes for the trainings of one rank."""
NUM_LANES_OF_SEVERAL_RANKS = 2
"""Fewer, because a rank that waits in NCCL uses the GPU when it is its turn, so every collective
waits for the turns of all ranks of all trainings."""

# Several ranks on one GPU

FIRST_NCCL = 23000
"""NCCL 2.30.0, in which several ranks may use one GPU."""
NCCL_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
ON_ONE_GPU = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # Ray would hide the GPU from rank 1
    "NCCL_NVLS_ENABLE": "0",  # multicast needs several GPUs
    "NCCL_SOCKET_IFNAME": "lo",
}


def loaded_nccl() -> int | None:
    """The version of the NCCL that this process has loaded, such as 23102; None without one.

    `torch.cuda.nccl.version()` names the version that torch was built with, also if another one was
    preloaded.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    version = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value


def has_enough_gpus() -> bool:
    return torch.cuda.device_count() >= MOST_RANKS


def why_not_several_ranks() -> str | None:
    """Why trainings of several ranks cannot run here; None if they can."""
    if DEVICE == "cpu" or has_enough_gpus():
        return None
    version = loaded_nccl()
    if version is None or version < FIRST_NCCL:
        return (
            f"several ranks on one GPU need NCCL 2.30 or newer, and {version} is loaded; "
            "name one with NCCL_LIBRARY=path/to/libnccl.so.2 bash scripts/test_gpu.sh"
        )
    if os.environ.get(NCCL_SWITCH) != "1":
        return f"several ranks on one GPU need {NCCL_SWITCH}=1"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return "Ray counts at most the GPUs that CUDA_VISIBLE_DEVICES names; unset it"
    return None


# What is trained


@dataclass(frozen=True)
class Training:
    """A training of the demo, and what happens to it."""

    keys: str
    """Settings, separated by spaces. Paths of the demo and of the run folder are added."""
    recipe: str | None = None
    """A file of `recipes` below these settings."""
    ranks: int = 1
    """Number of GPUs that its plan uses."""
    compiles: bool = False
    """Whether models are compiled and decode steps are captured, as in training by users."""
    replays: str | None = None
    """It trains on the responses that this other training has sampled. Its own are kept, too."""
    kills: str | None = None
    """A case of benchmarks/chaos.py."""
    moves: tuple[str, ...] = ()
    """Placements to which it moves, as in benchmarks/moves.py."""

    @property
    def environment(self) -> dict[str, str]:
        variables = {} if self.compiles else {"TORCH_COMPILE_DISABLE": "1"}
        if self.ranks > 1 and not has_enough_gpus():
            variables |= ON_ONE_GPU
        return variables

    @property
    def num_gpus(self) -> int:
        """The GPUs that its Ray counts."""
        return 1 if self.ranks == 1 else MOST_RANKS


@dataclass
class Outcome:
    """What a training left behind."""

    name: str
    folder: Path
    log: Path
    error: str | None
    """None if it reached its last step."""
    start_s: float
    seconds: float
    more: dict[str, Any]
    """What only some trainings have, such as the seconds without a step after a kill."""

    @cached_property
    def run(self) -> ReadRun:
        return read_run(self.folder / "run")

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """The rows of the steps, by number."""
        return {step: row for step, row in self.run.metrics.items() if "actor/updates" in row}

    def rollouts(self, step: int, kind: str = "used") -> Any:
        """The batch of responses of a step: those that were `used`, or its `own`."""
        return torch.load(self.folder / kind / f"{step}.pt", weights_only=False)

    def failure(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self.name}: {self.error}", f"the end of {self.log}:", *lines])


# Processes


class Trainings:
    """Starts the processes of all these trainings. They run until `stop`, or until they are done."""

    def __init__(self, wanted: Mapping[str, Training], folder: Path) -> None:
        self._folder = folder
        self._demo = make_demo(folder / "demo") if wanted else None
        self._token_file = folder / "ray_token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(secrets.token_hex(32))
        self._start_s = time.monotonic()
        self._done = {name: threading.Event() for name in wanted}
        self._outcomes: dict[str, Outcome] = {}
        # Of all processes, because those that replay a training are in other processes.
        self._replayed = sorted({one.replays for one in wanted.values() if one.replays})
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False
        for number, lane in enumerate(lanes_of(wanted)):
            arguments = (f"process_{number}", {name: wanted[name] for name in lane})
            threading.Thread(target=self._run_lane, args=arguments, daemon=True).start()

    def outcome(self, name: str) -> Outcome:
        """Waits until the training has ended."""
        limit_s = LIMIT_S * (len(self._done) + 1) - (time.monotonic() - self._start_s)
        if not self._done[name].wait(limit_s):
            raise TimeoutError(f"the training {name!r} has not ended within {limit_s:.0f} s")
        return self._outcomes[name]

    def finished(self) -> list[Outcome]:
        """The trainings that have ended, in the order of their start."""
        return sorted(self._outcomes.values(), key=lambda outcome: outcome.start_s)

    def stop(self) -> None:
        """End all processes."""
        self._is_stopped = True
        for process in list(self._running):
            end_tree(process)

    def _run_lane(self, title: str, lane: Mapping[str, Training]) -> None:
        """Train in one process; in another one after a failure of the process itself."""
        waiting = list(lane)
        attempt = 0
        log = self._folder / f"{title}.log"
        try:
            while waiting and not self._is_stopped:
                attempt += 1
                log = self._folder / f"{title}_{attempt}.log"
                self._run_process(log, {name: lane[name] for name in waiting})
                waiting = [name for name in waiting if name not in self._outcomes]
        except Exception as error:
            log.touch()
            for name in waiting:
                result = write_failure(self._folder / name, f"was not started: {error!r}")
                self._record(name, log, result, time.monotonic())
            raise

    def _run_process(self, log: Path, wanted: Mapping[str, Training]) -> None:
        """Train until all have ended, or until one fails to end or takes the process with it."""
        process = self._start_process(log, wanted)
        self._running.add(process)
        try:
            for name in wanted:
                if self._is_stopped:
                    return
                self._await_result(name, process, log)
                if self._outcomes[name].more.get("process_ended"):
                    return
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
        finally:
            end_tree(process)
            self._running.discard(process)

    def _start_process(self, log: Path, wanted: Mapping[str, Training]) -> subprocess.Popen[bytes]:
        assert self._demo is not None
        first = next(iter(wanted.values()))
        order = {
            "device": DEVICE,
            "num_gpus": first.num_gpus if DEVICE == "cuda" else 0,
            "folder": str(self._folder),
            "demo": str(self._demo.folder),
            "trainings": {name: asdict(training) for name, training in wanted.items()},
            "replayed": self._replayed,
            "limit_s": LIMIT_S,
        }
        order_file = log.with_suffix(".json")
        order_file.write_text(json.dumps(order, indent=1))
        paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **(first.environment if DEVICE == "cuda" else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            # Of several Rays that start at the same time, each would make the user's token.
            "RAY_AUTH_TOKEN_PATH": str(self._token_file),
        }
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, str(HERE / "training_process.py"), str(order_file)],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _await_result(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        start_s = time.monotonic()
        folder = self._folder / name
        result_file = folder / "result.json"
        result: dict[str, Any] | None = None
        while result is None:
            has_ended = process.poll() is not None  # asked first: it may write before it ends
            if result_file.exists():
                result = json.loads(result_file.read_text())
            elif has_ended:
                problem = f"its process ended with exit code {process.returncode}"
                result = write_failure(folder, problem)
            elif time.monotonic() - start_s > LIMIT_S:
                write_stacks(process, log)
                result = write_failure(folder, f"it did not end within {LIMIT_S:.0f} s")
            else:
                time.sleep(POLL_S)
        self._record(name, log, result, start_s)

    def _record(self, name: str, log: Path, result: dict[str, Any], start_s: float) -> None:
        if name in self._outcomes:
            return
        self._outcomes[name] = Outcome(
            name=name,
            folder=self._folder / name,
            log=log,
            error=result.pop("error"),
            start_s=start_s - self._start_s,
            seconds=time.monotonic() - start_s,
            more=result,
        )
        self._done[name].set()


def lanes_of(wanted: Mapping[str, Training]) -> list[list[str]]:
    """Which trainings one process makes, in order. One that others replay comes first.

    Each training that compiles has a process of its own, because it takes longest.
    """
    if DEVICE == "cpu":  # a few cores: one after another
        return [in_order(wanted, wanted)] if wanted else []
    kinds: dict[tuple[int, bool], list[str]] = {}
    for name, training in wanted.items():
        kinds.setdefault((training.num_gpus, training.compiles), []).append(name)
    lanes: list[list[str]] = []
    for (num_gpus, compiles), names in kinds.items():
        most = NUM_LANES if num_gpus == 1 else NUM_LANES_OF_SEVERAL_RANKS
        num_lanes = len(names) if compiles else min(most, len(names))
        for number in range(num_lanes):
            lanes.append(in_order(wanted, names)[number::num_lanes])
    return lanes


def in_order(wanted: Mapping[str, Training], names: Iterable[str]) -> list[str]:
    replayed = {training.replays for training in wanted.values()}
    return sorted(names, key=lambda name: (name not in replayed, -wanted[name].ranks))


def write_failure(folder: Path, problem: str) -> dict[str, Any]:
    """The result of a training that could not write one. Trainings that replay it read it, too."""
    result = {"error": problem, "process_ended": True}
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    return result


def write_stacks(process: subprocess.Popen[bytes], log: Path) -> None:
    """Add the Python stacks of a process and of its worker processes to its log.

    A worker process writes them to a file without a name (`cluster/process.py`).
    """
    with suppress(psutil.Error, OSError):
        own = psutil.Process(process.pid)
        workers = [one for one in own.children(recursive=True) if is_worker(one)]
        for one in (own, *workers):
            one.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        with log.open("a") as output:
            for worker in workers:
                output.write(f"--- {' '.join(worker.cmdline())}\n{stacks_of(worker)}\n")


def is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.startswith(PREFIX) for word in process.cmdline())
    return False


def stacks_of(process: psutil.Process) -> str:
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).endswith("(deleted)"):
                text = link.read_bytes()[-STACKS_BYTES:].decode(errors="replace")
                if "most recent call first" in text:
                    return text
    return "no stacks"


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started, such as the parts of Ray."""
    tree: Sequence[psutil.Process] = []
    with suppress(psutil.Error):
        own = psutil.Process(process.pid)
        tree = [*own.children(recursive=True), own]
    for one in tree:
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(tree, timeout=END_TIMEOUT_S)
    process.poll()
