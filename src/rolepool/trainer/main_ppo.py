"""Training from the command line: `rolepool train` and `python -m rolepool.trainer.main_ppo` are
the same program.

Owns what is printed before the first step and after the last one. Slow imports wait until the
config is valid.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rolepool.command_line import DriverEnd, Parser, print_errors, read_words, run_program
from rolepool.errors import RayDiedError, collected
from rolepool.quick_imports import quick_imports

if TYPE_CHECKING:
    from rolepool.cluster.begin import Begun
    from rolepool.config import Config, LoadedConfig
    from rolepool.trainer.console import OnStep, OnValidation, TrainingConsole
    from rolepool.trainer.loop import Trainer
    from rolepool.trainer.supervisor import Death


def train(arguments: list[str], program: str, split_file: str | None = None) -> int | None:
    """Train with the config's placement. Resumes from the newest checkpoint of the run folder if
    there is one."""
    parser = Parser(program, train.__doc__, words="RECIPE, FILE or key=value")
    options = parser.parse(arguments)
    words = list(options.words)
    if split_file is not None:
        words.insert(0, split_file)
    draft = read_words(options, words)

    from rolepool.config.base import lines_of
    from rolepool.trainer.start_checks import checked

    if split_file is not None:
        contradictions = lines_of(_in_two_pools(draft.loaded.config))
        draft = draft.with_problems(contradictions)
    loaded = checked(draft)
    is_own_program = bool(arguments) and sys.argv[-len(arguments) :] == arguments
    if not is_own_program:  # a Python program called `main` with a list
        start(loaded)
        return None

    from rolepool.trainer.supervisor import EXIT_TRACEBACK, supervise

    result = supervise(loaded.config.trainer)
    if isinstance(result, int):
        return result
    try:
        code = run_program(lambda _: start(loaded, death=result), [])
    except Exception:
        traceback.print_exc()
        code = EXIT_TRACEBACK
    raise DriverEnd(code)


def _in_two_pools(config: Config) -> Iterator[str]:
    """The placement does not contradict the name of the program."""
    if config.placement.strategy == "standard":
        fix = "remove this setting, or use rolepool.trainer.main_ppo"
        yield f"placement.strategy=standard: main_ppo_split trains in two pools; {fix}"


def start(
    loaded: LoadedConfig,
    reward: Callable[..., Any] | None = None,
    on_step: OnStep | None = None,
    on_validation: OnValidation | None = None,
    death: Death | None = None,
) -> None:
    """Train with a config and print what happens. Makes the demo first if the config trains it.

    `reward` is a reward function that the config does not name. `on_step` and `on_validation` are
    called during it. `death` says how the driver before this one died.
    """
    if death is not None and death.has_checkpoint:
        config = loaded.config.with_value("trainer.resume_mode", "auto")
        loaded = replace(loaded, config=config)

    from rolepool.config.sources import DEMO_FOLDER, makes_demo
    from rolepool.trainer.console import TrainingConsole
    from rolepool.trainer.early_start import begin_early, may_begin_early
    from rolepool.trainer.interrupt import Interrupt
    from rolepool.trainer.phases import Phases
    from rolepool.trainer.rebalancer import resolve
    from rolepool.trainer.start_checks import check_start

    phases = Phases()
    phases.begin("checking the config")
    problems: list[str] = []
    notices: list[str] = []
    with collected(problems):
        loaded, notices = resolve(loaded)
    warnings = check_start(loaded, reward, *problems)
    if makes_demo(loaded.config):
        from rolepool.data.demo import make_demo

        make_demo(DEMO_FOLDER)
        # Again, because now the demo's files can be checked, too.
        warnings = check_start(loaded, reward)
    print_errors([*loaded.notes(), *notices], label="note: ")
    print_errors([*loaded.warnings, *warnings], label="warning: ")
    console = TrainingConsole(loaded.config.trainer.logger, on_step, on_validation)

    def begin_phase(what: str) -> None:
        phases.begin(what)
        console.on_phase(what)

    with ExitStack() as cleanup:
        with Interrupt().watch():
            begun: Begun | None = None
            if may_begin_early(loaded.config):
                begin_phase("starting Ray")
                begun = cleanup.enter_context(begin_early(loaded.config, reward))
            begin_phase("importing torch")
            with quick_imports():
                from rolepool.trainer.loop import Trainer

            begin_phase("reading prompts")
            trainer = Trainer(loaded, reward=reward, begun=begun)
        trainer.observer = console
        trainer.journal.phases = phases
        trainer.death = death
        _run(trainer, console)
    console.print_summary(trainer.parts.folder.path)


def _run(trainer: Trainer, console: TrainingConsole) -> None:
    with console.progress_of(trainer.num_steps):
        try:
            trainer.run()
        except RayDiedError as error:
            newest = trainer.parts.checkpoints.newest_in_words
            fix = "the same command continues the run in a new Ray"
            raise RayDiedError(f"{error}; {newest}; {fix}") from None


def main(
    argv: Sequence[str] | None = None, module: str = "main_ppo", split_file: str | None = None
) -> int:
    """Train and return the exit code."""
    program = f"python -m rolepool.trainer.{module}"
    return run_program(lambda arguments: train(arguments, program, split_file), argv)


if __name__ == "__main__":
    sys.exit(main())
