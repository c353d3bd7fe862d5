"""Where a run begins: at its first step, or after the step of a checkpoint.

Owns what is checked about the run folder before a process starts.
"""

from dataclasses import dataclass

from rolepool.config import Config
from rolepool.errors import ConfigError
from rolepool.metrics.run_folder import RunFolder
from rolepool.trainer.checkpoint import Checkpoints, SavedCheckpoint


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins."""

    checkpoint: SavedCheckpoint | None
    """None if the run begins with its first step."""
    resumes_here: bool
    """Whether the checkpoint is one of the run folder, so that its rows belong to this run."""

    @property
    def step(self) -> int:
        """The last step that is done."""
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    @property
    def after_step(self) -> int | None:
        """The step after which the run folder is continued; None if the run starts a new one."""
        return self.step if self.resumes_here else None


def find_start(config: Config, checkpoints: Checkpoints, folder: RunFolder) -> StartPoint:
    """Where this run begins. Raises ConfigError if it cannot begin there in this folder."""
    checkpoint = checkpoints.find()
    own_folder = (folder.path / "checkpoints").resolve()
    resumes_here = checkpoint is not None and checkpoint.path.resolve().parent == own_folder
    if not resumes_here:
        folder.check_is_ours()
        if config.trainer.val_only and folder.holds_a_run:
            what = config.actor_rollout_ref.model.path if checkpoint is None else checkpoint.path
            raise ConfigError(
                f"trainer.val_only=true: {what} would be validated, and trainer.default_local_dir="
                f"{folder.path} holds a run; name another folder, or validate the newest "
                "checkpoint of that run with trainer.resume_mode=auto"
            )
    return StartPoint(checkpoint, resumes_here)


def why_nothing_is_left(config: Config, start: StartPoint, num_steps: int) -> str | None:
    """Why the run has nothing to do; None if it has."""
    keys = config.trainer
    if start.checkpoint is None or start.step < num_steps or keys.val_only:
        return None
    name = "total_training_steps" if keys.total_training_steps else "total_epochs"
    key = f"trainer.{name}"
    setting = f"{key}={config.at(key)}"
    return (
        f"nothing left to do: {start.checkpoint.path} is the checkpoint of step {start.step}, and "
        f"{setting} ends with step {num_steps}; raise it to "
        "continue, or set trainer.resume_mode=disable to start a new run"
    )
