"""Where rows of metrics go beside the run folder: TensorBoard, Weights & Biases, MLflow.

Owns the three libraries, none of which is needed until it is named in `trainer.logger`. One that fails is warned of
once and left out from then on; training never stops for it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rolepool.config import Config
from rolepool.errors import ConfigError

logger = logging.getLogger(__name__)


class MetricLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of a run. They write from `start` on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = [name for name in config.trainer.logger if name in MAKERS]
        self._loggers: dict[str, MetricLogger] = {}
        missing = [name for name in self._names if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"trainer.logger: {name} is not installed; pip install 'rolepool[{name}]', or leave it out"
                for name in missing
            )

    def start(self, folder: Path) -> None:
        for name in self._names:
            try:
                self._loggers[name] = MAKERS[name](self._config, folder)
            except Exception as error:  # whatever it is, training goes on without it
                _warn(name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, one in list(self._loggers.items()):
            try:
                one.log(step, metrics)
            except Exception as error:  # as above
                _warn(name, error)
                del self._loggers[name]

    def close(self) -> None:
        for name, one in self._loggers.items():
            try:
                one.close()
            except Exception as error:  # as above
                _warn(name, error)


class TensorBoard:
    def __init__(self, config: Config, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, config: Config, folder: Path) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment(config.trainer.project_name)
        mlflow.start_run(run_name=config.trainer.experiment_name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Its names allow neither "@" nor some others.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


MAKERS: dict[str, type[TensorBoard] | type[Wandb] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def _warn(name: str, error: Exception) -> None:
    logger.warning("trainer.logger: %s failed and is left out from now on: %r", name, error)
