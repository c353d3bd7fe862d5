"""Checks of a plan, and advice for one that does not fit in memory.

A check is about counts: batch sizes, tensor parallelism and sharding must divide evenly over each
role's pool, and sequences must not be longer than the models allow. A failed check is certain and
stops a run. Memory is only estimated (in `estimate`). Advice is a list of overrides that were tried
on the estimate and help; none is a guess.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from rolepool.config import Config, model_files, show
from rolepool.config.base import lines_of
from rolepool.config.fitting import num_cores
from rolepool.config.functions import (
    ADV_ESTIMATORS,
    ENGINES,
    import_environment,
    import_object,
    may_import,
)
from rolepool.config.rules import contradictions, divisor_near
from rolepool.config.stop_tokens import read_stop_tokens
from rolepool.errors import RolepoolError
from rolepool.placement.estimate import (
    GIB,
    SHARED_MEMORY,
    MemoryEstimate,
    estimate_memory,
    peak_by_role,
)
from rolepool.placement.parallel import WHOLE_POOL, shard_key
from rolepool.placement.plan import Plan
from rolepool.placement.roles import ROLE_SPECS, Role, longest_row, model_of
from rolepool.placement.strategies import build_plan
from rolepool.placement.weight_ways import WeightWay, weight_way
from rolepool.units import show_bytes

MAX_ADVICE = 4
MAX_COMBINED = 4
"""Most changes that are combined if no single one is enough."""
MIN_SAVED_BYTES = GIB // 10
"""A smaller saving does not show in the printed figures."""

Changes = dict[str, object]
"""New values by key."""
Replan = Callable[[Config], Plan]
Trials = Callable[[Iterable[Changes]], Iterator[tuple[Changes, MemoryEstimate]]]


# Checks


def find_problems(config: Config, plan: Plan) -> list[str]:
    """One line for each check that fails. An empty list means that the plan can run."""

    def of_each_role(check: Callable[[Config, Plan, Role], Iterator[str]]) -> list[Iterator[str]]:
        """Each role has a check of its own: if it reads an unknown value, it ends, and those of the
        other roles continue."""
        return [check(config, plan, role) for role in plan.roles]

    return lines_of(
        *of_each_role(_groups),
        *of_each_role(_micro_batches),
        *of_each_role(partial(_batches, reported=set())),
        _lengths(config, plan),
        _engine(config),
        _stop_tokens(config),
        *of_each_role(_packing),
        _environment(config),
        _users_code(config, "actor_rollout_ref.rollout.name"),
        _users_code(config, "actor_rollout_ref.rollout.multi_turn.format"),
        _mps(config, plan),
        _weights(config, plan),
    )


def plan_problems(config: Config) -> list[str]:
    """Why a config cannot be planned, or which checks its plan fails. A config that was not read
    without errors has keys without values; what depends on them is not checked."""
    return lines_of(_problems_of_plan(config))


def _problems_of_plan(config: Config) -> Iterator[str]:
    yield from find_problems(config, build_plan(config))


def find_warnings(config: Config, plan: Plan, *, on_cpus: bool) -> Iterator[str]:
    """One line for each setting that can run, but most likely is not what the user wants."""
    name = config.algorithm.adv_estimator
    rollout = config.actor_rollout_ref.rollout
    compares_responses = "index" in ADV_ESTIMATORS.get(name, ())
    if rollout.n == 1 and compares_responses:
        reason = f"algorithm.adv_estimator={name} compares the responses to one prompt, and there is only one"
        yield f"actor_rollout_ref.rollout.n=1: {reason}; set it to 2 or more, for example 8"
    num_processes = sum(pool.counts_by_node.get(0, 0) for pool in plan.pools.values())
    cores = num_cores()
    if on_cpus and num_processes > cores:
        plural = "s" if cores > 1 else ""
        setting = f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
        reason = f"{num_processes} processes share {cores} CPU core{plural} and will be slow"
        yield f"{setting}: {reason}; use fewer processes"
    model = config.actor_rollout_ref.model.path
    # A chat template is a program.
    if not rollout.ignore_eos and may_import(str(model)):
        with suppress(RolepoolError):  # a problem of `find_problems`
            yield from read_stop_tokens(config).warnings()


def find_snapshot_warnings(needed: int) -> Iterator[str]:
    """A line if the snapshots of a run on this machine, `needed` bytes, do not fit in its shared
    memory."""
    free = 0
    if SHARED_MEMORY.exists():
        free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        what = f"snapshots need {show_bytes(needed)} of {SHARED_MEMORY}, and {show_bytes(free)} are free"
        effect = "none is taken until there is room, and if a process dies, training resumes from the last checkpoint"
        yield f"{what}; {effect}"


def _groups(config: Config, plan: Plan, role: Role) -> Iterator[str]:
    """A tensor-parallel group stays inside a node; a sharding group may span the nodes of its
    pool."""
    spec = ROLE_SPECS[role]
    pool_name = plan.roles[role]
    pool = plan.pools[pool_name]
    if spec.tensor_parallel is not None:
        distinct_counts = set(pool.counts_by_node.values())
        yield from _divides(
            config,
            spec.tensor_parallel,
            counts=sorted(distinct_counts),
            where="per node",
            pool_name=pool_name,
        )
    key = shard_key(spec)
    if key is not None:
        yield from _divides(
            config,
            key,
            counts=[pool.world_size],
            where="in all",
            pool_name=pool_name,
        )


def _divides(
    config: Config,
    key: str,
    counts: Sequence[int],
    where: str,
    pool_name: str,
) -> Iterator[str]:
    """A size of groups of ranks must divide all of these numbers of processes."""
    size: int = config.at(key)
    largest = math.gcd(*counts)
    if size == WHOLE_POOL or largest % size == 0:
        return
    divisors = [str(number) for number in range(1, largest + 1) if largest % number == 0]
    choices = " or ".join(divisors)
    processes = f"{', '.join(map(str, counts))} {where}"
    rule = f"must divide the number of processes of {pool_name} ({processes})"
    yield f"{key}={size}: {rule}; use {choices}"


def _micro_batches(config: Config, plan: Plan, role: Role) -> Iterator[str]:
    """A role that is trained splits the sequences of a mini-batch on each process into equal
    micro-batches."""
    spec = ROLE_SPECS[role]
    pool = plan.roles[role]
    parts = plan.dims_of(config, role).dp
    for operation, keys in spec.batched:
        if not operation.trains or config.at(keys.by_tokens):
            continue
        num_rows = config.rows_of_mini_batch(config.at(spec.section))
        per_gpu, rest = divmod(num_rows, parts)
        size: int | None = config.at(keys.rows)
        # If the mini-batch cannot be split into `parts`, `_batches` says so.
        if size is None or rest or per_gpu <= size or per_gpu % size == 0:
            continue
        rows = f"the {per_gpu} sequences of a mini-batch"
        processes = f"each of the {parts} processes of {pool}"
        fix = f"use {divisor_near(per_gpu, size)}"
        yield f"{keys.rows}={size}: must divide {rows} on {processes}; {fix}"


def _batches(
    config: Config,
    plan: Plan,
    role: Role,
    reported: set[tuple[str, int]],
) -> Iterator[str]:
    """Every role splits the batch over its ranks, and a role that is trained splits every
    mini-batch.

    `reported` are the keys that have a line already, each with a number of parts.
    """
    num_samples = config.actor_rollout_ref.rollout.n
    mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    num_mini_batches = max(1, config.data.train_batch_size // mini_batch_size)
    spec = ROLE_SPECS[role]
    pool = plan.roles[role]
    parts = plan.dims_of(config, role).dp
    # The batch sizes that are offered can also be split into the same number of mini-batches.
    multiples = {"data.train_batch_size": num_mini_batches}
    begins_step = spec.rule_worker is not None or any(
        operation.generates for operation in spec.operations
    )
    if begins_step and config.prompts_of_generation != config.data.train_batch_size:
        multiples["data.gen_batch_size"] = 1
    if spec.is_trained:
        multiples[f"{spec.section}.ppo_mini_batch_size"] = 1
    for key, multiple in multiples.items():
        prompts: int = config.at(key)
        num_sequences = prompts * num_samples
        if num_sequences % parts == 0 or (key, parts) in reported:
            continue
        reported.add((key, parts))
        # The prompts must be a multiple of `step`: the next ones below and above are offered.
        step = parts // math.gcd(parts, num_samples) * multiple
        below = prompts // step * step
        sizes = f"{below} or {below + step}" if below else f"{step}"
        batch = f"{num_sequences} sequences cannot be split into {parts} equal parts"
        yield f"{key}={prompts}: {batch} for {role} in {pool}; use {sizes}"


def _lengths(config: Config, plan: Plan) -> Iterator[str]:
    """Every model must have a position for each token of the longest row that it reads."""
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    checked_paths: set[str | None] = set()
    for role in plan.roles:
        spec = ROLE_SPECS[role]
        path, overrides = model_of(config, role)
        # The first role of each path decides: a critic that starts from the policy's folder has
        # the policy's overrides, too.
        if path in checked_paths:
            continue
        checked_paths.add(path)
        # Models that are not on disk yet, or that have no limit.
        with suppress(ValueError, TypeError):
            limit = model_files.num_positions(model_files.read_model_file(path, overrides))
            if longest_row(config, role) <= limit:
                continue
            tokens = f"with data.max_response_length={response} a sequence may have {prompt + response} tokens"
            model = f"{spec.model}.path={path} has {limit} positions (max_position_embeddings)"
            fix = f"use at most {limit} together"
            if spec.max_length is not None:
                fix += f", or set {spec.max_length}={limit}"
            yield f"data.max_prompt_length={prompt}: {tokens}, and {model}; {fix}"


def _engine(config: Config) -> Iterator[str]:
    """The rollout engine must be able to run the policy, and to split it over its tensor-parallel
    ranks. Engines that cannot be trained with yet are reported by
    `LoadedConfig.why_not_trained`."""
    model = config.actor_rollout_ref.model
    keys = config.actor_rollout_ref.rollout
    reasons = engines_of(config)
    reason = reasons.get(keys.engine)
    if reason is not None:
        able = [name for name, problem in reasons.items() if problem is None]
        if able:
            fix = f"set actor_rollout_ref.rollout.name={able[0]}"
        else:
            fix = "choose another model"
        yield f"actor_rollout_ref.model.path={model.path}: {reason}; {fix}"
    elif keys.engine == "native":
        with suppress(ValueError):  # models that are not on disk yet
            shape = model_files.read_shape(model.path, model.override_config)
            problem = model_files.why_not_parallel(
                shape.num_heads,
                shape.num_kv_heads,
                shape.intermediate_size,
                keys.tensor_model_parallel_size,
            )
            if problem is not None:
                yield problem


def engines_of(config: Config) -> dict[str, str | None]:
    """For each rollout engine, why it cannot run the policy, or None if it can. Empty if the model
    is not on disk."""
    with suppress(model_files.ShapeUnknown):
        content = model_files.read_model_file(*model_of(config, Role.Rollout))
        return {name: model_files.why_not_run(name, content) for name in ENGINES}
    return {}


def _stop_tokens(config: Config) -> Iterator[str]:
    """The files of the model name end tokens, and those of the user are tokens of the model."""
    read_stop_tokens(config)
    written = config.actor_rollout_ref.rollout.stop_token_ids
    model = config.actor_rollout_ref.model
    with suppress(model_files.ShapeUnknown):
        vocab_size = model_files.read_shape(model.path, model.override_config).vocab_size
        wrong = [number for number in written if number >= vocab_size]
        if wrong:
            reason = f"the model has {vocab_size} tokens, numbered from 0; remove {show(wrong)}"
            yield f"actor_rollout_ref.rollout.stop_token_ids={show(written)}: {reason}"


def _packing(config: Config, plan: Plan, role: Role) -> Iterator[str]:
    """Models that are not known to keep packed rows apart must use padded rows."""
    spec = ROLE_SPECS[role]
    key = f"{spec.model}.use_remove_padding"
    if not (spec.can_pack and spec.batched and config.at(key)):
        return
    path, overrides = model_of(config, role)
    with suppress(model_files.ShapeUnknown):  # models that are not on disk yet
        model_file = model_files.read_model_file(path, overrides)
        kind = model_file.get("model_type")
        if kind is not None and kind not in model_files.PACKABLE_TYPES:
            problem = f"models of type {kind} cannot compute packed rows here"
            yield f"{key}=true: {problem}; set {key}=false"


def _environment(config: Config) -> Iterator[str]:
    """The environment can be imported; if not, the importing function raises ConfigError."""
    if may_import(str(config.environment.path or config.environment.name)):
        import_environment(config.environment.path, config.environment.name)
    # A check is a generator, also one without lines of its own.
    yield from ()


def _users_code(config: Config, key: str) -> Iterator[str]:
    """What a key names as `module:name` can be imported; if not, the importing function raises
    ConfigError."""
    name: str = config.at(key)
    if ":" in name and may_import(name):
        import_object(key, name)
    yield from ()


def _mps(config: Config, plan: Plan) -> Iterator[str]:
    on_cpus = config.trainer.device == "cpu"
    if config.placement.mps and (on_cpus or not plan.sharing_pools):
        fix = "remove this key, or use GPUs and set a share (placement.split.share=0.5)"
        yield f"placement.mps=true: MPS is for pools that share GPUs, and there are none; {fix}"


def _weights(config: Config, plan: Plan) -> Iterator[str]:
    """Only a process group can send changes. Between pools that share GPUs there is none."""
    keys = config.actor_rollout_ref.rollout
    way = weight_way(config, plan, on_gpus=plan.device != "cpu")
    if keys.weights == "delta" and way is WeightWay.SHARED_MEMORY:
        fix = "use auto, or give the rollout GPUs of its own"
        yield (
            "actor_rollout_ref.rollout.weights=delta: actor and rollout share a GPU, which NCCL "
            f"refuses, so all weights would go through shared memory; {fix}"
        )


# Advice


class Advice(NamedTuple):
    """Changes, and the most bytes by which a pool would still be over its limit (0: everything
    fits)."""

    changes: Changes
    excess: int

    @property
    def override(self) -> str:
        """The changes as arguments of the command line."""
        return " ".join(f"{key}={show(value)}" for key, value in self.changes.items())


def advise(
    config: Config,
    plan: Plan,
    estimate: MemoryEstimate,
    gpu_memory_bytes: int | None,
    replan: Replan,
) -> list[Advice]:
    """The changes with which the plan comes closest to fitting, best first and one per key; empty
    if it fits.

    `replan` makes the plan of a changed config on the same nodes. If no single change is enough,
    changes are added one by one, the most helpful first, and the sum is advised if everything fits
    with it.
    """
    if not estimate.excess:
        return []
    try_changes = _trials(config, gpu_memory_bytes, replan, find_problems(config, plan))
    candidates = list(_candidates(config, plan))
    # A pool with a role of unknown memory has no estimate, so another division could hide that it
    # does not fit.
    if not estimate.unknown:
        candidates += _divisions(config)

    def helpful(base: Advice) -> list[Advice]:
        """What saves enough on top of `base`, best first."""
        most = max(0, base.excess - MIN_SAVED_BYTES)
        better: list[Advice] = []
        combined = ({**base.changes, **changes} for changes in candidates)
        for changes, trial in try_changes(combined):
            excess = trial.excess
            if excess <= most:
                better.append(Advice(changes, excess))
        return sorted(better, key=lambda advice: advice.excess)

    nothing_changed = Advice({}, estimate.excess)
    best_first = helpful(nothing_changed)
    # The best value for each key, or for each set of keys that are changed together.
    singles: dict[tuple[str, ...], Advice] = {}
    for advice in best_first:
        keys = tuple(advice.changes)
        singles.setdefault(keys, advice)
    for _ in range(MAX_COMBINED - 1):
        if best_first and best_first[0].excess:
            best_first = helpful(best_first[0])
    all_advice = list(singles.values())
    if best_first:
        best = best_first[0]
        is_new = tuple(best.changes) not in singles
        if not best.excess and is_new:
            all_advice.insert(0, best)
    return all_advice[:MAX_ADVICE]


def roomier_divisions(config: Config, role: Role) -> list[str]:
    """The override that divides the same GPUs so that `role` needs less memory and no pool has a
    higher peak than now.

    For a role that ran out of memory, whatever the estimate said. At most one: the one with the
    lowest peak.
    """
    # With memory for nothing, the estimate is the least that every role needs.
    try_changes = _trials(config, 0, build_plan, [])
    now = Peaks(0, 0)
    best: tuple[int, str] | None = None
    for changes, trial in try_changes([{}, *_divisions(config)]):
        if trial.unknown:
            continue
        peaks = _peaks_of(trial, role)
        if not changes:
            now = peaks
            continue
        override = Advice(changes, 0).override
        saves_enough = peaks.of_role <= now.of_role - MIN_SAVED_BYTES
        if peaks.highest <= now.highest and saves_enough:
            candidate = (peaks.highest, override)
            if best is None or candidate < best:
                best = candidate
    if best is None:
        return []
    _, override = best
    return [override]


class Peaks(NamedTuple):
    """Peak memory in bytes: of the fullest pool, and of the pools while one role computes."""

    highest: int
    of_role: int


def _peaks_of(estimate: MemoryEstimate, role: Role) -> Peaks:
    highest = 0
    of_role = 0
    for pool in estimate.pools.values():
        highest = max(highest, pool.peak)
        of_role = max(of_role, peak_by_role(pool.roles).get(role, 0))
    return Peaks(highest, of_role)


def _trials(
    config: Config,
    gpu_memory_bytes: int | None,
    replan: Replan,
    accepted: Sequence[str],
) -> Trials:
    """A function that estimates a config with changes. It skips changes that contradict other keys,
    or that fail a check which is not in `accepted`."""
    # Plans by placement, because a plan of many nodes takes time and no other change moves a role.
    plans: dict[str, Plan | None] = {}

    def try_changes(candidates: Iterable[Changes]) -> Iterator[tuple[Changes, MemoryEstimate]]:
        for changes in candidates:
            changed = config
            for key, value in changes.items():
                changed = changed.with_value(key, value)
            placement = changed.placement.model_dump_json()
            if placement not in plans:
                plans[placement] = None
                with suppress(RolepoolError):
                    plans[placement] = replan(changed)
            plan = plans[placement]
            if plan is None or contradictions(changed):
                continue
            problems = set(find_problems(changed, plan))
            if problems.difference(accepted):
                continue
            estimate = estimate_memory(changed, plan, gpu_memory_bytes)
            yield changes, estimate

    return try_changes


def _candidates(config: Config, plan: Plan) -> Iterator[Changes]:
    """Smaller micro-batches, recomputed activations, offload, tensor parallelism, a smaller
    cache."""
    specs = [ROLE_SPECS[role] for role in plan.roles]
    for spec in specs:
        for _, keys in spec.batched_in(config):
            key = keys.tokens if config.at(keys.by_tokens) else keys.rows
            size: int = config.at(key) or 1
            while size > 1:
                size //= 2
                yield {key: size}
    for spec in specs:
        if spec.is_trained:
            yield {f"{spec.model}.enable_gradient_checkpointing": True}
            yield {f"{spec.fsdp}.optimizer_offload": True}
        if spec.fsdp is not None:
            yield {f"{spec.fsdp}.param_offload": True}
        if spec.tensor_parallel is not None:
            yield {f"{spec.section}.free_cache_engine": True}
            for num_ranks in (2, 4, 8):
                yield {spec.tensor_parallel: num_ranks}
            for part in (0.4, 0.3, 0.2):
                yield {f"{spec.section}.gpu_memory_utilization": part}


def _divisions(config: Config) -> Iterator[Changes]:
    """Other ways to divide the same GPUs."""
    yield {"placement.strategy": "standard"}
    yield {"placement.strategy": "split"}
    most = min(config.trainer.n_gpus_per_node, 9)
    for actor_gpus in range(1, most):
        yield {
            "placement.strategy": "split",
            "placement.split.actor_gpus_per_node": actor_gpus,
        }
