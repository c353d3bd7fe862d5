"""A checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.hub import cached_file

from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.models.checkpoint import checkpoint_folder, export_hf, newest_checkpoint


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
