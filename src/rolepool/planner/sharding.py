"""What sharding adds to the time of a piece of work, from times that a run measured with a small
model at its start.

Owns the model: a part of the work takes longer by a time for each layer (collectives, and the work
of the host around them), and by a time for each parameter (its data travels and is copied). Both
depend on the number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rolepool.metrics.sharding_times import ShardingTime

OPTIMIZER = "optimizer"
"""The part of an update that changes the weights."""


class Costs(NamedTuple):
    """Seconds for each layer that is gathered on its own, and for each parameter."""

    per_unit_s: float
    per_param_s: float

    @classmethod
    def fit(cls, times: Sequence[ShardingTime]) -> "Costs":
        """The costs with which the smallest and the largest model take as long as measured."""
        small = min(times, key=attrgetter("num_params"))
        large = max(times, key=attrgetter("num_params"))
        more_params = large.num_params - small.num_params
        per_param_s = 0.0
        if more_params > 0:
            more_s = large.added_s - small.added_s
            per_param_s = more_s / more_params
        if small.part != OPTIMIZER:
            # Only noise can make more data faster. An optimizer is faster, because each rank
            # updates only its shard.
            per_param_s = max(0.0, per_param_s)
        of_params_s = per_param_s * small.num_params
        per_unit_s = (small.added_s - of_params_s) / small.num_units
        return cls(max(0.0, per_unit_s), per_param_s)


class ShardingCosts:
    """The costs of each part for each number of ranks that was measured."""

    def __init__(self, times: Iterable[ShardingTime]) -> None:
        self._costs: dict[str, dict[int, Costs]] = defaultdict(dict)
        """By part and number of ranks."""
        measured: dict[tuple[str, int], list[ShardingTime]] = defaultdict(list)
        for measured_time in times:
            part_and_ranks = (measured_time.part, measured_time.num_ranks)
            measured[part_and_ranks].append(measured_time)
        for part_and_ranks in sorted(measured):
            part, num_ranks = part_and_ranks
            costs = Costs.fit(measured[part_and_ranks])
            self._costs[part][num_ranks] = costs

    @property
    def is_measured(self) -> bool:
        return bool(self._costs)

    def covers(self, num_ranks: int) -> bool:
        """Whether the number of ranks is among those that were measured, or between them."""
        if not self.is_measured:
            return False
        if num_ranks == 1:
            return True
        sizes: set[int] = set()
        for costs in self._costs.values():
            sizes.update(costs)
        return min(sizes) <= num_ranks <= max(sizes)

    def of_model(self, part: str, num_units: int, num_params: int) -> "PieceSharding | None":
        """What sharding adds to a part of the work of a model; None if that was not measured."""
        if part not in self._costs:
            return None
        return PieceSharding(self._costs[part], num_units, num_params)


class PieceSharding(NamedTuple):
    """What sharding adds to one piece of work of a model, such as the forward pass of a
    micro-batch."""

    costs: dict[int, Costs]
    """By number of ranks."""
    num_units: int
    num_params: int

    def seconds(self, num_ranks: int) -> float:
        """Between the numbers of ranks that were measured it grows evenly. Outside of them it is
        that of the nearest number."""
        if num_ranks == 1:
            return 0.0
        measured_s: list[float] = []
        for costs in self.costs.values():
            of_units_s = costs.per_unit_s * self.num_units
            of_params_s = costs.per_param_s * self.num_params
            measured_s.append(of_units_s + of_params_s)
        measured_sizes = list(self.costs)
        between_s = float(np.interp(num_ranks, measured_sizes, measured_s))
        return max(0.0, between_s)

    def covers(self, num_ranks: int) -> bool:
        """Whether the number of ranks is among those that were measured, or between them."""
        return num_ranks == 1 or min(self.costs) <= num_ranks <= max(self.costs)
