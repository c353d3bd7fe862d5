"""Checkpoints of a run: saving, finding the one to resume from, and exporting one as a Hugging Face
folder.

Owns `trainer.json`, and which checkpoints are kept. `models.checkpoint` owns the folder of each
model.
"""

from collections.abc import Iterable, Mapping
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
from rolepool.reading import read_small
from rolepool.trainer.state import TrainState
from rolepool.trainer.step import Roles, TrainedCalls

Source = Path | Mapping[str, Path]
"""The folder of a checkpoint, or the folders of a snapshot on each node, by node id."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, config: Config, folder: RunFolder, roles: Iterable[str]) -> None:
        """`roles` are the roles of the run. Those that are trained are saved."""
        self._config, self._keys, self._folder = config, config.trainer, folder
        self._parts = [role for role in trained_roles() if role in roles]

    @property
    def newest_in_words(self) -> str:
        newest = model_files.newest_checkpoint(self._folder.path)
        return "there is no checkpoint" if newest is None else f"the last checkpoint is {newest}"

    def find(self) -> tuple[Path, TrainState] | None:
        """The checkpoint to resume from, and the state of the run when it was saved; None starts a
        new run."""
        if self._keys.resume_mode == "disable":
            return None
        is_auto = self._keys.resume_mode == "auto"
        if is_auto:
            path = model_files.checkpoint_to_resume(self._folder.path, _check)
        else:
            path = Path(self._keys.resume_from_path or "").expanduser()
        if path is None:
            return None
        missing = " and no ".join(
            part for part in ("trainer.json", *self._parts) if not (path / part).exists()
        )
        if missing:
            where = f"trainer.resume_from_path={path}:"
            fix = "give the folder of a checkpoint, such as runs/NAME/checkpoints/step_000010"
            if is_auto:
                where = f"trainer.resume_mode=auto: the newest checkpoint, {path},"
                fix = "use the keys it was saved with, or set trainer.resume_mode=disable to start a new run"
            raise ConfigError(f"{where} has no {missing}; {fix}")
        if not is_auto:
            _check(path)
        return path, _position(path)

    def newest(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint of the run folder, and the state of the run when it was saved."""
        path = model_files.newest_checkpoint(self._folder.path, self._parts)
        return None if path is None else (path, _position(path))

    def check_folder_is_shared(self, roles: Roles) -> None:
        """Raise ConfigError if a rank that saves checkpoints cannot access the run folder."""
        setting = f"trainer.default_local_dir={self._keys.default_local_dir}"
        fix = "name a folder that all nodes share, or set trainer.save_freq=-1"
        for role in roles.trained.values():
            role.group.check_exists(setting, self._folder.lock_file.absolute(), fix)

    def save(self, roles: Roles, position: TrainState) -> None:
        """Write a checkpoint atomically, then remove the checkpoints that are no longer kept."""
        final = model_files.checkpoint_folder(self._folder.path.absolute(), position.step)
        temporary = model_files.temporary_folder(final)
        for call in [
            role.save_checkpoint(str(temporary / name)) for name, role in roles.trained.items()
        ]:
            call.get()
        state = temporary / "trainer.json"
        state.write_text(position.model_dump_json(indent=2), encoding="utf-8")
        model_files.write_hashes(state, [state])
        model_files.publish(temporary, final)
        for role in self._parts:
            key = ROLE_SPECS[role].checkpoints_to_keep
            if key is not None and (keep := self._config.at(key)) is not None:
                model_files.remove_old(self._folder.path, role, keep)

    def load(self, trained: Mapping[str, TrainedCalls], folder: Source) -> None:
        """Load a checkpoint or a snapshot into these roles."""
        loads = []
        for name, role in trained.items():
            if isinstance(folder, Path):
                fix = "copy the checkpoint there, or to a folder that all nodes share"
                role.group.check_exists(
                    f"trainer.resume_from_path={folder}", folder.absolute() / name, fix
                )
            nodes = [process.node_id for process in role.group.processes]
            by_node = (
                dict.fromkeys(nodes, folder.absolute()) if isinstance(folder, Path) else folder
            )
            loads.append(role.load_checkpoint([str(by_node[node] / name) for node in nodes]))
        for call in loads:
            call.get()


def _check(folder: Path) -> None:
    """Raise ConfigError if the checkpoint is damaged. Reads all of it."""
    _position(folder)
    model_files.check_hashes(folder)


def _position(folder: Path) -> TrainState:
    """The state of the run in a checkpoint."""
    file, fix = folder / "trainer.json", "resume from another checkpoint"
    with explained(f"{file}: not a trainer state", fix, ValueError):
        position = TrainState.model_validate_json(read_small(file))
    match = model_files.STEP_FOLDER.fullmatch(folder.name)
    if match is not None and int(match[1]) != position.step:
        raise ConfigError(f"{file}: step={position.step} is not the step of its folder; {fix}")
    return position


def export_run(run: Path, step: int | None, out_dir: Path, role: str = "actor") -> Path:
    """Write a role's model for `from_pretrained`. Step None means the newest checkpoint. Returns
    the checkpoint."""
    config = load_saved(run).config
    if role not in trained_roles():
        raise ConfigError(
            f"--role {role}: not a role that is trained; use {' or '.join(trained_roles())}"
        )
    saved = (
        model_files.newest_checkpoint(run, [role])
        if step is None
        else model_files.checkpoint_folder(run, step)
    )
    if saved is None or not (saved / role).is_dir():
        steps = sorted(
            path.name for path in (run / "checkpoints").glob("step_*") if (path / role).is_dir()
        )
        where = "" if step is None else f" at step {step}"
        fix = f"there are {', '.join(steps)}" if steps else "set trainer.save_freq when training"
        raise ConfigError(f"{run}: no checkpoint of {role}{where}; {fix}")
    key = f"{ROLE_SPECS[Role(role)].model}.path"
    model = str(config.at(key))
    with explained(f"{key}={model}: not found", "run the export on a machine that has it"):
        # In a local folder, or in the local copy of a hub model. Nothing is downloaded that a run
        # folder names.
        model_config = str(cached_file(model, "config.json", local_files_only=True))
    tokenizer_folder = model_folder(config.actor_rollout_ref.model.tokenizer)
    with explained(f"{out_dir}: cannot be written", "name another folder", SafetensorError):
        model_files.export_hf(
            saved / role, Path(model_config).parent, out_dir, tokenizer_dir=tokenizer_folder
        )
    return saved
