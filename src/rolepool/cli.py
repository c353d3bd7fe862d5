"""The command line: one function for each command.

Owns the list of commands and what they print. Slow imports are inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rolepool import __version__
from rolepool.command_line import EXIT_USER_ERROR, Parser, is_input, load_words, print_errors, run_program
from rolepool.errors import ConfigError, explained

if TYPE_CHECKING:
    from rolepool.report.run import Run

RUN_HELP = "the run folder, such as runs/demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_program(_dispatch, argv)


def _dispatch(arguments: list[str]) -> int | None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return None
    if name == "--version":
        print(f"rolepool {__version__}")
        return None
    if name not in COMMANDS:
        raise ConfigError(f"{name!r}: no such command; use one of {', '.join(COMMANDS)}")
    return COMMANDS[name](arguments[1:])


def _overview() -> str:
    commands = "\n".join(f"  rolepool {name:<8} {command.__doc__}" for name, command in COMMANDS.items())
    return (
        "usage: rolepool COMMAND [FILE...] [key=value...] [options]\n\n"
        "PPO post-training of language models; you choose which models share which GPUs.\n\n"
        f"{commands}\n\n"
        "`rolepool COMMAND --help` explains a command. Config keys: docs/config.md, or `rolepool config KEY`."
    )


# Commands


def plan(arguments: list[str]) -> int | None:
    """Show which roles run on which GPUs, whether they fit in memory, and what runs at the same time."""
    parser = Parser("rolepool plan", plan.__doc__, words="FILE or key=value")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--inventory", metavar="8,8,4", help="number of GPUs on each node (or 1024x8)")
    parser.add_argument("--live", action="store_true", help="read the inventory from the running Ray cluster")
    parser.add_argument("--gpu-memory", metavar="80", help="memory of one GPU in GiB; default: this machine's GPU")
    parser.add_argument("--strict", action="store_true", help="exit with code 2 if the memory estimate does not fit")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.placement.advice import advise
    from rolepool.placement.checks import find_problems
    from rolepool.placement.estimate import estimate_memory
    from rolepool.placement.inventory import detect_gpu_memory, parse_inventory, parse_memory
    from rolepool.placement.plan import build_plan
    from rolepool.placement.render import plan_as_json, plan_as_text
    from rolepool.trainer.paper import schedule_of

    loaded = load_words(options.words)
    inventory = parse_inventory(options.inventory) if options.inventory is not None else None
    if options.live and inventory is not None:
        raise ConfigError("--live and --inventory: both give the inventory; use only one of them")
    if options.live:
        from rolepool.cluster.cluster import live_inventory

        inventory = live_inventory(loaded.config.ray_kwargs.ray_init.address, loaded.config.trainer.device)
    gpu_memory = parse_memory(options.gpu_memory) if options.gpu_memory is not None else detect_gpu_memory()
    # Use the whole inventory, or only as many nodes and GPUs as the user has set.
    take_all = inventory is not None and not loaded.set_keys & {"trainer.nnodes", "trainer.n_gpus_per_node"}
    replan = partial(build_plan, gpus_per_node=inventory, take_all=take_all)
    made = replan(loaded.config)
    problems = find_problems(loaded.config, made)
    estimate = estimate_memory(loaded.config, made, None if made.device == "cpu" else gpu_memory)
    advice = advise(loaded.config, made, estimate, gpu_memory, replan)
    overlaps = schedule_of(loaded.config).overlaps(made.roles)
    if options.json:
        print(plan_as_json(made, overlaps, estimate, problems, advice))
    else:
        print(plan_as_text(made, overlaps, estimate, advice))
    print_errors(problems)
    does_not_fit = any(pool.fits is False for pool in estimate.pools.values())
    return EXIT_USER_ERROR if problems or (options.strict and does_not_fit) else None


def config(arguments: list[str]) -> None:
    """Print the complete config; with KEY, explain that key or group of keys."""
    parser = Parser("rolepool config", config.__doc__, words="KEY, FILE or key=value")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.config.describe import explain

    keys = [word for word in options.words if not is_input(word)]
    loaded = load_words([word for word in options.words if is_input(word)])
    text = "\n\n".join(explain(key, loaded) for key in keys) if keys else loaded.to_yaml().rstrip()
    print(text)


def train(arguments: list[str]) -> None:
    """Train; resumes from the newest checkpoint of the run folder if there is one."""
    from rolepool.trainer.main_ppo import train

    train(arguments, "rolepool train")


def export(arguments: list[str]) -> None:
    """Write the model of a checkpoint as a Hugging Face model folder."""
    parser = Parser("rolepool export", export.__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("folder", help="the new folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--role", default="actor", help="a role that is trained; default: actor")
    options = parser.parse_intermixed_args(arguments)

    from safetensors import SafetensorError

    from rolepool.trainer.checkpoint import export_run

    with explained(f"{options.folder}: cannot be written", "name another folder", SafetensorError):
        saved = export_run(Path(options.run), options.step, Path(options.folder), options.role)
    print(f"{options.folder}: the {options.role} of {saved}")


def report(arguments: list[str]) -> None:
    """Write a run's report page: findings, timeline, critical path, step times, training curves."""
    run, output = _read_run("rolepool report", report.__doc__, arguments, "report.html")

    from rolepool.report.html import write_report

    print(write_report(run, output))


def trace(arguments: list[str]) -> None:
    """Write a run's spans as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    run, output = _read_run("rolepool trace", trace.__doc__, arguments, "trace.json")

    from rolepool.report.trace import write_trace

    print(write_trace(run, output))


def watch(arguments: list[str]) -> None:
    """Show a run's pools, operations and reward in the terminal, during or after training."""
    parser = Parser("rolepool watch", watch.__doc__)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.watch import watch as show_run

    show_run(options.run, once=options.once)


def demo(arguments: list[str]) -> None:
    """Create the demo's models, tokenizer and prompts in a folder, unless they exist."""
    parser = Parser("rolepool demo", demo.__doc__)
    parser.add_argument("folder", nargs="?", default="runs/demo_data", help="default: runs/demo_data")
    options = parser.parse_intermixed_args(arguments)

    from safetensors import SafetensorError

    from rolepool.data.demo import make_demo

    with explained(f"{options.folder}: cannot be written", "name another folder", SafetensorError):
        made = make_demo(options.folder)
    print(made.folder)


def compare(arguments: list[str]) -> int | None:
    """Compare runs of the same work; with --run, first train a recipe with each placement listed after `--`."""
    parser = Parser("rolepool compare", compare.__doc__)
    words_help = "run folders; with --run, overrides for all placements"
    parser.add_argument("words", nargs="*", metavar="RUN|key=value", help=words_help)
    parser.usage = (
        "rolepool compare RUN RUN [RUN...] [--output-dir DIR] [--force]\n"
        "       rolepool compare --run RECIPE [key=value...] -- standard split placement.strategy=split,key=value"
    )
    parser.add_argument("--run", metavar="RECIPE", help="first train this recipe with each placement")
    parser.add_argument("--output-dir", metavar="DIR", help="default: `comparison` next to the first run")
    parser.add_argument("--force", action="store_true", help="compare runs even if their work differs")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_intermixed_args(arguments[:cut])

    from rich.console import Console

    from rolepool.report import compare as comparison
    from rolepool.report.placements import run_placements

    folders, words = options.words, arguments[cut + 1 :]
    failures: list[str] = []
    if options.run is not None:
        folders, failures = run_placements(options.run, options.words, words, say=lambda line: print(line, flush=True))
        print_errors(failures)
    if len(folders) < 2 or (words and options.run is None):
        raise ConfigError("compare: needs at least two runs; give their folders, or --run RECIPE -- PLACEMENTS")
    runs = comparison.read_runs(folders)
    for name, run in runs.items():
        _print_notes(f"{name}: {note}" for note in run.notes)
    if not options.force:
        comparison.check_same_work(runs)
    lines = comparison.compare(runs)
    Console(highlight=False, width=comparison.TABLE_WIDTH).print(comparison.as_table(lines))
    output = Path(options.output_dir) if options.output_dir else Path(folders[0]).parent / "comparison"
    with explained(f"--output-dir {output}: cannot be written", "name another folder"):
        written = comparison.write_comparison(runs, lines, output)
    for path in written:
        print(path)
    return EXIT_USER_ERROR if failures else None


def plot(arguments: list[str]) -> None:
    """Plot the timings of console logs or run folders, and write all numbers as CSV."""
    parser = Parser("rolepool plot", plot.__doc__)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="console log or folder of a run")
    parser.add_argument("--output-dir", metavar="DIR", default="plots", help="default: plots")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.plots import plot_logs

    with explained(f"--output-dir {options.output_dir}: cannot be written", "name another folder"):
        written = plot_logs(options.logs, options.output_dir)
    for file in written:
        print(file)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    command.__name__: command for command in (plan, config, train, watch, report, compare, plot, trace, export, demo)
}


def _read_run(program: str, summary: str | None, arguments: list[str], file_name: str) -> tuple[Run, Path]:
    """The run that the arguments name, and the file to write."""
    parser = Parser(program, summary)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", help=f"default: {file_name} in the run folder")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.run import read_run

    run = read_run(options.run)
    _print_notes(run.notes)
    return run, Path(options.output or run.folder / file_name)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)
