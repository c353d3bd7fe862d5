"""`python -m rolepool.trainer.main_ppo`: `rolepool train` under the name that launch scripts call."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rolepool.command_line import run_program
from rolepool.trainer.command import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, "python -m rolepool.trainer.main_ppo"), argv)


if __name__ == "__main__":
    sys.exit(main())
