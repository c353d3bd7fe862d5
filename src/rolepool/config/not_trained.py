"""Values that can be planned, but not trained: what is not implemented or not installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rolepool.config.base import lines_of
from rolepool.config.functions import OTHER_ENGINES
from rolepool.config.schema import Config
from rolepool.config.values import show

FALLBACK = "set actor_rollout_ref.rollout.fallback=native to generate with rolepool's own engine"


def why_not_trained(config: Config) -> list[str]:
    """A line for each key that can be planned, but not trained."""
    return lines_of(
        _about_lora(config),
        _about_engine(config),
        _about_validation(config),
        _about_loggers(config),
    )


def _about_lora(config: Config) -> Iterator[str]:
    lora_rank = config.actor_rollout_ref.model.lora_rank
    if lora_rank:
        setting = f"actor_rollout_ref.model.lora_rank={lora_rank}"
        yield f"{setting}: not implemented yet, only 0 works; remove it"


def _about_engine(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    setting = f"actor_rollout_ref.rollout.name={rollout.name}"
    if rollout.engine in OTHER_ENGINES:
        yield f"{setting}: not implemented yet; {FALLBACK}"
    size = rollout.tensor_model_parallel_size
    if rollout.engine == "transformers" and size > 1:
        reason = "the transformers engine has all weights in one process"
        fix = "use 1, or rollout.name=native"
        yield f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: {reason}; {fix}"
    if rollout.engine == "vllm" and not Path(rollout.vllm_python).expanduser().is_file():
        reason = f"there is no actor_rollout_ref.rollout.vllm_python={rollout.vllm_python}"
        fix = f"run scripts/setup_vllm.sh, which makes .venv-vllm, or {FALLBACK}"
        yield f"actor_rollout_ref.rollout.name=vllm: {reason}; {fix}"


def _about_validation(config: Config) -> Iterator[str]:
    if config.data.val_files:
        return
    for key in ("trainer.test_freq", "trainer.val_only"):
        value = config.at(key)
        if value is not None and value > 0:
            fix = f"set data.val_files, or remove {key}"
            yield f"{key}={show(value)}: there are no validation prompts; {fix}"


def _about_loggers(config: Config) -> Iterator[str]:
    for name in config.trainer.logger:
        if name in ("tensorboard", "wandb", "mlflow") and find_spec(name) is None:
            fix = f"pip install 'rolepool[{name}]', or remove it from the list"
            yield f"trainer.logger: {name} is not installed; {fix}"
