"""What actor and critic have in common: a model in training, updated in mini-batches, saved and read back."""

from __future__ import annotations

import time
from pathlib import Path

from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.training import TrainedModel
from rolepool.models.utilization import model_utilization
from rolepool.placement.models import ModelShape
from rolepool.protocol import DataProto, Dispatch, Worker, register
from rolepool.roles.passes import Passes
from rolepool.roles.updates import LossOfPass, mini_batches


class TrainedRole(Worker):
    trained: TrainedModel
    shape: ModelShape | None

    def update(
        self, name: str, data: DataProto, rows_per_mini_batch: int, passes: Passes, loss_of: LossOfPass, ends_step: bool
    ) -> dict[str, float]:
        """One pass over the batch in mini-batches, an optimizer step each. Metrics are means over the mini-batches."""
        start_s = time.perf_counter()
        with self.trained.on_device(training=True):
            metrics = mini_batches(
                self, self.trained, data, rows_per_mini_batch=rows_per_mini_batch, passes=passes, loss_of=loss_of
            )
        seconds = time.perf_counter() - start_s
        metrics["lr"] = self.trained.learning_rate
        if ends_step:
            self.trained.num_updates += 1
        named = {f"{name}/{key}": value for key, value in metrics.items()}
        used = model_utilization(self.shape, data.batch["attention_mask"], seconds, self.device)
        return named if used is None else {**named, f"perf/mfu/{name}": used}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, folder: str) -> None:
        """Weights, optimizer, schedule and random states, each rank its own part, into a new folder that all see."""
        save_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, folder: str) -> None:
        """What was saved there, by any number of ranks."""
        load_trained(self.trained, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sees(self, path: str) -> bool:
        """Whether a file of the driver's is there for this rank, too."""
        return Path(path).exists()
