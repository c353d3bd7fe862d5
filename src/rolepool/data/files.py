"""Checks of data and reward files without torch."""

from pathlib import Path

from rolepool.config import Config


def find_problems(config: Config) -> list[str]:
    """One line for each file that does not exist."""
    files = {f"data.{name}_files": getattr(config.data, f"{name}_files") for name in ("train", "val")}
    named = [(key, path) for key, paths in files.items() for path in paths]
    if (path := config.custom_reward_function.path) is not None:
        named.append(("custom_reward_function.path", path))
    problems = [f"{key}={path}: no such file" for key, path in named if not Path(path).expanduser().is_file()]
    return problems if config.data.train_files else ["data.train_files=[]: there are no training prompts", *problems]
