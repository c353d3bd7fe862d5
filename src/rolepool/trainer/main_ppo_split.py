"""`python -m rolepool.trainer.main_ppo_split`: `main_ppo` with actor and critic in separate pools."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rolepool.command_line import run_program
from rolepool.trainer.main_ppo import train

PROGRAM = "python -m rolepool.trainer.main_ppo_split"
SPLIT_FILE = str(Path(__file__).with_suffix(".yaml"))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, PROGRAM, SPLIT_FILE), argv)


if __name__ == "__main__":
    sys.exit(main())
