"""`python -m rolepool.trainer.main_ppo_split`: `main_ppo` with actor and critic in pools of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolepool.command_line import load_words, run_program
from rolepool.errors import ConfigError
from rolepool.trainer.main_ppo import train

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig

PROGRAM = "python -m rolepool.trainer.main_ppo_split"
FIRST_FILE = str(Path(__file__).with_suffix(".yaml"))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, PROGRAM, _load), argv)


def _load(words: Sequence[str]) -> LoadedConfig:
    loaded = load_words([FIRST_FILE, *words])
    if loaded.config.placement.strategy == "standard":
        raise ConfigError(
            "placement.strategy=standard: main_ppo_split trains in two pools; leave it out, "
            "or use rolepool.trainer.main_ppo"
        )
    return loaded


if __name__ == "__main__":
    sys.exit(main())
