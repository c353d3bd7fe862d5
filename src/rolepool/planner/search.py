"""The search for the best placement: which roles share a pool, and how large each pool is.

All ways to group the roles and all sizes that divide the batches are tried on the simulator, whole
arrays of sizes at a time; only the best ones become predictions. If there are very many sizes, some
are tried first, and then those next to the best ones.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.errors import ConfigError
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import MemoryEstimate
from rolepool.placement.plan import Plan, ScheduledCall
from rolepool.placement.roles import ROLE_SPECS, Role, needed_roles
from rolepool.planner.layouts import (
    Group,
    allowed_sizes,
    changes_for,
    layouts,
    partitions,
    plan_of_group,
)
from rolepool.planner.predict import TENSOR_PARALLEL, Prediction, Predictor
from rolepool.planner.simulation import Times, simulate_many

Objective = Literal["time", "throughput_per_gpu"]
Sizes = npt.NDArray[np.int64]
"""Sizes of pools: those of one group of roles, or a row for each combination of all groups."""
StepTimes = Callable[[Sizes], Times]
"""The step time for each row of sizes, which is infinite if a pool does not fit."""

MAX_GRID = 50_000
"""The most combinations of sizes that are listed at once."""
MAX_TRIED = 1_000
"""The most combinations that are simulated at once."""
NUM_KEPT = 20
"""Combinations whose neighbours are tried."""
NUM_BEST = 5
"""Placements that are returned."""
NUM_TRIED = 12
"""The best candidates that are looked at in full."""


class ScoredSizes(NamedTuple):
    """The size of each group's pool, and the score of the step with them; less is better."""

    score: float
    sizes: tuple[int, ...]


class Candidate(NamedTuple):
    """A placement that was only simulated, without the pools slowing each other down."""

    score: float
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]
    config: Config
    """With the tensor-parallel size of the candidate."""

    @property
    def order(self) -> tuple[float, int, int]:
        """The fastest comes first; among equals, the one with fewer pools and fewer GPUs."""
        return self.score, len(self.groups), sum(self.sizes)


def search(
    predictor: Predictor,
    config: Config,
    inventory: Sequence[int],
    objective: Objective = "time",
) -> list[Prediction]:
    """The best placements on these nodes, best first, as predictions whose names are the overrides
    that make them.

    Raises ConfigError if no placement can run.
    """
    recordings = predictor.profile.recordings
    parallel_sizes = {recording.config.at(TENSOR_PARALLEL) for recording in recordings}
    candidates: list[Candidate] = []
    for tensor_parallel in sorted(parallel_sizes):
        changed = config.with_value(TENSOR_PARALLEL, tensor_parallel)
        candidates += _candidates(predictor, changed, inventory, objective)
    candidates.sort(key=lambda candidate: candidate.order)

    best: list[Prediction] = []
    for candidate in candidates[:NUM_TRIED]:
        prediction = _predict(predictor, config, candidate, inventory)
        if prediction is not None:
            best.append(prediction)
    if not best:
        raise ConfigError(
            "predict --search: no placement of these GPUs divides the batches and fits in memory"
        )

    def order(prediction: Prediction) -> tuple[float, int, int]:
        """Among placements that are about as fast, the simplest comes first."""
        rounded_score = float(f"{score_of(prediction, objective):.4g}")
        return rounded_score, len(prediction.plan.pools), len(prediction.name)

    best.sort(key=order)
    return best[:NUM_BEST]


def score_of(prediction: Prediction, objective: Objective) -> float:
    """What is made as small as possible."""
    if objective == "time":
        return prediction.step_s
    return prediction.step_s * len(prediction.plan.slots)


def _candidates(
    predictor: Predictor,
    config: Config,
    inventory: Sequence[int],
    objective: Objective,
) -> list[Candidate]:
    """The best sizes of all ways to group the roles."""
    roles, _ = needed_roles(config)
    simulator = _Simulator(predictor, config)
    allowed = {role: allowed_sizes(config, role, inventory) for role in roles}
    candidates: list[Candidate] = []
    for groups in partitions(roles):
        choices = []
        for group in groups:
            in_common = set.intersection(*(allowed[role] for role in group))
            choices.append(np.array(sorted(in_common)))
        best = _best_sizes(
            step_times=simulator.step_times_of(groups),
            choices=choices,
            num_gpus=sum(inventory),
            objective=objective,
        )
        for score, sizes in best:
            candidates.append(Candidate(score, groups, sizes, config))
    return candidates


def _predict(
    predictor: Predictor,
    config: Config,
    candidate: Candidate,
    inventory: Sequence[int],
) -> Prediction | None:
    """The prediction for the first layout of a candidate that can run; None if none can."""
    plans = layouts(
        config=candidate.config,
        groups=candidate.groups,
        sizes=candidate.sizes,
        inventory=inventory,
    )
    for plan in plans:
        if find_problems(candidate.config, plan):
            continue
        tensor_parallel = candidate.config.at(TENSOR_PARALLEL)
        overrides = []
        for key, value in changes_for(config, plan, tensor_parallel).items():
            # Lists must not have spaces, which separate the overrides.
            overrides.append(f"{key}={value}".replace(" ", ""))
        name = " ".join(overrides)
        return predictor.predict(name, candidate.config, plan)
    return None


def _best_sizes(
    step_times: StepTimes,
    choices: Sequence[Sizes],
    num_gpus: int,
    objective: Objective,
) -> list[ScoredSizes]:
    """The best sizes of groups of roles. If there are too many combinations, every second size is
    tried, or every fourth, and so on; then the sizes next to those of the best combinations."""
    stride = 1
    grid = _grid(choices, num_gpus, stride)
    while grid is None:
        stride *= 2
        grid = _grid(choices, num_gpus, stride)

    tried = grid
    while True:
        scores = step_times(tried)
        if objective == "throughput_per_gpu":
            scores = scores * tried.sum(1)
        best = np.argsort(scores, kind="stable")[:NUM_KEPT]
        if stride == 1:
            break
        stride //= 2
        nearby: list[tuple[int, ...]] = []
        for row in best:
            nearby += _neighbours(choices, tried[row], stride, num_gpus)
        tried = np.unique(nearby, axis=0)

    best_sizes = []
    for row in best[:NUM_BEST]:
        score = float(scores[row])
        if math.isfinite(score):
            sizes = tuple(tried[row].tolist())
            best_sizes.append(ScoredSizes(score, sizes))
    return best_sizes


def _grid(choices: Sequence[Sizes], num_gpus: int, stride: int) -> Sizes | None:
    """All combinations of every n-th size of each group, one in each row; None if there are too
    many."""
    sizes_of_groups = [sizes[::stride] for sizes in choices]
    num_combinations = math.prod(map(len, sizes_of_groups))
    if num_combinations > MAX_GRID:
        return None
    axes = np.meshgrid(*sizes_of_groups, indexing="ij")
    stacked = np.stack(axes, axis=-1)
    num_groups = len(choices)
    grid: Sizes = stacked.reshape(-1, num_groups)
    fits = grid.sum(1) <= num_gpus
    grid = grid[fits]
    if len(grid) > MAX_TRIED:
        return None
    return grid


def _neighbours(
    choices: Sequence[Sizes],
    combination: Sizes,
    stride: int,
    num_gpus: int,
) -> list[tuple[int, ...]]:
    """The combinations in which the size of each group is at most one stride away in its choices,
    and which fit on the GPUs."""
    choices_nearby: list[Sizes] = []
    for sizes, size in zip(choices, combination, strict=True):
        place = int(np.searchsorted(sizes, size))
        indices = np.array([place - stride, place, place + stride])
        is_choice = (indices >= 0) & (indices < len(sizes))
        places_nearby = indices[is_choice]
        choices_nearby.append(sizes[places_nearby])

    combinations = []
    for nearby in product(*choices_nearby):
        if sum(nearby) <= num_gpus:
            combinations.append(nearby)
    return combinations


def _deciding_group(call: ScheduledCall, groups: Sequence[Group]) -> int | None:
    """The position of the group whose pool decides how long a call takes; None for the driver and
    the rule reward, which are in no group."""
    # The time of a weight sync depends on the pool of the role that is trained.
    trained = {role for role in call.roles if ROLE_SPECS[role].is_trained}
    deciding_roles = trained or call.roles
    for number, group in enumerate(groups):
        if deciding_roles.intersection(group):
            return number
    return None


class _Simulator:
    """Simulates many sizes of groups of roles at once. The times of calls are computed only once
    for each group and size of its pool."""

    def __init__(self, predictor: Predictor, config: Config) -> None:
        self.predictor = predictor
        self.config = config
        self.schedule = predictor.schedule_of(config)
        # Caches of one simulator, which end with it.
        self._plan_of_group = cache(self._make_plan)
        self._seconds_of_call = cache(self._compute_seconds)

    def step_times_of(self, groups: Sequence[Group]) -> StepTimes:
        """The function that simulates these groups with many sizes."""
        homes: dict[Role, str] = {}
        for group in groups:
            pool_name = "+".join(group)
            homes.update(dict.fromkeys(group, pool_name))

        def step_times(sizes: Sizes) -> Times:
            times: dict[str, Times] = {}
            for call in self.schedule.calls[:-1]:
                times[call.operation] = self._seconds(call, groups, sizes)
            with np.errstate(invalid="ignore"):  # infinite times
                steps = simulate_many(
                    self.schedule,
                    homes=homes,
                    seconds=times,
                    hand_over_s=self.predictor.profile.hand_over_s,
                )
                return steps.step_s

        return step_times

    def _seconds(self, call: ScheduledCall, groups: Sequence[Group], sizes: Sizes) -> Times:
        """The time of a call for each row of sizes."""
        number = _deciding_group(call, groups)
        if number is not None:
            group = groups[number]
            group_sizes = sizes[:, number]
        else:
            # No size of a pool changes the time of the driver and of the rule reward.
            group = ()
            group_sizes = np.zeros(len(sizes), dtype=int)
        is_whole = call.roles.issubset(group)
        different, index = np.unique(group_sizes, return_inverse=True)
        seconds = []
        for size in different.tolist():
            seconds.append(self._seconds_of_call(call, group, size, is_whole))
        return np.array(seconds)[index]

    def _make_plan(self, group: Group, size: int) -> tuple[Plan, MemoryEstimate]:
        plan = plan_of_group(self.config, group, size)
        return plan, self.predictor.memory(self.config, plan)

    def _compute_seconds(
        self,
        call: ScheduledCall,
        group: Group,
        size: int,
        is_whole: bool,
    ) -> float:
        """The time of a call on a group's pool. A weight sync is whole if the pool has both of its
        roles."""
        plan, memory = self._plan_of_group(group, size)
        if memory.excess:
            return float("inf")
        if not is_whole and group:
            roles_elsewhere = call.roles.difference(group)
            others = dict.fromkeys(roles_elsewhere, "elsewhere")
            homes = {**plan.roles, **others}
            plan = plan.model_copy(update={"roles": homes})
        expected = self.predictor.seconds(
            config=self.config,
            plan=plan,
            call=call,
            memory=memory,
            schedule=self.schedule,
        )
        return expected.mean
