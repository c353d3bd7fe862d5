"""Training from the words of a command line: `rolepool train`, and `python -m rolepool.trainer.main_ppo` under the name
that launch scripts call.

Owns what is said before the first step and after the last. Heavy imports wait until there is a config to train.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rolepool.command_line import Parser, load_words, run_program

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig


def train(arguments: list[str], program: str, load: Callable[[Sequence[str]], LoadedConfig] = load_words) -> None:
    """Train under the config's placement, from its newest checkpoint if there is one."""
    options = Parser(program, train.__doc__, words="FILE or key=value").parse_intermixed_args(arguments)

    from rolepool.config.describe import check_implemented

    loaded = load(options.words)
    check_implemented(loaded)

    from rolepool.trainer.console import TrainingConsole
    from rolepool.trainer.loop import Trainer

    trainer = Trainer(loaded)
    with TrainingConsole(trainer.num_steps, lines="console" in loaded.config.trainer.logger) as console:
        trainer.observer = console
        trainer.run()
    console.print_summary(str(trainer.folder.path))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, "python -m rolepool.trainer.main_ppo"), argv)


if __name__ == "__main__":
    sys.exit(main())
