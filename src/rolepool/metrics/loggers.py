"""The loggers of `trainer.logger`: TensorBoard, Weights & Biases and MLflow.

Each library is imported only if `trainer.logger` names it.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rolepool.config import Config
from rolepool.errors import logger

Samples = Sequence[Mapping[str, object]]
"""Samples of a validation, by the names of their columns."""


class MetricsLogger(Protocol):
    """Writes to one library from its creation until `close`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Samples) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of a run that has started. If one fails, there is one warning and training
    continues."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._loggers: dict[str, MetricsLogger] = {}
        for name in config.trainer.logger:
            # The console and the run folder are no libraries.
            if name in LOGGERS:
                with self._removed_if_it_fails(name):
                    self._loggers[name] = LOGGERS[name](config, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, library in list(self._loggers.items()):
            with self._removed_if_it_fails(name):
                library.log(step, metrics)

    def log_samples(self, step: int, samples: Samples) -> None:
        """Log samples of a validation, with the loggers that have tables."""
        if not samples:
            return
        for name, library in list(self._loggers.items()):
            with self._removed_if_it_fails(name):
                library.log_samples(step, samples)

    def close(self) -> None:
        for name, library in list(self._loggers.items()):
            with self._removed_if_it_fails(name):
                library.close()

    @contextmanager
    def _removed_if_it_fails(self, name: str) -> Iterator[None]:
        """Use a logger in the block."""
        try:
            yield
        except Exception as error:  # no logger may stop training
            logger.warning(
                "trainer.logger: %s failed; training continues without it: %r", name, error
            )
            self._loggers.pop(name, None)


class TensorBoard:
    def __init__(self, config: Config, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # `tensorboard.summary.Writer` would write tensors, which many programs do not find among
        # the scalars.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def log_samples(self, step: int, samples: Samples) -> None:
        """It has no tables."""

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    COLUMNS = ("prompt", "response", "ground_truth", "score")
    """The columns of a table. Samples may have other numbers, but not every sample has all of them."""

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Samples) -> None:
        import wandb

        rows = []
        for sample in samples:
            rows.append([sample[name] for name in self.COLUMNS])
        table = wandb.Table(columns=list(self.COLUMNS), data=rows, allow_mixed_types=True)
        wandb.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, config: Config, folder: Path) -> None:
        import mlflow

        mlflow.set_experiment(config.trainer.project_name)
        mlflow.start_run(run_name=config.trainer.experiment_name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import mlflow

        # MLflow does not allow "@" in names.
        allowed = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        mlflow.log_metrics(allowed, step=step)

    def log_samples(self, step: int, samples: Samples) -> None:
        import mlflow

        text = json.dumps(samples, indent=2, default=str)
        mlflow.log_text(text, f"val_generations/step_{step:06d}.json")

    def close(self) -> None:
        import mlflow

        mlflow.end_run()


LOGGERS: dict[str, Callable[[Config, Path], MetricsLogger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
