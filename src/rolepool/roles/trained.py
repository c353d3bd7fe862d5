"""What actor and critic have in common: a model in training that is saved and read back."""

from __future__ import annotations

from pathlib import Path

from rolepool.models.checkpoint import load_trained, save_trained
from rolepool.models.training import TrainedModel
from rolepool.protocol import Dispatch, Worker, register


class TrainedRole(Worker):
    trained: TrainedModel

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
