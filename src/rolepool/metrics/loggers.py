"""Loggers that receive the metrics in addition to the run folder: TensorBoard, Weights & Biases, MLflow.

Each library is needed only if `trainer.logger` names it. If a logger fails, there is one warning and training continues
without it.
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
            with self._removed_if_it_fails(name):
                self._loggers[name] = MAKERS[name](self._config, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, (log, _) in list(self._loggers.items()):
            with self._removed_if_it_fails(name):
                log(step, metrics)

    def close(self) -> None:
        for name, (_, close) in list(self._loggers.items()):
            with self._removed_if_it_fails(name):
                close()

    @contextmanager
    def _removed_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no logger may stop training
            logger.warning("trainer.logger: %s failed; training continues without it: %r", name, error)
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
        # MLflow does not allow "@" in names.
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    return log, mlflow.end_run


MAKERS: dict[str, Callable[[Config, Path], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
