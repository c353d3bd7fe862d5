"""A deployment: everything that belongs to one plan, from its first process to its last.

Owns the pools, the roles with their channel for weights, the monitors, the watchdog, and the
snapshots in the memory of its nodes. It can go over to another plan, and then it keeps the pools
that both plans have. Does not know steps, nor why a plan changes (`rolepool.trainer.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from rolepool.cluster import Cluster, Prepared, WorkerGroup
from rolepool.cluster.begin import Begun
from rolepool.cluster.monitors import Monitors
from rolepool.config import Config, LoadedConfig
from rolepool.metrics.sharding_times import ShardingTimes
from rolepool.models.sharding_times import measure_sharding
from rolepool.placement import build_plan
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS, Role, trained_roles
from rolepool.trainer.moves import check_move
from rolepool.trainer.snapshots import Snapshots
from rolepool.trainer.step import Roles, TrainedCalls
from rolepool.trainer.stores import Groups, Saved

Build = Callable[[Cluster, Config, bool], Roles]
"""Builds every role that its pool does not have yet, and waits until they are ready. The flag says
whether models that are trained read their weights from their files."""


class Held(NamedTuple):
    """A state that the models of a trained role have, until a call changes them."""

    step: int
    """It is the state after this step."""
    group: WorkerGroup
    num_changes: int
    """How many calls had changed the models in these processes by then."""

    @classmethod
    def now(cls, step: int, name: str, role: TrainedCalls) -> Held:
        """The state after this step, if all calls that were made so far lead to it."""
        group = role.group
        keeping = methods_that_keep_models(name)
        num_changes = 0
        for (of_role, method), num_calls in group.num_calls.items():
            if of_role == name and method not in keeping:
                num_changes += num_calls
        return cls(step, group, num_changes)


def methods_that_keep_models(name: str) -> set[str]:
    """The methods of a trained role that leave its models as they are. Any other method counts as
    one that changes them, also one that only a user's class has."""
    keeping = {"save_checkpoint", "take_snapshot"}
    for operation in OPERATIONS.values():
        keeping |= {operation.method, *operation.other_methods}
    for operation in ROLE_SPECS[Role(name)].operations:
        if operation.trains:
            keeping -= {operation.method, *operation.other_methods}
    return keeping


class Deployment(AbstractContextManager["Deployment"]):
    """The processes of a plan, and what runs in them. Its pools are open when it has been made; its
    roles are built when it is brought to a state."""

    def __init__(
        self,
        loaded: LoadedConfig,
        build: Build,
        run_folder: Path,
        tell: Callable[[str], None],
        helpers: Mapping[str, int],
        begun: Begun | None = None,
    ) -> None:
        """Start all processes, also those of `helpers`, which are pools beside those of the plan.
        If their start has `begun` already, finish it."""
        self.loaded = loaded
        self.plan = build_plan(loaded.config)
        self._build = build
        self._tell = tell
        config = loaded.config
        keys = config.trainer
        ray_keys = config.ray_kwargs.ray_init.model_dump()
        with ExitStack() as cleanup:  # if something fails to start, the rest is closed
            cluster = Cluster(
                self.plan,
                **ray_keys,
                timeout_s=config.placement.timeout_s,
                run_seed=keys.seed,
                deterministic=keys.deterministic,
                helpers=helpers,
                begun=begun,
            )
            self.cluster = cleanup.enter_context(cluster)
            self.watchdog = self.cluster.start_watchdog(keys, run_folder, tell)
            self.snapshots = Snapshots(config, self.cluster)
            cleanup.callback(self.snapshots.keepers.close)
            self._cleanup = cleanup.pop_all()
        self._roles: Roles | None = None
        """None before the first `restore`."""
        self._monitors: Monitors | None = None
        """None until roles are built, because a measurement of sharding must not be disturbed."""
        self.sharding = ShardingTimes(times=[])
        """What sharding costs on these processes, if it was measured."""
        self._held: dict[str, Held] = {}
        """The last known state of each trained role."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def roles(self) -> Roles:
        assert self._roles is not None, "the deployment has not been brought to a state yet"
        return self._roles

    @property
    def monitors(self) -> Monitors:
        assert self._monitors is not None, "the deployment has not been brought to a state yet"
        return self._monitors

    @property
    def trained_groups(self) -> Groups:
        """The processes of each trained role."""
        groups = {}
        pool_of_role = self.plan.roles
        for role in trained_roles():
            if role in pool_of_role:
                pool = pool_of_role[role]
                groups[str(role)] = self.cluster.groups[pool]
        return groups

    # The state of the models

    def restore(self, saved: Saved) -> None:
        """Bring all models to a state. Roles that new processes do not have yet are built. A role
        that has this state already keeps it. The rollout gets the weights of the actor."""
        step = saved.state.step
        # Weights that are loaded below are not read from the files of the models, too.
        reads_weights = not saved.has_models
        self._roles = self._build(self.cluster, self.config, reads_weights)
        if self._monitors is None:
            self._monitors = self.cluster.start_monitors()
        self._monitors.watch()
        # All roles load at the same time.
        loads = []
        for name, role in self._roles.trained.items():
            wanted = Held.now(step, name, role)
            if self._held.get(name) != wanted:
                calls = saved.load(name, role)
                loads.append((name, role, calls))
        for name, role, calls in loads:
            for call in calls:
                call.get()
            # Read again, because the loading counts as a change, too.
            self._held[name] = Held.now(step, name, role)
        for call in self._roles.sync_weights(step):
            call.get()

    def hold(self, step: int) -> None:
        """All calls of this step were made. When they have ended, the trained roles have the state
        after it, until the next call changes their models."""
        for name, role in self.roles.trained.items():
            self._held[name] = Held.now(step, name, role)

    # The processes

    def repair(self) -> list[str]:
        """Replace the processes that died, on another plan if a lost node is not replaced. Returns
        the names of the pools that have new processes."""
        # Processes that live may be in a transfer of weights with one that has died.
        self.cluster.abort_waits("processes are being replaced")
        if self.cluster.has_all_nodes:
            return self.cluster.repair()
        on_loss = self.config.placement.on_node_loss
        self._tell(f"a node was lost; placement.on_node_loss={on_loss}")
        if on_loss == "wait":
            self.cluster.replace_nodes()
            return self.cluster.repair()
        return self._shrink()

    def _shrink(self) -> list[str]:
        """Go over to the nodes that are left, with new processes for all pools."""
        config = self.config.with_value("trainer.nnodes", self.cluster.num_live_nodes)
        plan = build_plan(config)
        check_move(config, plan, self.cluster.gpu_memory_bytes)
        names = list(plan.pools)
        prepared = self.cluster.prepare(plan, names, workers=())
        loaded = replace(self.loaded, config=config)
        self.switch(prepared, loaded)
        return names

    def switch(self, prepared: Prepared, loaded: LoadedConfig) -> None:
        """Go over to the pools of another plan. Those that both plans have are kept."""
        self.cluster.abort_waits("the run goes over to another plan")
        self.cluster.switch(prepared)
        self.loaded = loaded
        self.plan = self.cluster.plan
        self.snapshots.have_moved()

    def measure_sharding(self) -> None:
        """Measure what sharding costs on these processes, which must not have roles yet.

        On GPUs it is not measured yet: nobody has seen it there, and ranks that wait for a failed
        one would hang.
        """
        if self.cluster.gpu_memory_bytes is not None:
            return
        times = []
        for times_of_group in self.cluster.measure(measure_sharding):
            times += times_of_group
        self.sharding = ShardingTimes(times=times)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes."""
        self._cleanup.__exit__(kind, error, trace)
