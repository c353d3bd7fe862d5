"""Kill or stop every kind of process in every phase of a run: all runs must go on and end with the
same metrics.

    python benchmarks/chaos.py                                    all cases, one after another
    python benchmarks/chaos.py --cases rollout:update,reward:scoring
    python benchmarks/chaos.py --device cuda --limit 400 --json chaos.json          30 cases, 8 side by side

The run is the demo. A case is `[PLACEMENT/]VICTIM:PHASE[+HOW]`. The victim gets its fault just after
the driver has queued the call that begins the phase. HOW is:

    (nothing)  SIGKILL
    +wait      SIGSTOP, and SIGKILL when the other ranks have waited for it in a collective, or in a
               transfer of weights, for a while
    +stop      SIGSTOP, which rolepool must notice by itself (trainer.stall_timeout_s)

Placements: `apart` (the default: the actor with the reference in two processes, the rollout, the
critic and the process of the rule reward, each in a pool of its own), `together` (one pool of two),
`split` (two pools of two), `tp` (one pool of two, tensor-parallel rollout) and `moves` (the run
moves through all of them while it trains). The victim `node` is the raylet of the second of two
nodes, while a third one is there to replace it. The victim `driver` is the driver of `rolepool
train`. The victim `actor1-rollout` is two processes, one at each end of a transfer.

Metrics are compared with those of a run of the same placement without faults, bit for bit, except
for times and memory. On a GPU the runs have trainer.deterministic=true. On a machine with one GPU
all ranks share it, which needs NCCL 2.30 or later (`lanes.py`).

Seconds are counted from the fault: `noticed` until the driver knows about it, `replaced` until there
are new processes with the last state, `next row` until the next step has ended. The file of --json
has a timeline of each run: when its phases began, what it said, and when its rows came.

Most of a run's time is the start of its processes, and a core each is busy then. So a GPU's machine
with 16 cores makes 8 runs side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lanes
import ray
from lanes import Job, run_jobs
from ray.cluster_utils import Cluster as RayCluster

from rolepool import cli
from rolepool.cluster import RoleProxy, WorkerGroup
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.metrics.spans import RULE_POOL
from rolepool.trainer.console import Observer
from rolepool.trainer.loop import Trainer
from rolepool.trainer.moves import moved
from rolepool.trainer.recovery import Recovery

BASE_KEYS = """
data.train_batch_size=16 data.val_max_samples=8 data.max_prompt_length=8 data.max_response_length=4
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=1e-3
actor_rollout_ref.rollout.n=2 algorithm.use_kl_in_reward=true trainer.device=cpu trainer.logger=[]
trainer.total_training_steps=4 trainer.test_freq=2 trainer.save_freq=2 trainer.val_before_train=false
"""
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
PLACEMENTS = {
    "apart": """
placement.strategy=custom placement.pools.actor_pool=[2] placement.pools.rollout_pool=[1]
placement.pools.critic_pool=[1] placement.roles.actor=actor_pool placement.roles.ref=actor_pool
placement.roles.rollout=rollout_pool placement.roles.critic=critic_pool trainer.n_gpus_per_node=4
""",
    "together": "placement.strategy=standard trainer.n_gpus_per_node=2",
    "split": "placement.strategy=split trainer.n_gpus_per_node=4",
    "tp": f"placement.strategy=standard trainer.n_gpus_per_node=2 {TENSOR_PARALLEL}=2",
    "four": "placement.strategy=standard trainer.n_gpus_per_node=4",
}
KEYS = BASE_KEYS + PLACEMENTS["apart"]
TWO_NODES = """
trainer.nnodes=2 trainer.n_gpus_per_node=2
placement.pools.actor_pool=[1,1] placement.pools.rollout_pool=[1] placement.pools.critic_pool=[0,1]
"""
MOVES = {1: "split", 3: "apart", 5: "four"}
"""A run of `moves` begins together. After the row of a step is written, it is asked to move, and
moves after the step that follows."""
MOVES_KEYS = """
trainer.total_training_steps=8 trainer.test_freq=-1 trainer.save_freq=-1 data.val_files=null
"""
ON_GPU = """
trainer.device=cuda trainer.deterministic=true actor_rollout_ref.rollout.enforce_eager=true
"""
VICTIMS = {
    "actor0": ("actor_pool", 0),
    "actor1": ("actor_pool", 1),
    "rollout": ("rollout_pool", 0),
    "critic": ("critic_pool", 0),
    "reward": (RULE_POOL, 0),
    "node": ("critic_pool", 0),
    "driver": ("critic_pool", 0),
}
BOTH = "actor1-rollout"
"""A victim that is two processes: one at each end of a transfer of weights."""
RANKS = {"rank0": ("global_pool", 0), "rank1": ("global_pool", 1), "reward": (RULE_POOL, 0)}
VICTIMS_OF = {
    "apart": VICTIMS,
    "together": RANKS,
    "tp": RANKS,
    "split": {
        "actor0": ("actor_rollout_ref_pool", 0),
        "actor1": ("actor_rollout_ref_pool", 1),
        "critic0": ("critic_pool", 0),
        "critic1": ("critic_pool", 1),
    },
    "moves": {"actor1": ("actor_pool", 1), "critic0": ("critic_pool", 0)},
}
PHASES: dict[str, tuple[str, ...]] = {
    "start": ("__init__",),
    "validation": ("validate",),
    "generation": ("generate_sequences",),
    "scoring": ("compute_scores",),
    "update": ("update_actor", "update_critic"),
    "sync": ("send_weights", "take_weights_here"),
    "checkpoint": ("save_checkpoint",),
    "snapshot": ("take_snapshot",),
    "load": ("load_checkpoint",),
    "move": ("__init__",),
}
"""The methods whose call begins each phase. The phase `move` is the first role that is built in a
new pool."""
STEP = 2
"""The step in which a victim is killed; validation and checkpoint follow it."""
STEP_OF_MOVES = 5
"""The same for runs that move: after two moves, and before the next one is asked for."""
WAIT_S = 2.0
"""So long the other ranks wait for a victim of `+wait` before it is killed."""
STALL_KEYS = "trainer.stall_timeout_s=5"
NOTICED_WITHIN_S = 10.0
"""The goal for a kill while other ranks wait."""
MEASURED = ("timing_", "perf/", "pool/", "overlap/")
NODE_OPTIONS: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 * 2**20}
DRIVER_TIMEOUT_S = 300
UNDISTURBED = "undisturbed"
LANES_OF = {"cpu": 1, "cuda": 8}
"""Runs side by side, unless --at-once says something else."""
GPU_CASES = """
moves/actor1:update+wait moves/critic0:move driver:update
together/rank1:update+wait together/rank0:update+wait split/actor1:update+wait split/critic1:update+wait
tp/rank1:generation+wait actor0:update+wait together/rank1:update+stop actor1:update+stop
together/rank1:snapshot actor1:snapshot critic:snapshot split/critic0:snapshot
together/rank0:sync actor0:sync rollout:sync split/actor0:sync
actor1:sync+wait rollout:sync+wait actor1-rollout:sync+wait rollout:sync+stop
together/rank1:generation critic:update actor1:start actor1:checkpoint
rollout:generation rollout:validation reward:scoring
"""
"""The default of `--device cuda`. Those that take longest are first, then those in which other ranks
wait in a collective."""
CPU_CASES = """
together/rank1:update+wait together/rank1:update+stop split/critic1:update+wait tp/rank1:generation+wait
moves/actor1:update+wait moves/critic0:move
actor1:sync+wait rollout:sync+wait actor1-rollout:sync+wait rollout:sync+stop
"""
"""Added to all victims and phases of the placement `apart`."""


class Case(NamedTuple):
    """One fault in one run."""

    placement: str
    victim: str
    phase: str
    how: str

    @classmethod
    def of(cls, name: str) -> Case:
        """Raises ValueError, with what there is, if there is no such case."""
        placement, _, rest = name.rpartition("/")
        victim, _, phase_and_how = rest.partition(":")
        phase, _, how = phase_and_how.partition("+")
        placement = placement or "apart"
        wrong = (
            placement not in VICTIMS_OF
            or victim not in (*VICTIMS_OF[placement], BOTH)
            or phase not in PHASES
            or how not in ("", "wait", "stop")
        )
        if wrong:
            known = "; ".join(f"{key}/ {', '.join(value)}" for key, value in VICTIMS_OF.items())
            raise ValueError(
                f"{name}: must be [PLACEMENT/]VICTIM:PHASE[+wait|+stop]; "
                f"victims: {known}; phases: {', '.join(PHASES)}"
            )
        return cls(placement, victim, phase, how)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The pool and the rank of each process of the victim."""
        names = self.victim.split("-")
        return [VICTIMS_OF[self.placement][name] for name in names]

    @property
    def step(self) -> int:
        return STEP_OF_MOVES if self.placement == "moves" else STEP

    @property
    def twin(self) -> str:
        """The job without a fault whose rows this case must have."""
        placement = "two-nodes" if self.victim == "node" else self.placement
        return f"{UNDISTURBED}/{placement}"


@dataclass
class Outcome:
    """A run's rows without what is measured, its restarts and moves, and seconds from the fault."""

    rows: list[dict[str, Any]]
    restarts: list[dict[str, Any]]
    seconds: float | None
    """Until the next row; None if there was no fault, or no row after it."""
    noticed_s: float | None = None
    replaced_s: float | None = None
    moves: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    """Seconds from the start of the run, and what happened then."""
    num_loads: dict[str, int] = field(default_factory=dict)
    """How often the processes that each trained role had at the end have loaded a saved state."""


class Story(Observer):
    """Notes what happens in a run and when, and asks for moves."""

    def __init__(
        self,
        moves: dict[int, list[str]] | None = None,
        after_row: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.began_s = time.monotonic()
        self.phases: list[tuple[float, str]] = []
        self.rows_s: list[float] = []
        self.notices: list[tuple[float, str]] = []
        self.recoveries_s: list[float] = []
        self.trainer: Trainer | None = None
        self._moves = dict(moves or {})
        self._after_row = after_row

    @property
    def timeline(self) -> list[tuple[float, str]]:
        rows = [(at, f"row {number}") for number, at in enumerate(self.rows_s, start=1)]
        recoveries = [(at, "a death is known") for at in self.recoveries_s]
        events = sorted([*self.phases, *self.notices, *recoveries, *rows])
        return [(round(at - self.began_s, 2), what) for at, what in events]

    def on_phase(self, what: str) -> None:
        self.phases.append((time.monotonic(), what))

    def on_notice(self, line: str) -> None:
        self.notices.append((time.monotonic(), line))

    def on_row(self, step: int, metrics: dict[str, float]) -> None:
        self.rows_s.append(time.monotonic())
        self._after_row(step)
        words = self._moves.pop(step, None)
        if words is not None:
            assert self.trainer is not None
            plan, loaded = moved(self.trainer.deployment.config, words)
            move = self.trainer.mover.ask(plan, loaded)
            move.starting.exception()  # waits, so that each run moves after the same step

    def first_after(self, time_s: float, words: str) -> float | None:
        """Seconds from a time to the first notice with these words."""
        times = [at - time_s for at, line in self.notices if at >= time_s and words in line]
        return min(times, default=None)


DRIVER_MARK = Path(os.environ.get("CHAOS_MARK", os.devnull))
"""Exists if the driver was killed already."""


def lose_node(node_id: str) -> None:
    """Kill the raylet of a node. `start_nodes` replaces this function."""
    raise RuntimeError("there is only one node")


def _harm(pid: int, how: str, faults_s: list[float]) -> None:
    """Give a process its fault, and note when."""
    if how == "":
        faults_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    if how == "stop":
        faults_s.append(time.monotonic())
        return

    def kill_later() -> None:
        time.sleep(WAIT_S)
        faults_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill_later, daemon=True).start()


@contextmanager
def kill_at(victim: str, phase: str, step: int | None = None) -> Iterator[list[float]]:
    """Give the victim its fault once, after the driver has queued the phase's call for the
    `step`-th time. `victim` may begin with a placement, and `phase` may end with how. Yields a
    list, which then has the time."""
    case = Case.of(f"{victim}:{phase}")
    step = case.step if step is None else step
    faults_s: list[float] = []
    has_struck = False
    is_moving = False
    submit, add_role, change_over = RoleProxy._submit, WorkerGroup.add_role, Recovery.move
    seen: dict[str, int] = {}

    def strike(groups: Any) -> None:
        nonlocal has_struck
        if has_struck or any(pool not in groups for pool, _ in case.places):
            return
        has_struck = True
        processes = [groups[pool].processes[rank] for pool, rank in case.places]
        process = processes[0]
        if case.victim == "node":
            faults_s.append(time.monotonic())
            lose_node(process.node_id)
        elif case.victim == "driver":
            faults_s.append(time.monotonic())
            if not DRIVER_MARK.exists():
                DRIVER_MARK.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            for process in processes:
                _harm(process.pid, case.how, faults_s)

    def submit_and_kill(proxy: RoleProxy, name: str, spec: Any, args: Any, kwargs: Any) -> Any:
        future = submit(proxy, name, spec, args, kwargs)
        what = "validate" if kwargs.get("purpose") == "validate" else name
        seen[what] = seen.get(what, 0) + 1
        # Before the first step, snapshots of both trained roles are taken. These are not the ones
        # that are meant.
        is_first = what == "take_snapshot" and seen[what] <= 3
        if (
            what in PHASES[case.phase]
            and not is_first
            and (seen[what] >= step or what in ("validate", "save_checkpoint"))
        ):
            strike(proxy.group._all_groups)
        return future

    def add_role_and_kill(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
        made = add_role(group, *args, **kwargs)
        if case.phase == "start" or (case.phase == "move" and is_moving):
            strike(group._all_groups)
        return made

    def change_over_and_kill(recovery: Recovery, *args: Any) -> None:
        nonlocal is_moving
        is_moving = True
        change_over(recovery, *args)

    RoleProxy._submit, WorkerGroup.add_role = submit_and_kill, add_role_and_kill  # type: ignore[method-assign]
    Recovery.move = change_over_and_kill  # type: ignore[method-assign]
    try:
        yield faults_s
    finally:
        RoleProxy._submit, WorkerGroup.add_role = submit, add_role  # type: ignore[method-assign]
        Recovery.move = change_over  # type: ignore[method-assign]


@contextmanager
def noting_recoveries(story: Story) -> Iterator[None]:
    """Note when the driver begins to replace processes, which is when it knows of a death."""
    recover = Recovery.recover

    def note_and_recover(recovery: Recovery, *args: Any) -> int:
        story.recoveries_s.append(time.monotonic())
        return recover(recovery, *args)

    Recovery.recover = note_and_recover  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recovery.recover = recover  # type: ignore[method-assign]


def run(
    folder: Path,
    keys: Sequence[str],
    case: str | None = None,
    moves: dict[int, list[str]] | None = None,
    after_row: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Train, with the fault of a case if one is given. `after_row` is called when the row of a step
    is written."""
    shutil.rmtree(folder, ignore_errors=True)
    story = Story(moves, after_row)
    trainer = Trainer(load_config([], [*keys, f"trainer.default_local_dir={folder}"]))
    trainer.observer, story.trainer = story, trainer
    with noting_recoveries(story):
        if case is None:
            trainer.run()
            return outcome_of(folder, story, None)
        with kill_at(*case.split(":")) as faults_s:
            trainer.run()
    return outcome_of(folder, story, faults_s[0] if faults_s else None)


def outcome_of(folder: Path, story: Story, fault_s: float | None) -> Outcome:
    """What the run folder and the story tell about a run."""
    outcome = read_rows(folder)
    assert story.trainer is not None
    for name, group in story.trainer.deployment.trained_groups.items():
        outcome.num_loads[name] = group.num_calls[name, "load_checkpoint"]
    outcome.notices = [line for _, line in story.notices]
    outcome.timeline = [*story.timeline, (round(time.monotonic() - story.began_s, 2), "end")]
    if fault_s is None:
        return outcome
    seen_s = [at - fault_s for at in story.recoveries_s if at >= fault_s]
    told_s = [story.first_after(fault_s, words) for words in ("stall: ", "starting all processes")]
    noticed_s = [seconds for seconds in (*seen_s, *told_s) if seconds is not None]
    outcome.noticed_s = min(noticed_s, default=None)
    outcome.replaced_s = story.first_after(fault_s, "training resumes after step")
    # A row that was written before the processes were replaced is of a step before the fault.
    from_s = fault_s + (outcome.replaced_s or outcome.noticed_s or 0.0)
    outcome.seconds = min((at - fault_s for at in story.rows_s if at > from_s), default=None)
    return outcome


def read_rows(folder: Path) -> Outcome:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {key: one[key] for key in one if not key.startswith(MEASURED)}
        for one in lines
        if "restart" not in one and "move" not in one
    ]
    return Outcome(
        rows,
        [one["restart"] for one in lines if "restart" in one],
        None,
        moves=[one["move"] for one in lines if "move" in one],
    )


def run_driver(folder: Path, keys: list[str], case: str) -> Outcome:
    """Train with `rolepool train`, whose driver kills itself once in this phase."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = folder.with_suffix(".mark")
    mark.unlink(missing_ok=True)
    words = [*keys, f"trainer.default_local_dir={folder}"]
    environment = {**os.environ, "CHAOS_PHASE": case.partition(":")[2], "CHAOS_MARK": str(mark)}
    noticed_s = seconds = None
    with (folder.parent / "driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "train", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        rows, deadline = folder / "metrics.jsonl", time.time() + DRIVER_TIMEOUT_S
        while process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
            if noticed_s is None and mark.exists():
                text = (folder.parent / "driver.log").read_text(errors="replace")
                if "killed by signal" in text:
                    noticed_s = time.time() - mark.stat().st_mtime
            if seconds is None and mark.exists() and rows.exists():
                _, restarted, after = rows.read_text().rpartition('"restart"')
                if restarted and after.count("\n") > 1:
                    seconds = time.time() - mark.stat().st_mtime
        process.kill()
    if process.wait() != 0:
        raise RuntimeError((folder.parent / "driver.log").read_text()[-300:])
    outcome = read_rows(folder)
    outcome.noticed_s, outcome.seconds = noticed_s, seconds
    return outcome


def start_nodes() -> RayCluster:
    """This process on a cluster with two nodes and a spare one."""
    global lose_node
    ray.shutdown()
    cluster = RayCluster(
        initialize_head=True, head_node_args={"include_dashboard": False, **NODE_OPTIONS}
    )
    cluster.add_node(**NODE_OPTIONS)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

    def lose(node_id: str) -> None:
        cluster.add_node(**NODE_OPTIONS)  # replaces it
        (lost,) = (node for node in cluster.list_all_nodes() if node.node_id == node_id)
        lost.kill_raylet()

    lose_node = lose
    return cluster


def demo_keys(folder: Path, placement: str = "apart") -> list[str]:
    demo = make_demo(folder)
    paths = [f"data.train_files={demo.train_file}", f"data.val_files={demo.val_file}"]
    words = [*BASE_KEYS.split(), *PLACEMENTS[placement].split()]
    return [*words, *paths, f"actor_rollout_ref.model.path={demo.model}"]


# The jobs of a lane


class Work(NamedTuple):
    """What a lane needs to know about one run."""

    case: str
    folder: str
    device: str


def run_work(work: Work) -> dict[str, Any]:
    """Run a case, or an undisturbed run, in a lane. Returns the outcome as plain data."""
    began_s = time.monotonic()
    folder = Path(work.folder) / work.case.replace("/", "-").replace(":", "-")
    placement, _, rest = work.case.partition("/")
    is_twin = placement == UNDISTURBED
    case = None if is_twin else Case.of(work.case)
    name = rest if case is None else case.twin.partition("/")[2]
    keys = _keys_for(name, work, case)
    if work.device == "cuda":
        # Faults are the subject here. Compiling would take most of the time.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _use_ray(name, work.device)
    moves = None
    if name == "moves":
        moves = {step: PLACEMENTS[where].split() for step, where in MOVES.items()}
    prepared_s = time.monotonic() - began_s
    if case is not None and case.victim == "driver":
        if work.device == "cuda":  # a Ray of its own would count the real GPUs only
            keys = [*keys, f"ray_kwargs.ray_init.address={_address_of_ray()}"]
        outcome = run_driver(folder, keys, work.case)
    else:
        outcome = run(folder, keys, None if is_twin else work.case, moves)
    left = [path.name for path in Path("/dev/shm").glob(f"rolepool-{os.getpid()}-*")]
    return {**asdict(outcome), "left_in_shared_memory": left, "prepared_s": prepared_s}


def _keys_for(name: str, work: Work, case: Case | None) -> list[str]:
    placement = {"two-nodes": "apart", "moves": "together"}.get(name, name)
    keys = demo_keys(Path(work.folder) / "demo" / str(os.getpid()), placement)
    more = {"two-nodes": TWO_NODES, "moves": MOVES_KEYS}.get(name, "").split()
    if work.device == "cuda":
        more += ON_GPU.split()
    if case is not None and case.how == "stop":
        more += STALL_KEYS.split()
    return [*keys, *more]


def _address_of_ray() -> str:
    return str(ray.get_runtime_context().gcs_address)


_cluster: RayCluster | None = None
"""The nodes of this lane; None if it has only one."""


def _use_ray(name: str, device: str) -> None:
    """Connect this lane to the kind of Ray that the run needs."""
    global _cluster
    if name == "two-nodes":
        _cluster = _cluster or start_nodes()
        return
    if _cluster is not None:
        ray.shutdown()
        _cluster.shutdown()
        _cluster = None
    if not ray.is_initialized():
        lanes.start_ray(device)
    lanes.await_free_gpus()


# The table


def difference(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """How many values differ, the first of them, and the largest relative difference."""
    num_values, differing, largest = 0, list[str](), 0.0
    if len(rows) != len(expected):
        differing.append(f"{len(rows)} rows instead of {len(expected)}")
        largest = math.inf
    for row, other in zip(rows, expected, strict=False):
        for key in {**other, **row}:
            num_values += 1
            here, there = row.get(key), other.get(key)
            if here == there or (here != here and there != there):
                continue
            differing.append(f"step {other.get('step')} {key}: {here} instead of {there}")
            if isinstance(here, int | float) and isinstance(there, int | float):
                relative = abs(here - there) / max(abs(there), 1e-12)
                largest = max(largest, relative)
            else:
                largest = math.inf
    return {
        "num_values": num_values,
        "num_different": len(differing),
        "first": differing[:5],
        "largest_relative": largest,
    }


class Table:
    """Prints a line for each case as soon as its outcome and that of its twin are known, and keeps
    the file with all of them."""

    def __init__(self, cases: Sequence[str], device: str, file: Path | None) -> None:
        self._cases, self._file = cases, file
        self._outcomes: dict[str, lanes.Outcome] = {}
        self._printed: set[str] = set()
        self.report: dict[str, Any] = {"device": device, "cases": {}, "undisturbed": {}}
        self._start_s = time.monotonic()
        columns = f"{'noticed s':>10} {'replaced s':>10} {'next row s':>10} {'run s':>6}"
        print(f"{'case':<28} {'restarts':>8} {columns}  result", flush=True)

    def add(self, outcome: lanes.Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        if outcome.name.startswith(UNDISTURBED):
            self._add_twin(outcome)
        for name in self._cases:
            if name in self._outcomes and name not in self._printed:
                twin = self._outcomes.get(Case.of(name).twin)
                if twin is not None:
                    self._printed.add(name)
                    self._add_case(self._outcomes[name], twin)
        self.write()

    def _add_twin(self, outcome: lanes.Outcome) -> None:
        result: dict[str, Any] = outcome.result or {}
        self.report["undisturbed"][outcome.name] = {
            "problem": outcome.problem,
            "log": outcome.log,
            "seconds": outcome.seconds,
            "num_rows": len(result.get("rows", ())),
            "moves": result.get("moves"),
            "prepared_s": result.get("prepared_s"),
            "timeline": result.get("timeline"),
        }
        words = outcome.problem or f"{len(result['rows'])} rows"
        moves = [f"{move['seconds']:.1f} s" for move in result.get("moves") or ()]
        words += f"; moves took {', '.join(moves)}" if moves else ""
        print(f"{outcome.name:<28} {'':>8} {'':>32} {outcome.seconds:>6.0f}  {words}", flush=True)

    def _add_case(self, outcome: lanes.Outcome, twin: lanes.Outcome) -> None:
        result: dict[str, Any] = outcome.result or {}
        entry: dict[str, Any] = {
            "problem": outcome.problem,
            "log": outcome.log,
            "run_s": outcome.seconds,
            "noticed_s": result.get("noticed_s"),
            "replaced_s": result.get("replaced_s"),
            "next_row_s": result.get("seconds"),
            "restarts": result.get("restarts"),
            "moves": result.get("moves"),
            "notices": result.get("notices"),
            "left_in_shared_memory": result.get("left_in_shared_memory"),
            "prepared_s": result.get("prepared_s"),
            "timeline": result.get("timeline"),
        }
        if outcome.problem is None and twin.problem is None:
            entry["difference"] = difference(result["rows"], twin.result["rows"])
        entry["result"] = verdict_of(entry, twin)
        self.report["cases"][outcome.name] = entry
        seconds = [entry["noticed_s"], entry["replaced_s"], entry["next_row_s"]]
        cells = " ".join(f"{'-' if one is None else f'{one:.1f}':>10}" for one in seconds)
        num_restarts = "-" if entry["restarts"] is None else len(entry["restarts"])
        print(
            f"{outcome.name:<28} {num_restarts:>8} {cells} {outcome.seconds:>6.0f}  {entry['result']}",
            flush=True,
        )

    def write(self) -> None:
        self.report["total_s"] = time.monotonic() - self._start_s
        if self._file is not None:
            self._file.write_text(json.dumps(self.report, indent=1))

    def print_logs(self) -> None:
        """The end of the log of each run that did not end well."""
        for entries in (self.report["undisturbed"], self.report["cases"]):
            for name, entry in entries.items():
                if entry["log"]:
                    print(f"\n{name}: the end of its log:\n{entry['log'][-1500:]}")

    @property
    def num_good(self) -> int:
        return sum(entry["result"] == "equal" for entry in self.report["cases"].values())

    def print_summary(self) -> None:
        entries = self.report["cases"]
        waits = {
            name: entry["noticed_s"]
            for name, entry in entries.items()
            if name.endswith("+wait") and entry["noticed_s"] is not None
        }
        if waits:
            worst = max(waits, key=lambda name: waits[name])
            print(
                f"a death while other ranks wait was noticed within {waits[worst]:.1f} s ({worst}; "
                f"{len(waits)} cases; goal: {NOTICED_WITHIN_S:.0f} s)"
            )
        rows_s = sorted(entry["next_row_s"] for entry in entries.values() if entry["next_row_s"])
        if rows_s:
            print(f"from the fault to the next row: {rows_s[0]:.1f} to {rows_s[-1]:.1f} s")
        self._print_starts()
        print(
            f"{self.num_good} of {len(self._cases)} cases went on and ended with equal metrics, "
            f"in {self.report['total_s']:.0f} s"
        )

    def _print_starts(self) -> None:
        """How long runs took from the first process to the first row, and all in all."""
        entries = [*self.report["undisturbed"].values(), *self.report["cases"].values()]
        firsts_s, ends_s = list[float](), list[float]()
        for entry in entries:
            for seconds, what in entry["timeline"] or ():
                if what == "row 1":
                    firsts_s.append(seconds)
                elif what == "end":
                    ends_s.append(seconds)
        if firsts_s and ends_s:
            print(
                f"medians of {len(ends_s)} runs: first row after {statistics.median(firsts_s):.1f} s, "
                f"end after {statistics.median(ends_s):.1f} s"
            )


def verdict_of(entry: dict[str, Any], twin: lanes.Outcome) -> str:
    """`equal`, or what went wrong."""
    if entry["problem"] is not None:
        return f"ended: {entry['problem'][-300:]!r}"
    if twin.problem is not None:
        return f"no undisturbed run to compare with: {twin.problem[-200:]!r}"
    if entry["next_row_s"] is None:
        return "no fault, or no row after it"
    if entry["left_in_shared_memory"]:
        return f"left behind: {entry['left_in_shared_memory']}"
    differing = entry["difference"]
    if differing["num_different"]:
        return (
            f"DIFFERENT: {differing['num_different']} of {differing['num_values']} values, by at most "
            f"{differing['largest_relative']:.1e}; {differing['first'][0]}"
        )
    return "equal"


def jobs_of(cases: Sequence[str], folder: Path, device: str) -> list[Job]:
    """The undisturbed runs of all placements are first, because without them no case can be
    compared."""
    twins = dict.fromkeys(Case.of(case).twin for case in cases)
    names = [*twins, *dict.fromkeys(cases)]
    return [Job(name, Work(name, str(folder), device)) for name in names]


def default_cases(device: str) -> list[str]:
    if device == "cuda":
        return GPU_CASES.split()
    phases = [phase for phase in PHASES if phase != "move"]
    return [f"{victim}:{phase}" for victim in VICTIMS for phase in phases] + CPU_CASES.split()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="such as critic:update,tp/rank1:generation+wait")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--at-once", type=int, help="runs side by side; default: 8 on a GPU, else 1"
    )
    parser.add_argument("--limit", type=float, default=36_000, help="seconds for all cases")
    parser.add_argument("--case-limit", type=float, default=300, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--logs", type=Path, help="folder for logs and run folders")
    options = parser.parse_args()
    cases = options.cases.split(",") if options.cases else default_cases(options.device)
    for case in cases:
        try:
            Case.of(case)
        except ValueError as error:
            parser.error(f"--cases: {error}")
    if options.device == "cuda":
        lanes.share_one_gpu()
        if any(Case.of(case).victim == "node" for case in cases):
            parser.error("--cases: the victim node needs --device cpu")
    table = Table(cases, options.device, options.json)
    with tempfile.TemporaryDirectory() as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        run_jobs(
            jobs_of(cases, folder, options.device),
            run_work,
            num_lanes=options.at_once or LANES_OF[options.device],
            folder=folder,
            limit_s=options.limit,
            job_limit_s=options.case_limit,
            on_outcome=table.add,
        )
    table.write()
    table.print_logs()
    table.print_summary()
    return 0 if table.num_good == len(cases) else 1


if __name__ == "__main__":
    if "CHAOS_PHASE" in os.environ:  # as `rolepool`, whose driver is the victim
        with kill_at("driver", os.environ["CHAOS_PHASE"]):
            sys.exit(cli.main())
    sys.exit(main())
