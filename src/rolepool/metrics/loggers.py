"""Where rows of metrics go beside the run folder: TensorBoard, Weights & Biases, MLflow.

Owns the three libraries, none of which is needed until it is named in `trainer.logger`. One that fails is warned of
once and left out from then on; training never stops for it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolepool.config import Config
from rolepool.errors import ConfigError

logger = logging.getLogger(__name__)


Log = Callable[[int, Mapping[str, float]], None]
Close = Callable[[], None]


class Loggers:
    """All loggers of a run. They write from `start` on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = [name for name in config.trainer.logger if name in MAKERS]
        self._loggers: dict[str, tuple[Log, Close]] = {}
        missing = [name for name in self._names if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"trainer.logger: {name} is not installed; pip install 'rolepool[{name}]', or leave it out"
                for name in missing
            )

    def start(self, folder: Path) -> None:
        for name in self._names:
            with self._going_on_without(name):
                self._loggers[name] = MAKERS[name](self._config, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, (log, _) in list(self._loggers.items()):
            with self._going_on_without(name):
                log(step, metrics)

    def close(self) -> None:
        for name, (_, close) in list(self._loggers.items()):
            with self._going_on_without(name):
                close()

    @contextmanager
    def _going_on_without(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, training goes on
            logger.warning("trainer.logger: %s failed and is left out from now on: %r", name, error)
            self._loggers.pop(name, None)


def _tensorboard(config: Config, folder: Path) -> tuple[Log, Close]:
    from tensorboard.summary import Writer

    writer: Any = Writer(str(folder / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(config: Config, folder: Path) -> tuple[Log, Close]:
    import wandb

    keys = config.model_dump(mode="json")
    names: dict[str, Any] = {"project": config.trainer.project_name, "name": config.trainer.experiment_name}
    run: Any = wandb.init(**names, dir=str(folder), config=keys)
    return lambda step, metrics: run.log(dict(metrics), step=step), run.finish


def _mlflow(config: Config, folder: Path) -> tuple[Log, Close]:
    import mlflow

    mlflow.set_experiment(config.trainer.project_name)
    mlflow.start_run(run_name=config.trainer.experiment_name)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        # Its names allow neither "@" nor some others.
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    return log, mlflow.end_run


MAKERS: dict[str, Callable[[Config, Path], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
