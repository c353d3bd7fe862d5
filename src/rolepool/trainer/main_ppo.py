"""Training from the command line: `rolepool train` and `python -m rolepool.trainer.main_ppo` are the same program.

Owns what is printed before the first step and after the last one. Slow imports wait until the config is valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rolepool.command_line import Parser, load_words, print_errors, run_program
from rolepool.errors import ConfigError

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig
    from rolepool.trainer.callbacks import OnStep, OnValidation


def train(arguments: list[str], program: str, split_file: str | None = None) -> None:
    """Train with the config's placement. Resumes from the newest checkpoint of the run folder if there is one."""
    options = Parser(program, train.__doc__, words="RECIPE, FILE or key=value").parse_intermixed_args(arguments)
    loaded = load_words(options, options.words if split_file is None else [split_file, *options.words])
    if split_file is not None and loaded.config.placement.strategy == "standard":
        raise ConfigError(
            "placement.strategy=standard: main_ppo_split trains in two pools; remove this setting, "
            "or use rolepool.trainer.main_ppo"
        )
    start(loaded)


def start(
    loaded: LoadedConfig,
    reward: Callable[..., Any] | None = None,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
) -> None:
    """Train with a config and print what happens. Makes the demo first if the config trains it.

    `reward` is a reward function that the config does not name. `on_step` and `on_validation` are called during it.
    """
    if problems := loaded.why_not_trained():
        raise ConfigError(problems)

    from rolepool.config.recipes import DEMO_FOLDER, trains_demo

    if trains_demo(loaded.config):
        from rolepool.data.demo import make_demo

        make_demo(DEMO_FOLDER)

    from rolepool.trainer.callbacks import CallbackConsole
    from rolepool.trainer.start_checks import check_start

    print_errors(loaded.notes(), label="note: ")
    print_errors([*loaded.warnings, *check_start(loaded.config)], label="warning: ")
    console = CallbackConsole(loaded.config.trainer.logger)
    console.on_step, console.on_validation = on_step, on_validation
    console.on_phase("importing torch")

    from rolepool.trainer.loop import Trainer

    console.on_phase("reading prompts")
    trainer = Trainer(loaded, reward=reward)
    trainer.observer = console
    with console.progress_of(trainer.num_steps):
        trainer.run()
    console.print_summary(str(trainer.folder.path))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, "python -m rolepool.trainer.main_ppo"), argv)


if __name__ == "__main__":
    sys.exit(main())
