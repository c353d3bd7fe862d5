"""Moves: a run that trains changes its placement between two steps.

Owns how a move is asked for (with a file in the run folder, or a call), which changes are possible, and the start of
the new processes, which happens in a thread while the old pools work. `rolepool.trainer.loop` changes over.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from rolepool.config import Config, LoadedConfig, load_config
from rolepool.errors import ConfigError, PlacementError, RolepoolError, explained, one_line
from rolepool.files import write_atomically
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import GIB, estimate_memory
from rolepool.placement.roles import ROLE_SPECS
from rolepool.report.predicted import without_placement

if TYPE_CHECKING:
    from rolepool.cluster import Cluster, Prepared

TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MOVABLE = ("placement.", "trainer.nnodes=", "trainer.n_gpus_per_node=", f"{TENSOR_PARALLEL}=")
"""How the settings begin that a move can change."""
POLL_S = 0.5
SILENT_S = 30.0
"""A run that trains writes its state every second."""


class Request(BaseModel):
    """`move.json`: what `rolepool move` asks for, and the answer of the run."""

    words: list[str]
    answer: str | None = None
    is_refused: bool = False


def request_file(run_folder: Path) -> Path:
    return run_folder / "move.json"


def moved(config: Config, words: Sequence[str]) -> tuple[LoadedConfig, Plan]:
    """The config with these settings, and its plan. Raises an error if a run cannot change to them while it trains."""
    others = [word for word in words if not word.startswith(MOVABLE)]
    if others or not words:
        can = f"a move changes placement.*, trainer.nnodes, trainer.n_gpus_per_node and {TENSOR_PARALLEL}"
        fix = "give key=value words with these keys; for other keys, stop the run and resume it with them"
        raise ConfigError(f"{others[0] if others else 'move'}: {can}; {fix}")
    loaded = load_config([without_placement(config, words)], words)
    return loaded, build_plan(loaded.config)


def check_move(config: Config, plan: Plan, gpu_memory_bytes: int | None, before: Plan | None = None) -> None:
    """Raise PlacementError if the work cannot be divided like this, or does not fit in memory. `before` is the present
    plan of a run that moves."""
    problems = find_problems(config, plan)
    if before is not None and (plan.mps or before.mps):
        problems.append("placement.mps=true: a run with MPS cannot move; stop it, and resume it with the new placement")
    for name, memory in estimate_memory(config, plan, gpu_memory_bytes).pools.items():
        if memory.excess:
            too_much = f"{name} needs about {memory.excess / GIB:.1f} GiB more than a GPU has"
            problems.append(f"{too_much}; `rolepool plan` shows what would help")
    PlacementError.raise_if_any(problems)


def changed_pools(config: Config, plan: Plan, new_config: Config, new_plan: Plan) -> list[str]:
    """The pools of the new plan that need new processes. Pools with the same GPUs, roles and groups are kept."""
    keys = [spec.tensor_parallel for spec in ROLE_SPECS.values() if spec.tensor_parallel is not None]
    if any(config.at(key) != new_config.at(key) for key in keys):
        return list(new_plan.pools)
    return [name for name, pool in new_plan.pools.items() if plan.pools.get(name) != pool]


class Move(threading.Thread):
    """Starts the processes of another placement while the run goes on. If it fails, `problem` says why."""

    def __init__(self, cluster: "Cluster", loaded: LoadedConfig, plan: Plan, names: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.loaded, self.plan = loaded, plan
        self.prepared: Prepared | None = None
        self.problem = ""
        self.has_request = False
        """Whether a file asks for it. If the file is gone, nobody wants it any more."""
        self._cluster, self._names = cluster, names

    def run(self) -> None:
        try:
            workers = [ROLE_SPECS[role].worker for role in self.plan.roles]
            self.prepared = self._cluster.prepare(self.plan, self._names, workers)
        except RolepoolError as error:
            self.problem = one_line(error)

    def close(self) -> None:
        """End processes that were started in vain."""
        self.join()
        if self.prepared is not None:
            self.prepared.cleanup.close()


def take_request(run_folder: Path) -> Request | None:
    """A request that was not answered yet."""
    with suppress(OSError, ValidationError):
        request = Request.model_validate_json(request_file(run_folder).read_bytes())
        return request if request.answer is None else None
    return None


def answer_request(run_folder: Path, answer: str, *, is_refused: bool = False) -> None:
    with suppress(OSError):  # the run itself reports a full disk
        if (request := take_request(run_folder)) is not None:
            answered = request.model_copy(update={"answer": answer, "is_refused": is_refused})
            write_atomically(request_file(run_folder), [answered.model_dump_json()])


def ask_run(run_folder: Path, words: Sequence[str], timeout_s: float) -> str:
    """Ask the run of a folder to move, and wait for its answer. Raises ConfigError if it refuses or does not answer."""
    file = request_file(run_folder)
    with explained(f"run {run_folder}: does not train now", "set the keys when you resume it"):
        (run_folder / ".lock").read_bytes()
        silent_s = time.time() - (run_folder / "state.json").stat().st_mtime
        if silent_s > SILENT_S:
            raise OSError(f"nothing was written for {silent_s:.0f} s")
    if take_request(run_folder) is not None:
        raise ConfigError(f"{file}: the run was asked already and has not answered; wait, or remove this file")
    write_atomically(file, [Request(words=list(words)).model_dump_json()])
    try:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            request = Request.model_validate_json(file.read_bytes())
            if request.is_refused:
                raise ConfigError(f"move: {request.answer}")
            if request.answer is not None:
                return request.answer
            time.sleep(POLL_S)
    finally:
        file.unlink(missing_ok=True)
    raise ConfigError(f"run {run_folder}: has not moved within --timeout {timeout_s:g} s, and is not asked any more")
