"""Everything that can be checked about a run before torch is imported: models, files, reward
function, GPUs.

Owns that all problems are reported together, also beside problems with keys and values. The checks
themselves are in `config`, `placement.checks`, `config.model_files` and `data.files`.
"""

import sys
from collections.abc import Collection, Iterator

from rolepool.config import Config, Draft, LoadedConfig
from rolepool.config.base import lines_of
from rolepool.config.fitting import num_gpus
from rolepool.config.model_files import ShapeUnknown, read_model_file, why_no_model
from rolepool.config.sources import is_demo_to_make
from rolepool.data.files import find_problems as find_data_problems
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import UserFunction
from rolepool.errors import ConfigError
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems, find_warnings
from rolepool.placement.roles import ROLE_SPECS, Role, model_of
from rolepool.trainer.paper import check_step


def check_start(
    loaded: LoadedConfig,
    reward: UserFunction | None = None,
    *more: str,
) -> list[str]:
    """Raise ConfigError with all problems, also with `more` that were found before, or return the
    warnings, a line for each."""
    checked(Draft(loaded, more), reward)
    config = loaded.config
    problems_of_plan = lines_of(_plan(config))
    problems = _problems(loaded, reward, problems_of_plan)
    # Two checks may find the same problem.
    ConfigError.raise_if_any(dict.fromkeys(problems))
    on_cpus = config.trainer.device != "cuda" and not _gpus_for(config)
    plan = build_plan(config)
    return list(find_warnings(config, plan, on_cpus=on_cpus))


def checked(draft: Draft, reward: UserFunction | None = None) -> LoadedConfig:
    """The config of a draft without problems. If it has some, ConfigError also has all others that
    training would have."""
    more: list[str] = []
    if draft.problems:
        loaded = draft.loaded
        problems_of_plan = lines_of(_plan_as_written(loaded.config))
        more.extend(_problems(loaded, reward, problems_of_plan))
    return draft.checked(*more)


def named_files_problems(loaded: LoadedConfig) -> list[str]:
    """Problems with the models and files that the user has named. The config may be that of a
    draft.

    Models without weights are no problem here, because plans are also made with a config.json
    alone.
    """
    config = loaded.config
    names = loaded.set_keys
    paths: set[str | None] = set()
    checks = (_named_model(config, role, paths, names) for role in ROLE_SPECS)
    return [*lines_of(*checks), *find_data_problems(config, names)]


def _problems(
    loaded: LoadedConfig, reward: UserFunction | None, problems_of_plan: list[str]
) -> Iterator[str]:
    config = loaded.config
    paths: set[str | None] = set()
    checks = (_model(config, role, paths) for role in ROLE_SPECS)
    yield from lines_of(*checks)
    yield from loaded.why_not_trained()
    yield from problems_of_plan
    yield from lines_of(_step(config))
    yield from find_data_problems(config)
    yield from lines_of(_given_reward(config, reward))


def _model(config: Config, role: Role, paths: set[str | None]) -> Iterator[str]:
    """A role that the run needs has a model. `paths` are the models that were looked at already."""
    spec = ROLE_SPECS[role]
    if spec.why_unused(config) is not None:
        return
    path, _ = model_of(config, role)
    problem = why_no_model(f"{spec.model}.path", path)
    if problem is not None and path not in paths and not is_demo_to_make(path):
        yield problem
    paths.add(path)


def _named_model(
    config: Config, role: Role, paths: set[str | None], names: Collection[str]
) -> Iterator[str]:
    """A model that the user has named exists, or at least its config.json does."""
    key = f"{ROLE_SPECS[role].model}.path"
    if key not in names:
        return
    path, overrides = model_of(config, role)
    try:
        read_model_file(path, overrides)
    except ShapeUnknown:
        yield from _model(config, role, paths)


def _plan(config: Config) -> Iterator[str]:
    """The roles can be placed, all counts fit, and this machine has what the plan needs."""
    plan = build_plan(config)
    yield from find_problems(config, plan)
    yield from _capacity(config, plan, _gpus_for(config))


def _plan_as_written(config: Config) -> Iterator[str]:
    """The same, unless the placement is chosen later."""
    if not config.placement.chooses:
        yield from _plan(config)


def _gpus_for(config: Config) -> int:
    return 0 if config.trainer.device == "cpu" else num_gpus()


def _capacity(config: Config, plan: Plan, gpus: int) -> Iterator[str]:
    """Whether this machine has what the plan needs. What a running Ray has, only Ray knows."""
    uses_running_ray = config.ray_kwargs.ray_init.address is not None
    if uses_running_ray or _is_connected_to_ray():
        return
    if any(slot.node > 0 for slot in plan.slots):
        fix = "start Ray on every node and set ray_kwargs.ray_init.address (docs/multinode.md)"
        yield f"trainer.nnodes={config.trainer.nnodes}: the Ray that this run starts has one node; {fix}"
    if config.trainer.device == "cuda" and not gpus:
        yield "trainer.device=cuda: this machine has no GPU; set trainer.device=cpu, or train on a machine with a GPU"
    if gpus and any(slot.gpu >= gpus for slot in plan.slots):
        plural = "s" if gpus > 1 else ""
        there = f"this machine has {gpus} GPU{plural}"
        yield f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: {there}; use at most {gpus}"


def _is_connected_to_ray() -> bool:
    """Whether this program has connected to a Ray, which the run will use then. Ray is not imported
    here, because that is slow."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _step(config: Config) -> Iterator[str]:
    """The step can generate ahead, if the config asks for it. The function that looks at it raises
    ConfigError."""
    check_step(config)
    yield from ()


def _given_reward(config: Config, reward: UserFunction | None) -> Iterator[str]:
    """A function that a Python program gives can be called and is used. The function that looks at
    it raises ConfigError."""
    if reward is None:
        return
    if config.reward_model.enable:
        yield "reward: it is not used, because reward_model.enable=true; remove one of the two"
    else:
        load_reward_function(config, reward)
