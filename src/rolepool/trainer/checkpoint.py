"""Checkpoints of a run: what they hold beside the models, where a run goes on, and one as a Hugging Face folder.

Owns `trainer.json` and which checkpoints are kept. What a model's folder looks like is `models.checkpoint`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from transformers.utils.hub import cached_file

from rolepool.config import Config, load_config
from rolepool.errors import ConfigError
from rolepool.metrics.run_folder import RunFolder
from rolepool.models.checkpoint.export import export_hf
from rolepool.models.checkpoint.folders import (
    checkpoint_folder,
    newest_checkpoint,
    publish,
    remove_old,
    temporary_folder,
)
from rolepool.trainer.build import Roles


class Position(BaseModel):
    """Where a run stands between two steps, the models aside."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    data: dict[str, Any]
    kl_controller: dict[str, float]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, config: Config, folder: RunFolder, has_critic: bool) -> None:
        self._keys = config.trainer
        self._folder = folder
        self._parts = ["actor", *(["critic"] if has_critic else [])]

    @property
    def are_on(self) -> bool:
        return self._keys.save_freq > 0

    @property
    def newest(self) -> Path | None:
        """The last whole one in the folder, whether it is to be gone on from or not."""
        return newest_checkpoint(self._folder.path)

    @property
    def newest_in_words(self) -> str:
        newest = self.newest
        return "there is no checkpoint" if newest is None else f"the last checkpoint is {newest}"

    def find(self) -> Path | None:
        """The checkpoint to go on from; None starts anew."""
        if self._keys.resume_mode == "disable":
            return None
        is_auto = self._keys.resume_mode == "auto"
        path = self.newest if is_auto else Path(self._keys.resume_from_path or "").expanduser()
        if path is None:
            return None
        missing = " and no ".join(part for part in ("trainer.json", *self._parts) if not (path / part).exists())
        if missing and is_auto:
            raise ConfigError(
                f"trainer.resume_mode=auto: the newest checkpoint, {path}, has no {missing}; "
                "go on with the keys it was saved under, or set trainer.resume_mode=disable to start anew"
            )
        if missing:
            raise ConfigError(
                f"trainer.resume_from_path={path}: no {missing} there; give the folder of a checkpoint, such as "
                "runs/NAME/checkpoints/step_000010"
            )
        return path

    def check_folder_is_shared(self, roles: Roles) -> None:
        """Every rank that will save must see the driver's folder."""
        probe = self._folder.path.absolute() / ".shared-folder-probe"
        probe.touch()
        try:
            for name, role in roles.trained.items():
                blind = [rank for rank, sees in enumerate(role.sees(str(probe)).get()) if not sees]
                if blind:
                    raise ConfigError(
                        f"trainer.default_local_dir={self._keys.default_local_dir}: ranks {blind} of {name} do not see "
                        "it; name a folder that all nodes share, or set trainer.save_freq=-1"
                    )
        finally:
            probe.unlink()

    def save(self, roles: Roles, position: Position) -> None:
        """Write a whole checkpoint, then let go of those no longer kept."""
        final = checkpoint_folder(self._folder.path.absolute(), position.step)
        temporary = temporary_folder(final)
        for call in [role.save_checkpoint(str(temporary / name)) for name, role in roles.trained.items()]:
            call.get()
        (temporary / "trainer.json").write_text(position.model_dump_json(indent=2), encoding="utf-8")
        publish(temporary, final)
        kept = {"actor": self._keys.max_actor_ckpt_to_keep, "critic": self._keys.max_critic_ckpt_to_keep}
        for name in self._parts:
            if (keep := kept[name]) is not None:
                remove_old(self._folder.path, name, keep)

    def load(self, roles: Roles, folder: Path) -> None:
        """Have all roles go on from a checkpoint."""
        for call in [role.load_checkpoint(str(folder.absolute() / name)) for name, role in roles.trained.items()]:
            call.get()


def read_position(folder: Path) -> Position:
    """The position that a checkpoint was made at."""
    path = folder / "trainer.json"
    try:
        return Position.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path}: not a trainer state ({str(error).splitlines()[0]})") from None


def export_run(run: Path, step: int | None, out_dir: Path, role: str = "actor") -> Path:
    """Write a role's model of a step (None: of the newest checkpoint) for `from_pretrained`; returns what was read."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: not a run folder; no config.yaml is in it")
    saved = newest_checkpoint(run, [role]) if step is None else checkpoint_folder(run, step)
    if saved is None or not (saved / role).is_dir():
        steps = sorted(path.name for path in (run / "checkpoints").glob("step_*") if (path / role).is_dir())
        raise ConfigError(
            f"{run}: no checkpoint of {role}{'' if step is None else f' at step {step}'}; "
            f"{'there are ' + ', '.join(steps) if steps else 'set trainer.save_freq when training'}"
        )
    config = load_config([str(run / "config.yaml")], []).config
    path = config.actor_rollout_ref.model.path if role == "actor" else config.critic.model.path
    export_hf(saved / role, _model_folder(path), out_dir)
    return saved


def _model_folder(path: str | None) -> Path:
    """Where the model that was trained came from: a folder, or a hub id's files on this machine."""
    if path is not None and Path(path).is_dir():
        return Path(path)
    try:
        found = cached_file(path, "config.json") if path is not None else None
    except OSError:
        found = None
    if found is None:
        raise ConfigError(f"actor_rollout_ref.model.path={path}: not found; export where training found it")
    return Path(found).parent
