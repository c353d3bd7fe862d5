"""Everything that can be checked about a run before torch is imported: models, files, reward function, GPUs.

Owns that all problems are reported together. The checks themselves are in `placement.checks`, `config.model_files` and
`data.files`.
"""

from collections.abc import Iterator

from rolepool.config import Config
from rolepool.config.fitting import num_gpus
from rolepool.config.model_files import why_no_model
from rolepool.data.files import find_problems as find_data_problems
from rolepool.errors import ConfigError, collected
from rolepool.placement import Plan, build_plan
from rolepool.placement.checks import find_problems, find_warnings
from rolepool.placement.roles import ROLE_SPECS, model_of


def check_start(config: Config) -> list[str]:
    """Raise ConfigError with all problems, or return the warnings, a line for each."""
    problems: list[str] = []
    gpus = 0 if config.trainer.device == "cpu" else num_gpus()
    with collected(problems):
        plan = build_plan(config)
        key_of = {model_of(config, role)[0]: f"{ROLE_SPECS[role].model}.path" for role in reversed(plan.roles)}
        problems += filter(None, (why_no_model(key, path) for path, key in reversed(key_of.items())))
        problems += [*find_problems(config, plan), *_capacity(config, plan, gpus)]
    problems += find_data_problems(config)
    ConfigError.raise_if_any(dict.fromkeys(problems))
    return list(find_warnings(config, plan, on_cpus=config.trainer.device != "cuda" and not gpus))


def _capacity(config: Config, plan: Plan, gpus: int) -> Iterator[str]:
    """Whether this machine has what the plan needs. What a running Ray has, only Ray knows."""
    if config.ray_kwargs.ray_init.address is not None:
        return
    if any(slot.node > 0 for slot in plan.slots):
        fix = "start Ray on every node and set ray_kwargs.ray_init.address (docs/multinode.md)"
        yield f"trainer.nnodes={config.trainer.nnodes}: the Ray that this run starts has one node; {fix}"
    if config.trainer.device == "cuda" and not gpus:
        yield "trainer.device=cuda: this machine has no GPU; set trainer.device=cpu, or train on a machine with a GPU"
    if gpus and any(slot.gpu >= gpus for slot in plan.slots):
        there = f"this machine has {gpus} GPU{'s' if gpus > 1 else ''}"
        yield f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: {there}; use at most {gpus}"
