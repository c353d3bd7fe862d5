"""Moves: a run that trains changes its placement between two steps, because somebody asks for it or
because another placement is predicted to be faster.

Owns how a move is asked for (with a file in the run folder, or a call), which changes are possible,
and the start of the new processes, which happens in a thread while the old pools work.
`rolepool.trainer.loop` changes over. Also owns `placement.strategy=auto` and `placement.rebalance`:
a run without a profile starts in the standard placement; its first steps are the calibration, and
then it moves to the placement that is predicted to be the best.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rolepool.config import Config, LoadedConfig, load_config
from rolepool.config.fitting import num_cores
from rolepool.errors import ConfigError, PlacementError, RolepoolError, explained, logger, one_line
from rolepool.files import write_atomically
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import estimate_memory
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.planner.layouts import places
from rolepool.planner.predict import TENSOR_PARALLEL, Prediction, Predictor
from rolepool.planner.profile import NUM_WARM_STEPS, Profile, Recording
from rolepool.planner.search import search
from rolepool.reading import read_small
from rolepool.report.predicted import identity_of, read_recordings, recordings_of, without_placement
from rolepool.report.run import open_run, read_run
from rolepool.report.run_state import state_of
from rolepool.trainer.paper import schedule_of
from rolepool.units import show_bytes

if TYPE_CHECKING:
    from rolepool.cluster import Prepared
    from rolepool.trainer.loop import Trainer

MOVABLE = ("placement.", "trainer.nnodes=", "trainer.n_gpus_per_node=", f"{TENSOR_PARALLEL}=")
"""How the settings begin that a move can change."""
POLL_S = 0.5
PROGRESS_S = 5.0
"""How often whoever asked for a move gets a line."""
NUM_CALIBRATION_STEPS = NUM_WARM_STEPS + 2
NUM_STEPS_BETWEEN = 20
"""Steps between two checks of `placement.rebalance`."""
MAX_TRIES = 3
FIRST_MOVE_S = 10.0
"""How long a move is assumed to take before the first one was measured."""
LAST_BYTES = 8_000_000
"""How much of its spans a run reads to predict other placements."""


class Request(BaseModel):
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
    loaded = load_config([without_placement(config, words)], words)
    return build_plan(loaded.config), loaded


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError if a move cannot change these settings."""
    others = [word for word in words if not word.startswith(MOVABLE)]
    if others or not words:
        can = f"a move changes placement.*, trainer.nnodes, trainer.n_gpus_per_node and {TENSOR_PARALLEL}"
        fix = "give key=value words with these keys; for other keys, stop the run and resume it with them"
        raise ConfigError(f"{others[0] if others else 'move'}: {can}; {fix}")


def is_known(loaded: LoadedConfig, words: Sequence[str]) -> bool:
    """Whether the plan of a move can be made without importing what only the run folder names."""
    sets_strategy = any(word.startswith("placement.strategy=") for word in words)
    return not loaded.unknown_names and (
        sets_strategy or ":" not in loaded.config.placement.strategy
    )


def check_move(
    config: Config, plan: Plan, gpu_memory_bytes: int | None, before: Plan | None = None
) -> None:
    """Raise PlacementError if the work cannot be divided like this, or does not fit in memory.
    `before` is the present plan of a run that moves."""
    problems = find_problems(config, plan)
    if before is not None and (plan.mps or before.mps):
        problems.append(
            "placement.mps=true: a run with MPS cannot move; stop it, and resume it with the new placement"
        )
    for name, memory in estimate_memory(config, plan, gpu_memory_bytes).pools.items():
        if memory.excess:
            too_much = f"{name} needs about {show_bytes(memory.excess)} more than a GPU has"
            problems.append(f"{too_much}; `rolepool plan` shows what would help")
    PlacementError.raise_if_any(problems)


def changed_pools(config: Config, plan: Plan, new_config: Config, new_plan: Plan) -> list[str]:
    """The pools of the new plan that need new processes. Pools with the same GPUs, roles and groups
    are kept."""
    if config.at(TENSOR_PARALLEL) != new_config.at(TENSOR_PARALLEL):
        return list(new_plan.pools)
    return [name for name, pool in new_plan.pools.items() if plan.pools.get(name) != pool]


@dataclass
class Move:
    """A change to another placement, whose processes start while the run goes on."""

    loaded: LoadedConfig
    plan: Plan
    starting: "Future[Prepared]"
    has_request: bool = False
    """Whether a file asks for it. If the file is gone, nobody wants it any more."""

    def close(self) -> None:
        """End processes that were started in vain."""
        if self.starting.exception() is None:
            self.starting.result().cleanup.close()


def take_request(run_folder: Path) -> Request | None:
    """A request that was not answered yet."""
    with suppress(OSError, ValueError):
        request = Request.model_validate_json(read_small(request_file(run_folder)))
        return request if request.answer is None else None
    return None


def show_progress(run_folder: Path, state: str) -> None:
    """Tell whoever asked what the run does about it."""
    _change_request(run_folder, {"state": state})


def answer_request(run_folder: Path, answer: str, *, is_refused: bool = False) -> None:
    _change_request(run_folder, {"answer": answer, "is_refused": is_refused})


def _change_request(run_folder: Path, fields: dict[str, Any]) -> None:
    with suppress(OSError):  # the run itself reports a full disk
        if (request := take_request(run_folder)) is not None:
            write_atomically(
                request_file(run_folder), [request.model_copy(update=fields).model_dump_json()]
            )


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
        raise ConfigError(
            f"run {run_folder}: does not train now (its state is: {state}); set the keys when you resume it"
        )
    if take_request(run_folder) is not None:
        raise ConfigError(
            f"{file}: the run was asked already and has not answered; wait, or remove this file"
        )
    write_atomically(file, [Request(words=list(words)).model_dump_json()])
    try:
        start_s = time.monotonic()
        last_state, next_line_s = "", 0.0
        while (waited_s := time.monotonic() - start_s) < timeout_s:
            with explained(f"{file}: cannot be read", "ask again", ValueError):
                request = Request.model_validate_json(read_small(file))
            if request.is_refused:
                raise ConfigError(f"move: {request.answer}")
            if request.answer is not None:
                return request.answer
            if request.state != last_state or waited_s > next_line_s:
                on_progress(f"{waited_s:3.0f} s: {request.state}")
                last_state, next_line_s = request.state, waited_s + PROGRESS_S
            time.sleep(POLL_S)
    finally:
        file.unlink(missing_ok=True)
    raise ConfigError(
        f"run {run_folder}: has not moved within --timeout {timeout_s:g} s, and is not asked any more"
    )


# Choosing the placement


def resolve(loaded: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """The config that a run starts with, and a notice if its placement is chosen by prediction."""
    config = loaded.config
    if not config.placement.chooses:
        return loaded, []
    folder = config.placement.profile or newest_profile(config)
    if folder is None:
        steps = f"steps 1 to {NUM_CALIBRATION_STEPS} run in one pool and are the calibration"
        return loaded, [
            f"placement.strategy=auto: there is no profile; {steps}, then the run moves if that is faster"
        ]
    best = _search(read_recordings([folder], None), config, build_plan(config).gpus_per_node)[0]
    _, chosen = moved(config, best.name.split())
    return replace(loaded, config=chosen.config), [
        f"placement.strategy=auto: {in_words(best)} (from {folder})"
    ]


def newest_profile(config: Config) -> Path | None:
    """The newest run folder beside that of the config with the same models and device, if there is
    one."""
    files = Path(config.trainer.default_local_dir).parent.glob("*/spans.jsonl")
    for file in sorted(files, key=lambda file: -file.stat().st_mtime):
        with suppress(
            RolepoolError, ValueError
        ):  # another program's folder, or one without a completed step
            if identity_of(Config.model_validate(open_run(file.parent).config)) == identity_of(
                config
            ):
                Profile(recordings_of(read_run(file.parent, LAST_BYTES)))
                return file.parent
    return None


def in_words(best: Prediction) -> str:
    return f"chose {best.name}, predicted to take {best.step_s:.3g} s per step ({best.low_s:.3g} to {best.high_s:.3g})"


def _search(
    recordings: Sequence[Recording], config: Config, inventory: Sequence[int]
) -> list[Prediction]:
    predictor = Predictor(Profile(recordings), schedule_of, detect_gpu_memory(), num_cores())
    return search(predictor, config, inventory)


class Rebalancer:
    """Looks for a better placement while a run trains. The search runs in a thread beside the
    steps."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._keys = trainer, trainer.config.placement
        self._num_tries = MAX_TRIES if self._keys.chooses else 0
        """How many placements a calibration may still try."""
        self._thread = ThreadPoolExecutor(1)
        self._search: Future[tuple[Prediction, float] | None] | None = None
        """Finds the placement to move to, and the step time before the move."""
        self._expected: tuple[Prediction, float] | None = None
        """The same after the run was asked to move."""
        self._last, self._move_s = trainer.start_step, FIRST_MOVE_S
        """The step of the last search or move, and how long a move takes."""

    def after_step(self, number: int) -> None:
        """Begin a search if one is due, and ask for a move if one has found a better placement."""
        num_steps = NUM_CALIBRATION_STEPS if self._num_tries else NUM_STEPS_BETWEEN
        if self._search is None:
            if number >= self._last + num_steps and (self._may_move or self._expected is not None):
                self._search = self._thread.submit(self._look, number)
        elif self._search.done():
            ended, self._search = self._search, None
            self._last = number
            try:
                if (found := ended.result()) is not None:
                    self._ask(*found)
            except Exception as error:  # no prediction may stop training
                self._trainer.observer.on_notice(
                    f"placement: the run does not move: {one_line(error)}"
                )

    def has_moved(self, number: int, seconds: float) -> None:
        """The run has moved before this step, and stood still for so long."""
        self._last, self._move_s = number, seconds

    @property
    def _may_move(self) -> bool:
        return self._num_tries > 0 or self._keys.rebalance

    def _look(self, number: int) -> tuple[Prediction, float] | None:
        """The placement to move to, and the step time now; None if the run stays where it is."""
        trainer = self._trainer
        recordings = recordings_of(read_run(trainer.folder.path, LAST_BYTES))
        found, now_s = (
            _search(recordings, trainer.config, trainer.plan.gpus_per_node),
            recordings[-1].step_s,
        )
        if self._expected is not None:
            (last, before_s), self._expected = self._expected, None
            text = f"{before_s:.3g} s per step before the move, {last.step_s:.3g} s predicted, {now_s:.3g} s measured"
            trainer.observer.on_notice(f"placement: {text}")
        # A calibration also tries placements that may be faster: after each one, less is unsure.
        hoped_s = [one.low_s if self._num_tries > 1 else one.step_s for one in found]
        best = found[hoped_s.index(min(hoped_s))]
        gain_s, num_left = now_s - min(hoped_s), trainer.num_steps - number
        least_s = 0.0 if self._num_tries else self._keys.rebalance_gain * now_s
        is_other = self._may_move and places(best.plan) != places(trainer.plan)
        if is_other and gain_s > least_s and gain_s * num_left > self._move_s:
            self._num_tries = max(0, self._num_tries - 1)
            return best, now_s
        if self._num_tries:
            self._num_tries = 0
            trainer.observer.on_notice(
                f"placement.strategy=auto: stays with {trainer.plan.in_words}"
            )
        return None

    def _ask(self, best: Prediction, before_s: float) -> None:
        self._trainer.move(*moved(self._trainer.config, best.name.split()))
        self._expected = best, before_s
        self._trainer.observer.on_notice(
            f"placement: {in_words(best)}, instead of {before_s:.3g} s now"
        )
