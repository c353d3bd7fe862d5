"""Predictions: the step time of a config and a plan, from a profile.

Owns what a prediction says: its interval, the busy share of each pool, the critical path, memory,
and what the profile does not cover. `planner.simulation` lays the calls out in time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt

import numpy as np

from rolepool.config import Config
from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement.checks import find_problems
from rolepool.placement.estimate import GIB, MemoryEstimate, estimate_memory, shape_of
from rolepool.placement.plan import Plan, Schedule, ScheduledCall
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role
from rolepool.planner.costs import Seconds, Work
from rolepool.planner.profile import (
    NO_ROLE,
    SYNC,
    SYNC_BETWEEN,
    Profile,
    Recording,
    ranks_of,
)
from rolepool.planner.simulation import Rate, Simulated, core_rate, shared_rate, simulate
from rolepool.units import show_bytes

INTERVAL = 1.64
"""Standard deviations on each side of a prediction: nine of ten results of the model are inside."""
UNKNOWN_SHARING = 0.15
"""How much of a GPU two pools may gain or lose by sharing it, if that was never measured."""
TENSOR_PARALLEL = next(
    spec.tensor_parallel for spec in ROLE_SPECS.values() if spec.tensor_parallel is not None
)
UNKNOWN_SYNC = 0.5
"""The relative deviation of a weight sync between pools that was never measured."""

ScheduleOf = Callable[[Config], Schedule]


@dataclass(frozen=True)
class Prediction:
    """What a step would cost under a placement."""

    name: str
    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    num_tokens: float
    busy: dict[str, float]
    path: list[tuple[str, float]]
    memory_gib: dict[str, float]
    """The estimated peak of each pool; empty on CPU slots."""
    notes: list[str] = field(default_factory=list)
    """What the profile does not cover."""


@dataclass
class Predictor:
    """Predicts from one profile. Times of operations are computed once for each size of a pool."""

    profile: Profile
    schedule_of: ScheduleOf
    gpu_memory_bytes: int | None = None
    num_cores: int | None = None
    """Those of a node with CPU slots."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Factors for operations, or for all those of a role."""

    def __post_init__(self) -> None:
        known = {*ROLE_SPECS, *OPERATIONS}
        unknown = [name for name in self.speeds if name not in known]
        if unknown:
            names = ", ".join(sorted(known))
            raise ConfigError(
                f"--speed {unknown[0]}: is no role and no operation; use one of {names}"
            )
        self._efficiency: dict[bool, float] = {}
        """How much of a GPU pools that share it get together, with and without MPS, if it was
        measured."""
        for shared in self.profile.sharing:
            self._efficiency[shared.plan.mps] = self._fit_sharing(shared)

    def predict(self, name: str, config: Config, plan: Plan) -> Prediction:
        """Raises PlacementError if the plan cannot run, and ConfigError if the profile does not
        cover its work."""
        PlacementError.raise_if_any(find_problems(config, plan))
        memory = self.memory(config, plan)
        schedule = self.schedule_of(config)
        notes = self._notes(config, plan)
        if memory.excess:
            raise PlacementError(f"{name}: does not fit in memory, by {show_bytes(memory.excess)}")
        seconds = self._seconds_of_calls(config, plan, memory, schedule)

        def simulated(deviations: float, sharing_change: float) -> Simulated[float]:
            """The step if each operation takes so many standard deviations longer than expected."""
            times: dict[str, float] = {}
            for operation, expected in seconds.items():
                deviation = sqrt(expected.variance)
                times[operation] = max(0.0, expected.mean + deviations * deviation)
            return simulate(
                schedule,
                homes=plan.roles,
                seconds=times,
                hand_over_s=self.profile.hand_over_s,
                rate=self._rate(plan, sharing_change),
            )

        middle = simulated(0.0, 0.0)
        low = simulated(-INTERVAL, UNKNOWN_SHARING)
        high = simulated(INTERVAL, -UNKNOWN_SHARING)
        memory_gib = {}
        if plan.device != "cpu":
            for pool, needed in memory.pools.items():
                memory_gib[pool] = needed.peak / GIB
        return Prediction(
            name=name,
            plan=plan,
            step_s=middle.step_s,
            low_s=low.step_s,
            high_s=high.step_s,
            num_tokens=self.num_tokens(config),
            busy=middle.busy,
            path=middle.path,
            memory_gib=memory_gib,
            notes=notes,
        )

    def memory(self, config: Config, plan: Plan) -> MemoryEstimate:
        gpu_memory_bytes = self.gpu_memory_bytes
        if plan.device == "cpu":
            gpu_memory_bytes = None
        return estimate_memory(config, plan, gpu_memory_bytes)

    def num_tokens(self, config: Config) -> float:
        """Tokens of prompts and responses in a step."""
        return config.rows_of_step * self.profile.rows_like(config).num_tokens

    def _seconds_of_calls(
        self,
        config: Config,
        plan: Plan,
        memory: MemoryEstimate,
        schedule: Schedule,
    ) -> dict[str, Seconds]:
        """The time of each call of a step, alone on its pools."""
        seconds: dict[str, Seconds] = {}
        # The last call of a schedule is the generation of the next step.
        for call in schedule.calls[:-1]:
            seconds[call.operation] = self.seconds(
                config=config,
                plan=plan,
                call=call,
                memory=memory,
                schedule=schedule,
            )
        return seconds

    def seconds(
        self,
        config: Config,
        plan: Plan,
        call: ScheduledCall,
        memory: MemoryEstimate,
        schedule: Schedule,
    ) -> Seconds:
        """The time of a call, alone on its pools."""
        operation = call.operation
        role = min(call.roles, default=NO_ROLE)
        if operation == SYNC:
            expected = self._sync(config, plan)
        else:
            expected = self._work(config, plan, operation, role, memory)
        speed_of_role = self.speeds.get(role, 1.0)
        factor = 1 / self.speeds.get(operation, speed_of_role)
        if OPERATIONS[operation].trains:
            # A schedule has at most a few epochs, however many there are.
            num_scheduled = sum(other.operation == operation for other in schedule.calls)
            num_epochs = config.at(f"{ROLE_SPECS[role].section}.ppo_epochs")
            factor *= num_epochs / num_scheduled
        return Seconds(expected.mean * factor, expected.variance * factor**2)

    def _work(
        self,
        config: Config,
        plan: Plan,
        operation: str,
        role: Role,
        memory: MemoryEstimate,
    ) -> Seconds:
        """The time of one call of an operation that is not a weight sync."""
        if not self.profile.is_measured(operation):
            fix = "record a run with it, and give its run folder as well"
            raise ConfigError(f"predict: {operation} was not measured in the profile; {fix}")
        work = self.profile.work(
            config,
            role,
            operation=OPERATIONS[operation],
            num_parts=self._num_parts(config, plan, role),
            size=memory.micro_batches.get(operation),
        )
        pool = plan.roles.get(role, RULE_POOL)
        num_ranks = ranks_of(config, plan, role, pool, operation)
        return self.profile.seconds(operation, work, num_ranks)

    def _num_parts(self, config: Config, plan: Plan, role: Role) -> int:
        """How many ranks or groups of ranks divide the rows of a role's calls."""
        if role in plan.roles:
            return plan.dims_of(config, role).dp
        if role == NO_ROLE:
            return 1
        return self.profile.num_helpers

    def _sync(self, config: Config, plan: Plan) -> Seconds:
        """The time of a weight sync, in one pool or between two."""
        is_in_one_pool = plan.roles[Role.Actor] == plan.roles[Role.Rollout]
        if is_in_one_pool:
            kind = SYNC
            other_kind = SYNC_BETWEEN
        else:
            kind = SYNC_BETWEEN
            other_kind = SYNC
        if self.profile.is_measured(kind):
            return self._measured_sync(kind, plan)

        mean = self._measured_sync(other_kind, plan).mean
        if not is_in_one_pool:
            # And as long as all weights take through the object store, there and back.
            bytes_per_param = 4 if plan.device == "cpu" else 2
            num_bytes = shape_of(config, Role.Actor).num_params * bytes_per_param
            mean += 2 * num_bytes / self.profile.bytes_per_s
        return Seconds(mean, (UNKNOWN_SYNC * mean) ** 2)

    def _measured_sync(self, kind: str, plan: Plan) -> Seconds:
        work = {}
        for operation, part in self.profile.costs:
            if operation == kind:
                work[part] = Work(1)
        num_ranks = plan.pool_of(Role.Actor).world_size
        return self.profile.seconds(kind, work, num_ranks)

    def _notes(self, config: Config, plan: Plan) -> list[str]:
        """What the profile does not cover. Raises ConfigError if it does not cover the
        tensor-parallel size at all."""
        self._check_tensor_parallel(config)
        notes = []
        if not any(rows.live for rows in self.profile.rows.values()):
            what = "the work inside of operations (micro-batches, decode steps, tokens) was not recorded"
            notes.append(f"{what}, so how their time depends on it is assumed")
        if config.algorithm.filter_groups.enable:
            one = "a step is predicted with one batch of data.train_batch_size prompts"
            notes.append(f"algorithm.filter_groups: {one}, and takes longer if groups are filtered")
        notes += self._notes_on_ranks(plan)
        measured_plans = [recording.plan for recording in self.profile.recordings]
        if _most_nodes([plan]) > _most_nodes(measured_plans):
            notes.append("the network between nodes was not measured")
        is_sync_between = plan.roles[Role.Actor] != plan.roles[Role.Rollout]
        if is_sync_between and not self.profile.is_measured(SYNC_BETWEEN):
            notes.append("a weight sync between pools was not measured")
        if plan.sharing_pools and plan.mps not in self._efficiency:
            with_mps = " with MPS" if plan.mps else ""
            notes.append(f"pools that share a GPU{with_mps} were not measured")
        return notes

    def _check_tensor_parallel(self, config: Config) -> None:
        """Raise ConfigError if no recording has the tensor-parallel size of this config."""
        recordings = self.profile.recordings
        measured = {recording.config.at(TENSOR_PARALLEL) for recording in recordings}
        parallel = config.at(TENSOR_PARALLEL)
        if parallel not in measured:
            sizes = ", ".join(map(str, sorted(measured)))
            problem = f"the profile has measured only {sizes}"
            raise ConfigError(f"{TENSOR_PARALLEL}={parallel}: {problem}; record a run with it")

    def _notes_on_ranks(self, plan: Plan) -> list[str]:
        """What the profile does not cover of the numbers of ranks."""
        measured: set[int] = set()
        for recording in self.profile.recordings:
            measured.update(pool.world_size for pool in recording.plan.pools.values())
        sizes = {pool.world_size for pool in plan.pools.values()}
        new_sizes = sorted(sizes - measured)
        sharding = self.profile.sharding
        if sharding.is_measured:
            unknown = [str(size) for size in new_sizes if not sharding.covers(size)]
            if not unknown:
                return []
            what = f"what sharding costs over {', '.join(unknown)} ranks was not measured"
            return [f"{what}, so that of the nearest number of ranks is assumed"]

        smallest = min(measured)
        largest = max(measured)
        outside = [str(size) for size in new_sizes if not smallest <= size <= largest]
        if not outside:
            return []
        if smallest == largest:
            what = f"all pools of the profile have {smallest} rank{'s' * (smallest > 1)}"
            return [f"{what}, so the cost of collectives was not measured"]
        what = f"the profile has pools of {smallest} to {largest} ranks"
        return [f"{what}; times of other sizes ({', '.join(outside)}) are extrapolated"]

    def _rate(self, plan: Plan, change: float) -> Rate | None:
        """How fast pools work at the same time. None if no pool slows another one down. What pools
        that share a GPU get of it together may not be measured. Then it is assumed to be the same
        with and without MPS, or else the whole GPU, and `change` more."""
        if plan.sharing_pools:
            assumed = self._efficiency.get(not plan.mps, 1.0) + change
            efficiency = self._efficiency.get(plan.mps, assumed)
            return partial(shared_rate, plan, efficiency)
        if plan.device == "cpu" and self.num_cores is not None:
            return partial(core_rate, plan, self.num_cores)
        return None

    def _fit_sharing(self, shared: Recording) -> float:
        """How much of a GPU pools that share it get together: the value with which the prediction
        is what was measured."""
        plan = shared.plan
        memory = self.memory(shared.config, plan)
        schedule = self.schedule_of(shared.config)
        seconds = self._seconds_of_calls(shared.config, plan, memory, schedule)
        times = {operation: expected.mean for operation, expected in seconds.items()}

        def negative_step_s(efficiency: float) -> float:
            simulated = simulate(
                schedule,
                homes=plan.roles,
                seconds=times,
                hand_over_s=self.profile.hand_over_s,
                rate=partial(shared_rate, plan, efficiency),
            )
            return -simulated.step_s

        # A larger value makes the step shorter, so the negative times are in order.
        efficiencies: list[float] = np.linspace(0.3, 2.0, 2_000).tolist()
        place = bisect_left(efficiencies, -shared.step_s, key=negative_step_s)
        last = len(efficiencies) - 1
        return efficiencies[min(place, last)]


def _most_nodes(plans: Iterable[Plan]) -> int:
    """The most nodes of a pool of these plans."""
    most = 0
    for plan in plans:
        for pool in plan.pools.values():
            most = max(most, len(pool.counts_by_node))
    return most
