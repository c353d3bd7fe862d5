"""Training from the command line: `rolepool train` and `python -m rolepool.trainer.main_ppo` are the same program.

Owns what is printed before the first step and after the last one. Slow imports wait until the config is valid.
"""

import sys
from collections.abc import Sequence

from rolepool.command_line import Parser, load_words, print_errors, run_program
from rolepool.errors import ConfigError


def train(arguments: list[str], program: str, split_file: str | None = None) -> None:
    """Train with the config's placement. Resumes from the newest checkpoint of the run folder if there is one."""
    options = Parser(program, train.__doc__, words="FILE or key=value").parse_intermixed_args(arguments)
    loaded = load_words(options.words if split_file is None else [split_file, *options.words])
    if split_file is not None and loaded.config.placement.strategy == "standard":
        raise ConfigError(
            "placement.strategy=standard: main_ppo_split trains in two pools; remove this setting, "
            "or use rolepool.trainer.main_ppo"
        )
    loaded.check_implemented()

    from rolepool.trainer.console import TrainingConsole
    from rolepool.trainer.start_checks import check_start

    print_errors(check_start(loaded.config), label="warning: ")
    console = TrainingConsole(loaded.config.trainer.logger)
    console.on_phase("importing torch")

    from rolepool.trainer.loop import Trainer

    console.on_phase("reading prompts")
    trainer = Trainer(loaded)
    trainer.observer = console
    with console.progress_of(trainer.num_steps):
        trainer.run()
    console.print_summary(str(trainer.folder.path))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_program(lambda arguments: train(arguments, "python -m rolepool.trainer.main_ppo"), argv)


if __name__ == "__main__":
    sys.exit(main())
