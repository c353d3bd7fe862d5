"""The choice of a placement by prediction: before a run starts, and while it trains.

Owns `placement.strategy=auto` and `placement.rebalance`. A run without a profile starts in the
standard placement; its first steps are the calibration, and then it moves to the placement that is
predicted to be the best. Knows the planner and the run folder, and neither processes nor steps.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from rolepool.config import Config, LoadedConfig
from rolepool.config.fitting import num_cores
from rolepool.errors import RolepoolError, one_line
from rolepool.placement import Plan, build_plan
from rolepool.placement.hardware import detect_gpu_memory
from rolepool.planner.layouts import places
from rolepool.planner.predict import Prediction, Predictor
from rolepool.planner.profile import NUM_WARM_STEPS, Profile, Recording
from rolepool.planner.search import search as best_placements
from rolepool.report.recordings import identity_of, read_recordings, recordings_of
from rolepool.report.run import open_run, read_run
from rolepool.trainer.moves import moved
from rolepool.trainer.paper import schedule_of

Search = Callable[[Predictor, Config, Sequence[int]], list[Prediction]]
"""Finds the best placements on these nodes, the best one first."""
NUM_CALIBRATION_STEPS = NUM_WARM_STEPS + 2
NUM_STEPS_BETWEEN = 20
"""Steps between two checks of `placement.rebalance`."""
MAX_TRIES = 3
FIRST_MOVE_S = 10.0
"""How long a move is assumed to take before the first one was measured."""
LAST_BYTES = 8_000_000
"""How much of its spans a run reads to predict other placements."""


def resolve(
    loaded: LoadedConfig, search: Search = best_placements
) -> tuple[LoadedConfig, list[str]]:
    """The config that a run starts with, and a notice if its placement is chosen by prediction."""
    config = loaded.config
    if not config.placement.chooses:
        return loaded, []
    folder = config.placement.profile or newest_profile(config)
    if folder is None:
        steps = f"steps 1 to {NUM_CALIBRATION_STEPS} run in one pool and are the calibration"
        then = "then the run moves if that is faster"
        return loaded, [f"placement.strategy=auto: there is no profile; {steps}, {then}"]
    recordings = read_recordings([folder], None)
    predictor = _predictor(recordings)
    nodes = build_plan(config).gpus_per_node
    best, *_ = search(predictor, config, nodes)
    _, chosen = moved(config, best.name.split())
    notice = f"placement.strategy=auto: {in_words(best)} (from {folder})"
    return replace(loaded, config=chosen.config), [notice]


def newest_profile(config: Config) -> Path | None:
    """The newest run folder beside that of the config with the same models and device, if there is
    one."""
    identity = identity_of(config)
    runs = Path(config.trainer.default_local_dir).parent
    files = runs.glob("*/spans.jsonl")
    newest_first = sorted(files, key=lambda file: -file.stat().st_mtime)
    for file in newest_first:
        folder = file.parent
        # Another program's folder, or one without a completed step.
        with suppress(RolepoolError, ValueError):
            config_there = Config.model_validate(open_run(folder).config)
            if identity_of(config_there) == identity:
                run = read_run(folder, LAST_BYTES)
                Profile(recordings_of(run))  # raises an error if there is no completed step
                return folder
    return None


def in_words(best: Prediction) -> str:
    interval = f"{best.low_s:.3g} to {best.high_s:.3g}"
    return f"chose {best.name}, predicted to take {best.step_s:.3g} s per step ({interval})"


def _predictor(recordings: Sequence[Recording]) -> Predictor:
    return Predictor(Profile(recordings), schedule_of, detect_gpu_memory(), num_cores())


def is_worth_measuring(config: Config, num_steps: int) -> bool:
    """Whether a run with so many steps is long enough to predict anything from it."""
    return not config.trainer.val_only and num_steps > NUM_CALIBRATION_STEPS


class Placed(Protocol):
    """Something that has a placement, which can change."""

    @property
    def config(self) -> Config: ...

    @property
    def plan(self) -> Plan: ...


class Proposal(NamedTuple):
    """A placement that is predicted to be better than the present one."""

    best: Prediction
    now_s: float
    """The time of a step in the present placement."""

    @property
    def words(self) -> list[str]:
        """The settings of the placement."""
        return self.best.name.split()


class Rebalancer:
    """Looks for a better placement while a run trains. The search runs in a thread beside the
    steps."""

    def __init__(
        self,
        placed: Placed,
        run_folder: Path,
        tell: Callable[[str], None],
        *,
        first_step: int,
        num_steps: int,
    ) -> None:
        self._placed = placed
        self._folder = run_folder
        self._tell = tell
        self._num_steps = num_steps
        self._keys = placed.config.placement
        self._num_tries = MAX_TRIES if self._keys.chooses else 0
        """How many placements a calibration may still try."""
        self._thread = ThreadPoolExecutor(1)
        self._looking: Future[Proposal | None] | None = None
        self._expected: Proposal | None = None
        """What the run was asked to move to, until the prediction has been compared with a
        measurement."""
        self._last = first_step
        """The step of the last search or move."""
        self.search: Search = best_placements
        self.move_s = FIRST_MOVE_S
        """How long a move takes."""

    def after_step(self, number: int) -> Proposal | None:
        """Begin a search if one is due. Returns the placement that a search has found, once."""
        if self._looking is None:
            num_steps = NUM_STEPS_BETWEEN
            if self._num_tries:
                num_steps = NUM_CALIBRATION_STEPS
            is_due = number >= self._last + num_steps
            has_something_to_do = self._may_move or self._expected is not None
            if is_due and has_something_to_do:
                self._looking = self._thread.submit(self._look, number)
            return None
        if not self._looking.done():
            return None
        ended = self._looking
        self._looking = None
        self._last = number
        try:
            return ended.result()
        except Exception as error:  # no prediction may stop training
            self.refused(error)
            return None

    def accepted(self, proposal: Proposal) -> None:
        """The run will move there."""
        self._expected = proposal
        self._tell(f"placement: {in_words(proposal.best)}, instead of {proposal.now_s:.3g} s now")

    def refused(self, error: Exception) -> None:
        """The run cannot move."""
        self._tell(f"placement: the run does not move: {one_line(error)}")

    def has_moved(self, number: int, seconds: float) -> None:
        """The run has moved before this step, and stood still for so long."""
        self._last = number
        self.move_s = seconds

    @property
    def _may_move(self) -> bool:
        return self._num_tries > 0 or self._keys.rebalance

    def _look(self, number: int) -> Proposal | None:
        """The placement to move to; None if the run stays where it is."""
        run = read_run(self._folder, LAST_BYTES)
        recordings = recordings_of(run)
        plan = self._placed.plan
        predictor = _predictor(recordings)
        predictions = self.search(predictor, self._placed.config, plan.gpus_per_node)
        now_s = recordings[-1].step_s
        if self._expected is not None:
            last, before_s = self._expected
            self._expected = None
            self._tell(
                f"placement: {before_s:.3g} s per step before the move, {last.step_s:.3g} s "
                f"predicted, {now_s:.3g} s measured"
            )
        # A calibration also tries placements that may be faster: after each one, less is unsure.
        is_trying = self._num_tries > 1

        def hoped_s(prediction: Prediction) -> float:
            return prediction.low_s if is_trying else prediction.step_s

        best = min(predictions, key=hoped_s)
        gain_s = now_s - hoped_s(best)
        least_gain_s = self._keys.rebalance_gain * now_s
        if self._num_tries:
            least_gain_s = 0.0
        num_steps_left = self._num_steps - number
        is_worth_it = gain_s > least_gain_s and gain_s * num_steps_left > self.move_s
        is_other = places(best.plan) != places(self._placed.plan)
        if self._may_move and is_other and is_worth_it:
            self._num_tries = max(0, self._num_tries - 1)
            return Proposal(best, now_s)
        if self._num_tries:
            self._num_tries = 0
            self._tell(f"placement.strategy=auto: stays with {self._placed.plan.in_words}")
        return None
