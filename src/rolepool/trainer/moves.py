"""Moves: how somebody asks a run to change its placement while it trains, and which changes are
possible.

Owns the file in the run folder with which a move is asked for, and what it can change.
`rolepool.trainer.mover` starts the processes of a move, and `rolepool.trainer.rebalancer` looks for
a better placement.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rolepool.config import Config, LoadedConfig, load_config
from rolepool.errors import ConfigError, PlacementError, explained, logger
from rolepool.files import write_atomically
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import estimate_memory
from rolepool.planner.predict import TENSOR_PARALLEL
from rolepool.reading import read_small
from rolepool.report.predicted import without_placement
from rolepool.report.run import open_run
from rolepool.report.run_state import state_of
from rolepool.units import show_bytes

MOVABLE = ("placement.", "trainer.nnodes=", "trainer.n_gpus_per_node=", f"{TENSOR_PARALLEL}=")
"""How the settings begin that a move can change."""
POLL_S = 0.5
PROGRESS_S = 5.0
"""How often whoever asked for a move gets a line."""


class MoveRequest(BaseModel):
    """`move.json`: what `rolepool move` asks for, and the answer of the run."""

    words: list[str]
    state: str = "waiting for the end of the current step"
    """What the run does about it."""
    answer: str | None = None
    is_refused: bool = False


def request_file(run_folder: Path) -> Path:
    return run_folder / "move.json"


def moved(config: Config, words: Sequence[str]) -> tuple[Plan, LoadedConfig]:
    """The plan with these settings, and its config. Raises an error if a run cannot change to them
    while it trains."""
    check_words(words)
    other_keys = without_placement(config, words)
    loaded = load_config([other_keys], words)
    return build_plan(loaded.config), loaded


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError if a move cannot change these settings."""
    others = [word for word in words if not word.startswith(MOVABLE)]
    if others or not words:
        what = others[0] if others else "move"
        sizes = "trainer.nnodes, trainer.n_gpus_per_node"
        can = f"a move changes placement.*, {sizes} and {TENSOR_PARALLEL}"
        other_keys = "for other keys, stop the run and resume it with them"
        raise ConfigError(f"{what}: {can}; give key=value words with these keys; {other_keys}")


def is_known(loaded: LoadedConfig, words: Sequence[str]) -> bool:
    """Whether the plan of a move can be made without importing what only the run folder names."""
    if loaded.unknown_names:
        return False
    sets_strategy = any(word.startswith("placement.strategy=") for word in words)
    # A strategy of a user is `module:function`.
    return sets_strategy or ":" not in loaded.config.placement.strategy


def check_move(
    config: Config, plan: Plan, gpu_memory_bytes: int | None, before: Plan | None = None
) -> None:
    """Raise PlacementError if the work cannot be divided like this, or does not fit in memory.
    `before` is the present plan of a run that moves."""
    problems = find_problems(config, plan)
    if before is not None and (plan.mps or before.mps):
        fix = "stop it, and resume it with the new placement"
        problems.append(f"placement.mps=true: a run with MPS cannot move; {fix}")
    estimate = estimate_memory(config, plan, gpu_memory_bytes)
    for name, memory in estimate.pools.items():
        if memory.excess:
            too_much = f"{name} needs about {show_bytes(memory.excess)} more than a GPU has"
            problems.append(f"{too_much}; `rolepool plan` shows what would help")
    PlacementError.raise_if_any(problems)


def changed_pools(
    config: Config,
    plan: Plan,
    new_config: Config,
    new_plan: Plan,
) -> list[str]:
    """The pools of the new plan that need new processes. Pools with the same GPUs, roles and groups
    are kept."""
    if config.at(TENSOR_PARALLEL) != new_config.at(TENSOR_PARALLEL):
        return list(new_plan.pools)
    changed: list[str] = []
    for name, pool in new_plan.pools.items():
        if plan.pools.get(name) != pool:
            changed.append(name)
    return changed


def take_request(run_folder: Path) -> MoveRequest | None:
    """A request that was not answered yet."""
    with suppress(OSError, ValueError):
        request = MoveRequest.model_validate_json(read_small(request_file(run_folder)))
        return request if request.answer is None else None
    return None


def show_progress(run_folder: Path, state: str) -> None:
    """Tell whoever asked what the run does about it."""
    _change_request(run_folder, {"state": state})


def answer_request(run_folder: Path, answer: str, *, is_refused: bool = False) -> None:
    _change_request(run_folder, {"answer": answer, "is_refused": is_refused})


def _change_request(run_folder: Path, fields: dict[str, Any]) -> None:
    with suppress(OSError):  # the run itself reports a full disk
        request = take_request(run_folder)
        if request is not None:
            changed = request.model_copy(update=fields)
            write_atomically(request_file(run_folder), [changed.model_dump_json()])


def ask_run(
    run_folder: Path,
    words: Sequence[str],
    timeout_s: float,
    on_progress: Callable[[str], object] = logger.info,
) -> str:
    """Ask the run of a folder to move, and wait for its answer. Raises ConfigError if it refuses or
    does not answer.

    `on_progress` gets a line when the run does something else, and every few seconds.
    """
    file = request_file(run_folder)
    state = state_of(open_run(run_folder), is_silent=False)
    if state != "running":
        now = f"does not train now (its state is: {state})"
        raise ConfigError(f"run {run_folder}: {now}; set the keys when you resume it")
    if take_request(run_folder) is not None:
        raise ConfigError(
            f"{file}: the run was asked already and has not answered; wait, or remove this file"
        )
    request = MoveRequest(words=list(words))
    write_atomically(file, [request.model_dump_json()])
    try:
        answer = _await_answer(file, timeout_s, on_progress)
    finally:
        file.unlink(missing_ok=True)
    if answer is None:
        limit = f"--timeout {timeout_s:g} s"
        raise ConfigError(
            f"run {run_folder}: has not moved within {limit}, and is not asked any more"
        )
    return answer


def _await_answer(file: Path, timeout_s: float, on_progress: Callable[[str], object]) -> str | None:
    """What the run answers; None if it does not in this time. Raises ConfigError if it refuses."""
    start_s = time.monotonic()
    last_state = ""
    next_line_s = 0.0
    while True:
        waited_s = time.monotonic() - start_s
        if waited_s >= timeout_s:
            return None
        with explained(f"{file}: cannot be read", "ask again", ValueError):
            request = MoveRequest.model_validate_json(read_small(file))
        if request.is_refused:
            raise ConfigError(f"move: {request.answer}")
        if request.answer is not None:
            return request.answer
        if request.state != last_state or waited_s > next_line_s:
            on_progress(f"{waited_s:3.0f} s: {request.state}")
            last_state = request.state
            next_line_s = waited_s + PROGRESS_S
        time.sleep(POLL_S)
