"""Checkpoints: the store of states on disk. Saving, finding the one to resume from, and exporting one
as a Hugging Face folder.

Owns `trainer.json`, and which checkpoints are kept. `models.checkpoint` owns the folder of each
model, and `queue_files` the files of what waits in the queue of the state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from rolepool.config import Config
from rolepool.config.model_files import model_folder
from rolepool.config.saved import load_saved
from rolepool.errors import ConfigError, explained
from rolepool.metrics.run_folder import RunFolder
from rolepool.models import checkpoint as model_files
from rolepool.placement.roles import ROLE_SPECS, Role, trained_roles
from rolepool.protocol import CallFuture
from rolepool.reading import read_small
from rolepool.trainer.queue import QueuedBatch, StoredBatch
from rolepool.trainer.queue_files import read_queue, write_queue
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, TrainedCalls
from rolepool.trainer.stores import Groups


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, and the state of the run when it was saved."""

    state: TrainState
    queue: Sequence[StoredBatch]
    path: Path
    has_models: bool = True

    def load(self, name: str, role: TrainedCalls) -> list[CallFuture]:
        folder = self.path.absolute() / name
        fix = "copy the checkpoint there, or to a folder that all nodes share"
        role.group.check_exists(f"trainer.resume_from_path={self.path}", folder, fix)
        folders = [str(folder)] * role.group.world_size
        return [role.load_checkpoint(folders)]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, config: Config, folder: RunFolder, roles: Iterable[str]) -> None:
        """`roles` are the roles of the run. Those that are trained are saved."""
        self._config = config
        self._keys = config.trainer
        self._folder = folder
        self._parts = [role for role in trained_roles() if role in roles]
        self.saved_step = 0
        """The last step that this run has saved."""

    @property
    def are_saved(self) -> bool:
        """Whether the run saves any checkpoints."""
        return self._keys.save_freq != -1

    @property
    def newest_in_words(self) -> str:
        newest = model_files.newest_checkpoint(self._folder.path)
        if newest is None:
            return "there is no checkpoint"
        return f"the last checkpoint is {newest}"

    def find(self) -> SavedCheckpoint | None:
        """The checkpoint to resume from; None starts a new run."""
        mode = self._keys.resume_mode
        if mode == "disable":
            return None
        is_auto = mode == "auto"
        if is_auto:
            path = model_files.checkpoint_to_resume(self._folder.path, _check)
        else:
            path = Path(self._keys.resume_from_path or "").expanduser()
        if path is None:
            return None
        self._check_is_whole(path, is_auto=is_auto)
        if not is_auto:
            _check(path)
        state = _read_state(path)
        return SavedCheckpoint(state, read_queue(path, state), path)

    def _check_is_whole(self, path: Path, *, is_auto: bool) -> None:
        """Raise ConfigError if a checkpoint does not have everything that this run needs."""
        parts = ["trainer.json", *self._parts]
        missing = " and no ".join(part for part in parts if not (path / part).exists())
        if not missing:
            return
        where = f"trainer.resume_from_path={path}:"
        fix = "give the folder of a checkpoint, such as runs/NAME/checkpoints/step_000010"
        if is_auto:
            where = f"trainer.resume_mode=auto: the newest checkpoint, {path},"
            new_run = "set trainer.resume_mode=disable to start a new run"
            fix = f"use the keys it was saved with, or {new_run}"
        raise ConfigError(f"{where} has no {missing}; {fix}")

    def newest(self, groups: Groups, at_most: int) -> SavedCheckpoint | None:
        """The newest checkpoint of the run folder."""
        path = model_files.newest_checkpoint(self._folder.path, self._parts)
        if path is None:
            return None
        state = _read_state(path)
        if state.step > at_most:
            return None
        return SavedCheckpoint(state, read_queue(path, state), path)

    def check_folder_is_shared(self, groups: Groups) -> None:
        """Raise ConfigError if a rank that saves checkpoints cannot access the run folder."""
        setting = f"trainer.default_local_dir={self._keys.default_local_dir}"
        fix = "name a folder that all nodes share, or set trainer.save_freq=-1"
        for group in groups.values():
            group.check_exists(setting, self._folder.lock_file.absolute(), fix)

    def save(self, roles: Roles, state: TrainState, queue: Sequence[QueuedBatch]) -> None:
        """Write a checkpoint atomically, then remove the checkpoints that are no longer kept. Waits
        until the queue has been generated and scored."""
        run_folder = self._folder.path.absolute()
        final = model_files.checkpoint_folder(run_folder, state.step)
        temporary = model_files.temporary_folder(final)
        calls = []
        for name, role in roles.trained.items():
            folder = temporary / name
            calls.append(role.save_checkpoint(str(folder)))
        queue_files = write_queue(temporary, [batch.hold() for batch in queue])
        for call in calls:
            call.get()
        state_file = temporary / "trainer.json"
        state_file.write_text(state.to_json(), encoding="utf-8")
        model_files.write_hashes(state_file, [state_file, *queue_files])
        model_files.publish(temporary, final)
        self.saved_step = state.step
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the checkpoints that are no longer kept."""
        for part in self._parts:
            key = ROLE_SPECS[part].checkpoints_to_keep
            if key is None:
                continue
            num_kept = self._config.at(key)
            if num_kept is not None:
                model_files.remove_old(self._folder.path, part, num_kept)


def _check(folder: Path) -> None:
    """Raise ConfigError if the checkpoint is damaged. Reads all of it."""
    state = _read_state(folder)
    model_files.check_hashes(folder)
    read_queue(folder, state)


def _read_state(folder: Path) -> TrainState:
    """The state of the run in a checkpoint."""
    file = folder / "trainer.json"
    fix = "resume from another checkpoint"
    with explained(f"{file}: not a trainer state", fix, ValueError):
        state = TrainState.model_validate_json(read_small(file))
    match = model_files.STEP_FOLDER.fullmatch(folder.name)
    if match is not None and int(match[1]) != state.step:
        raise ConfigError(f"{file}: step={state.step} is not the step of its folder; {fix}")
    return state


def _checkpoint_of(run: Path, step: int | None, role: str) -> Path:
    """The checkpoint of a role after a step, or its newest one. Raises ConfigError if there is
    none."""
    if step is None:
        saved = model_files.newest_checkpoint(run, [role])
        where = ""
    else:
        saved = model_files.checkpoint_folder(run, step)
        where = f" at step {step}"
    if saved is not None and (saved / role).is_dir():
        return saved
    folders = (run / "checkpoints").glob("step_*")
    steps = sorted(folder.name for folder in folders if (folder / role).is_dir())
    fix = f"there are {', '.join(steps)}" if steps else "set trainer.save_freq when training"
    raise ConfigError(f"{run}: no checkpoint of {role}{where}; {fix}")


def export_run(run: Path, step: int | None, out_dir: Path, role: str = "actor") -> Path:
    """Write a role's model for `from_pretrained`. Step None means the newest checkpoint. Returns
    the checkpoint."""
    config = load_saved(run).config
    if role not in trained_roles():
        raise ConfigError(
            f"--role {role}: not a role that is trained; use {' or '.join(trained_roles())}"
        )
    saved = _checkpoint_of(run, step, role)
    key = f"{ROLE_SPECS[Role(role)].model}.path"
    model = str(config.at(key))
    with explained(f"{key}={model}: not found", "run the export on a machine that has it"):
        # In a local folder, or in the local copy of a hub model. Nothing is downloaded that a run
        # folder names.
        model_config = str(cached_file(model, "config.json", local_files_only=True))
    tokenizer_folder = model_folder(config.actor_rollout_ref.model.tokenizer)
    with explained(f"{out_dir}: cannot be written", "name another folder", SafetensorError):
        model_files.export_hf(
            saved / role,
            Path(model_config).parent,
            out_dir,
            tokenizer_dir=tokenizer_folder,
        )
    return saved
