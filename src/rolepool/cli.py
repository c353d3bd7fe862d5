"""The command line: one function a command.

Owns arguments, exit codes and what is printed: 0 fine, 2 the user must change something (one line each, no traceback).
Heavy imports stay inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rolepool import __version__
from rolepool.errors import ConfigError, RolepoolError

if TYPE_CHECKING:
    from rolepool.config import LoadedConfig

EXIT_FINE, EXIT_USER, EXIT_INTERRUPTED = 0, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except RolepoolError as error:
        _print_errors(error.problems)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left; point stdout elsewhere so that the interpreter's last flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINE


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_FINE
    if name == "--version":
        print(f"rolepool {__version__}")
        return EXIT_FINE
    if name not in COMMANDS:
        raise ConfigError(f"{name!r}: no such command; there are {', '.join(COMMANDS)}")
    command, _ = COMMANDS[name]
    return command(arguments[1:])


def _print_errors(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


def _overview() -> str:
    lines = [f"  rolepool {name:<8} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rolepool COMMAND [FILE...] [key=value...] [options]",
            "",
            "PPO post-training in which placement is a value you write.",
            "",
            *lines,
            "",
            "`rolepool COMMAND --help` explains one. Keys: docs/config.md, or `rolepool config KEY`.",
        ]
    )


# Commands


def plan(arguments: list[str]) -> int:
    """Show which process will hold which GPU with which roles, whether it fits, and what will overlap."""
    parser = _parser("plan", plan.__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--inventory", metavar="8,8,4", help="GPUs per node there are (also 1024x8)")
    parser.add_argument("--live", action="store_true", help="take the inventory from the running Ray cluster")
    parser.add_argument("--gpu-memory", metavar="80", help="memory of one GPU in GiB; default: this machine's GPU")
    parser.add_argument("--strict", action="store_true", help="exit 2 when the memory estimate does not fit")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.placement.advice import advise
    from rolepool.placement.checks import find_problems
    from rolepool.placement.inventory import detect_gpu_memory, parse_inventory, parse_memory
    from rolepool.placement.memory import estimate_memory
    from rolepool.placement.plan import build_plan

    loaded = _load(options.words)
    inventory = parse_inventory(options.inventory) if options.inventory is not None else None
    if options.live and inventory is not None:
        raise ConfigError("--live: the inventory comes from the cluster or from --inventory; give one of them")
    if options.live:
        from rolepool.cluster.cluster import live_inventory

        inventory = live_inventory(loaded.config.ray_kwargs.ray_init.address, loaded.config.trainer.device)
    gpu_memory = parse_memory(options.gpu_memory) if options.gpu_memory is not None else detect_gpu_memory()
    # An inventory alone is divided whole; with the user's own node and GPU counts it is what those are taken from.
    take_all = inventory is not None and not loaded.set_keys & {"trainer.nnodes", "trainer.n_gpus_per_node"}
    made = build_plan(loaded.config, inventory, take_all=take_all)
    problems = find_problems(loaded.config, made)
    estimate = estimate_memory(loaded.config, made, None if made.device == "cpu" else gpu_memory)
    advice = advise(loaded.config, made, estimate, gpu_memory, inventory, take_all=take_all)
    if options.json:
        from rolepool.placement.export import plan_as_json

        print(plan_as_json(made, estimate, problems, advice))
    else:
        from rolepool.placement.render import plan_as_text

        print(plan_as_text(made, estimate, advice))
    _print_errors(problems)
    does_not_fit = any(pool.fits is False for pool in estimate.pools.values())
    return EXIT_USER if problems or (options.strict and does_not_fit) else EXIT_FINE


def config(arguments: list[str]) -> int:
    """Print the full resolved config; with KEY, explain that key or group of keys."""
    parser = _parser("config", config.__doc__, words="KEY, FILE or key=value")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.config.describe import explain

    keys = [word for word in options.words if not _is_input(word)]
    loaded = _load([word for word in options.words if _is_input(word)])
    text = "\n\n".join(explain(key, loaded) for key in keys) if keys else loaded.to_yaml().rstrip()
    print(text)
    return EXIT_FINE


def train(arguments: list[str]) -> int:
    """Train. Refuses keys that are set and not built."""
    parser = _parser("train", train.__doc__)
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.config.built import defaults_not_in_force, refused_keys
    from rolepool.config.loading import show

    loaded = _load(options.words)
    refused = refused_keys(loaded)
    if refused:
        raise ConfigError(f"{path}={show(loaded.value_of(path))}: not built yet; leave it out" for path in refused)
    waiting = ", ".join(f"{path}={show(loaded.value_of(path))}" for path in defaults_not_in_force(loaded))
    if waiting:
        print(f"defaults not in force yet: {waiting}", file=sys.stderr)

    from rolepool.trainer.console import TrainingConsole
    from rolepool.trainer.loop import Trainer

    trainer = Trainer(loaded)
    with TrainingConsole(trainer.num_steps, lines="console" in loaded.config.trainer.logger) as console:
        trainer.report = console
        trainer.run()
    print(console.summary(str(trainer.folder.path)))
    return EXIT_FINE


def report(arguments: list[str]) -> int:
    """Write a run's page: timeline, step times, critical path, curves, and what to change. It needs no network."""
    parser = _run_parser("report", report.__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the run folder")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.report.html import write_report
    from rolepool.report.run import read_run

    run = read_run(options.run)
    for file, number in run.skipped.items():
        print(f"skipped {number} unreadable lines of {file}", file=sys.stderr)
    print(write_report(run, options.output or run.folder / "report.html"))
    return EXIT_FINE


def watch(arguments: list[str]) -> int:
    """Show a run's pools, operations and reward in the terminal while it trains, or after it has ended."""
    parser = _run_parser("watch", watch.__doc__)
    parser.add_argument("--once", action="store_true", help="print how it stands and exit")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.report.watch import watch as show_run

    show_run(options.run, once=options.once)
    return EXIT_FINE


def trace(arguments: list[str]) -> int:
    """Write a run's spans as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    parser = _run_parser("trace", trace.__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: trace.json in the run folder")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.report.run import read_run
    from rolepool.report.trace import write_trace

    run = read_run(options.run)
    target = Path(options.output) if options.output else run.folder / "trace.json"
    write_trace(run, target)
    print(target)
    return EXIT_FINE


def demo(arguments: list[str]) -> int:
    """Make the demo's model, tokenizer and prompts in a folder, where they are not there yet."""
    parser = _Parser(prog="rolepool demo", description=demo.__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", default="runs/demo_data", help="default: runs/demo_data")
    options = _parse(parser, arguments)
    if options is None:
        return EXIT_FINE

    from rolepool.data.demo import make_demo

    print(make_demo(options.folder).folder)
    return EXIT_FINE


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "plan": (plan, "which process holds which GPU with which roles, and whether it fits"),
    "config": (config, "the full resolved config, or one key explained"),
    "train": (train, "train under the placement of the config"),
    "demo": (demo, "make the files of the embedded demo"),
    "report": (report, "one HTML page about a run: timeline, critical path, curves, what to change"),
    "watch": (watch, "a run in the terminal, while it trains or after"),
    "trace": (trace, "a run's spans for Perfetto"),
}


# Arguments


class _Parser(argparse.ArgumentParser):
    """Errors as exceptions, so that all of them are printed in one way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see `{self.prog} --help`")


def _parser(name: str, summary: str | None, words: str = "FILE or key=value") -> _Parser:
    parser = _Parser(prog=f"rolepool {name}", description=summary, allow_abbrev=False)
    parser.add_argument(
        "words",
        nargs="*",
        metavar=words.replace(", ", "|").replace(" or ", "|"),
        help=f"{words}; files first, then overrides",
    )
    return parser


def _run_parser(name: str, summary: str | None) -> _Parser:
    parser = _Parser(prog=f"rolepool {name}", description=summary, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the run folder, such as runs/demo")
    return parser


def _parse(parser: _Parser, arguments: list[str]) -> Any:
    """The options, or None when all that was wanted was help."""
    try:
        return parser.parse_intermixed_args(arguments)
    except SystemExit:
        return None


def _is_input(word: str) -> bool:
    return "=" in word or word.endswith((".yaml", ".yml")) or os.path.isfile(word)  # noqa: PTH113 (never raises)


def _load(words: Sequence[str]) -> LoadedConfig:
    from rolepool.config import load_config

    files = [word for word in words if "=" not in word and not word.startswith("~")]
    return load_config(files, [word for word in words if word not in files])
