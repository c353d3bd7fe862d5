"""What a run starts before the driver imports torch and reads its data: Ray, and all processes.

Owns which modules a process imports while it starts. Needs no torch itself.
"""

from collections.abc import Iterator
from pathlib import Path

from rolepool.cluster.begin import Begun, begin
from rolepool.config import Config
from rolepool.config.fitting import num_gpus
from rolepool.config.functions import ENGINES
from rolepool.config.model_files import ShapeUnknown, read_model_file
from rolepool.data.reward_signatures import UserFunction
from rolepool.metrics.spans import RULE_POOL
from rolepool.placement import Plan, Role, build_plan
from rolepool.placement.roles import ROLE_SPECS, model_of
from rolepool.trainer.helpers import helpers_of

OWN = "rolepool."
"""How the names of rolepool's own modules begin. Modules of users are imported when their role is
built, because they may read what the process is told before that, such as its rank."""

FOR_GPUS = ("torch._inductor.compile_fx", "rolepool.rollout.kernels")
"""What compiles models, and what generates on a GPU. They would be imported in the first step."""


def may_begin_early(config: Config) -> bool:
    """Whether the run begins in a new folder, without a checkpoint. In any other case the run may
    have nothing left to do, or not fit the folder or the checkpoint. That is found out with torch,
    and before anything is started."""
    if config.trainer.resume_mode == "resume_path":
        return False
    folder = Path(config.trainer.default_local_dir).expanduser()
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:  # what is wrong with it is said later
        return False


def begin_early(config: Config, reward: UserFunction | None = None) -> Begun:
    """Start all processes of a run, without waiting for them. Raises ConfigError if the reward
    function cannot be loaded, and PlacementError if Ray or the resources of the plan are not
    there."""
    plan = build_plan(config)
    ray_init = config.ray_kwargs.ray_init
    # With MPS, a process must not use its GPU before it is told how.
    on_gpu = _has_gpus(config) and not plan.mps
    return begin(
        plan,
        address=ray_init.address,
        num_cpus=ray_init.num_cpus,
        timeout_s=config.placement.timeout_s,
        helpers=helpers_of(config, plan, reward),
        modules=modules_of(config, plan, on_gpu=on_gpu),
    )


def _has_gpus(config: Config) -> bool:
    device = config.trainer.device
    return device == "cuda" or (device == "auto" and num_gpus() > 0)


def modules_of(config: Config, plan: Plan, *, on_gpu: bool = False) -> dict[str, list[str]]:
    """The modules that the roles of each pool need, without those of users. `on_gpu` says whether
    the processes may use GPUs as soon as they start."""
    modules: dict[str, list[str]] = {name: [] for name in [*plan.pools, RULE_POOL]}
    for role, spec in ROLE_SPECS.items():
        if role in plan.roles:
            pool = plan.roles[role]
            modules[pool] += _modules_of_role(config, role)
            if on_gpu:
                modules[pool] += FOR_GPUS
        elif spec.rule_worker is not None:
            modules[RULE_POOL] += _own_module(spec.rule_worker)
    engine = config.actor_rollout_ref.rollout.engine
    modules[plan.roles[Role.Rollout]] += _own_module(ENGINES.get(engine, ""))
    return {name: list(dict.fromkeys(names)) for name, names in modules.items()}


def _modules_of_role(config: Config, role: Role) -> Iterator[str]:
    yield from _own_module(ROLE_SPECS[role].worker)
    path, overrides = model_of(config, role)
    try:
        kind = str(read_model_file(path, overrides).get("model_type"))
    except ShapeUnknown:  # a model that is not on disk yet
        return
    # The name that the files of a model have in transformers. For a few models it is another one;
    # then the module is imported when the model is loaded.
    name = kind.replace("-", "_")
    yield f"transformers.models.{name}.modeling_{name}"


def _own_module(reference: str) -> list[str]:
    """The module of `module:name`, if it is one of rolepool."""
    module, _, _ = reference.partition(":")
    return [module] if module.startswith(OWN) else []
