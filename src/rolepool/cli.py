"""The command line: one function a command.

Owns which commands there are and what they print. Heavy imports stay inside the commands, so that `--help` answers at
once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rolepool import __version__
from rolepool.command_line import EXIT_USER, Parser, is_input, load_words, print_errors, run_program
from rolepool.errors import ConfigError, explained


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
        raise ConfigError(f"{name!r}: no such command; there are {', '.join(COMMANDS)}")
    return COMMANDS[name](arguments[1:])


def _overview() -> str:
    lines = [f"  rolepool {name:<8} {command.__doc__}" for name, command in COMMANDS.items()]
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


def plan(arguments: list[str]) -> int | None:
    """Show which process will hold which GPU with which roles, whether it fits, and what will overlap."""
    parser = Parser("rolepool plan", plan.__doc__, words="FILE or key=value")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--inventory", metavar="8,8,4", help="GPUs per node there are (also 1024x8)")
    parser.add_argument("--live", action="store_true", help="take the inventory from the running Ray cluster")
    parser.add_argument("--gpu-memory", metavar="80", help="memory of one GPU in GiB; default: this machine's GPU")
    parser.add_argument("--strict", action="store_true", help="exit 2 when the memory estimate does not fit")
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
        raise ConfigError("--live: the inventory comes from the cluster or from --inventory; give one of them")
    if options.live:
        from rolepool.cluster.cluster import live_inventory

        inventory = live_inventory(loaded.config.ray_kwargs.ray_init.address, loaded.config.trainer.device)
    gpu_memory = parse_memory(options.gpu_memory) if options.gpu_memory is not None else detect_gpu_memory()
    # An inventory alone is divided whole; with the user's own node and GPU counts it is what those are taken from.
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
    return EXIT_USER if problems or (options.strict and does_not_fit) else None


def config(arguments: list[str]) -> None:
    """Print the full resolved config; with KEY, explain that key or group of keys."""
    parser = Parser("rolepool config", config.__doc__, words="KEY, FILE or key=value")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.config.describe import explain

    keys = [word for word in options.words if not is_input(word)]
    loaded = load_words([word for word in options.words if is_input(word)])
    text = "\n\n".join(explain(key, loaded) for key in keys) if keys else loaded.to_yaml().rstrip()
    print(text)


def train(arguments: list[str]) -> None:
    """Train under the config's placement, from its newest checkpoint if there is one."""
    from rolepool.trainer.main_ppo import train

    train(arguments, "rolepool train")


def export(arguments: list[str]) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder."""
    from rolepool.placement.roles import trained_roles

    parser = Parser("rolepool export", export.__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("folder", help="the new folder to write")
    parser.add_argument("--step", type=int, help="of this step; default: the newest checkpoint")
    parser.add_argument(
        "--role", choices=[str(role) for role in trained_roles()], default="actor", help="default: actor"
    )
    options = parser.parse_intermixed_args(arguments)

    from safetensors import SafetensorError

    from rolepool.trainer.checkpoint import export_run

    with explained(f"{options.folder}: cannot be made", "name another folder", SafetensorError):
        saved = export_run(Path(options.run), options.step, Path(options.folder), options.role)
    print(f"{options.folder}: the {options.role} of {saved}")


def report(arguments: list[str]) -> None:
    """Write a run's page: timeline, step times, critical path, curves, and what to change."""
    parser = _run_parser("rolepool report", report.__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the run folder")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.html import write_report
    from rolepool.report.run import read_run

    run = read_run(options.run)
    for file, number in run.skipped.items():
        print(f"skipped {number} unreadable lines of {file}", file=sys.stderr)
    print(write_report(run, options.output or run.folder / "report.html"))


def watch(arguments: list[str]) -> None:
    """Show a run's pools, operations and reward in the terminal while it trains, or after it has ended."""
    parser = _run_parser("rolepool watch", watch.__doc__)
    parser.add_argument("--once", action="store_true", help="print how it stands and exit")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.watch import watch as show_run

    show_run(options.run, once=options.once)


def trace(arguments: list[str]) -> None:
    """Write a run's spans as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    parser = _run_parser("rolepool trace", trace.__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: trace.json in the run folder")
    options = parser.parse_intermixed_args(arguments)

    from rolepool.report.run import read_run
    from rolepool.report.trace import write_trace

    run = read_run(options.run)
    target = Path(options.output) if options.output else run.folder / "trace.json"
    write_trace(run, target)
    print(target)


def demo(arguments: list[str]) -> None:
    """Make the demo's models, tokenizer and prompts in a folder, where they are not there yet."""
    parser = Parser("rolepool demo", demo.__doc__)
    parser.add_argument("folder", nargs="?", default="runs/demo_data", help="default: runs/demo_data")
    options = parser.parse_intermixed_args(arguments)

    from safetensors import SafetensorError

    from rolepool.data.demo import make_demo

    with explained(f"{options.folder}: cannot be made", "name another folder", SafetensorError):
        made = make_demo(options.folder)
    print(made.folder)


def compare(arguments: list[str]) -> int | None:
    """Compare runs of the same work; with --run, first train a recipe under each placement written after `--`."""
    parser = Parser("rolepool compare", compare.__doc__)
    words_help = "run folders; with --run, overrides for every placement"
    parser.add_argument("words", nargs="*", metavar="RUN|key=value", help=words_help)
    parser.usage = (
        "rolepool compare RUN RUN [RUN...] [--output-dir DIR] [--force]\n"
        "       rolepool compare --run RECIPE [key=value...] -- standard split placement.strategy=split,key=value"
    )
    parser.add_argument("--run", metavar="RECIPE", help="train this recipe under each placement first")
    parser.add_argument("--output-dir", metavar="DIR", help="default: `comparison` beside the first run")
    parser.add_argument("--force", action="store_true", help="compare runs although their work differs")
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
        raise ConfigError("compare: two runs or more are needed; give their folders, or --run RECIPE -- PLACEMENTS")
    runs = comparison.read_runs(folders)
    for name, run in runs.items():
        for file, number in run.skipped.items():
            print(f"{name}: skipped {number} unreadable lines of {file}", file=sys.stderr)
    if not options.force:
        comparison.check_same_work(runs)
    lines = comparison.compare(runs)
    Console(highlight=False, width=comparison.TABLE_WIDTH).print(comparison.as_table(lines))
    output = Path(options.output_dir) if options.output_dir else Path(folders[0]).parent / "comparison"
    with explained(f"--output-dir {output}: cannot be written", "name another folder"):
        written = comparison.write_comparison(runs, lines, output)
    for path in written:
        print(path)
    return EXIT_USER if failures else None


def plot(arguments: list[str]) -> None:
    """Plot the timings of console logs or run folders, and write them as CSV."""
    parser = Parser("rolepool plot", plot.__doc__)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="console log of a run, or its folder")
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


def _run_parser(program: str, summary: str | None) -> Parser:
    parser = Parser(program, summary)
    parser.add_argument("run", metavar="RUN", help="the run folder, such as runs/demo")
    return parser
