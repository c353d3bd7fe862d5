"""The command line: one function for each command.

Owns the list of commands and what they print. Slow imports are inside the commands, so that
`--help` answers at once.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rolepool import __version__
from rolepool.command_line import (
    EXIT_USER_ERROR,
    Parser,
    is_input,
    load_words,
    print_errors,
    print_line,
    read_words,
    run_program,
)
from rolepool.errors import ConfigError, explained

RUN_HELP = "the run folder, such as runs/demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_program(_dispatch, argv)


def _dispatch(arguments: list[str]) -> int | None:
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        command = COMMANDS[name]
        parser = Parser(f"rolepool {name}", command.__doc__, WORDS.get(name))
        return command(parser, arguments[1:])
    if name == "--version":
        print(f"rolepool {__version__}")
    elif name in ("-h", "--help", "help"):
        print("usage: rolepool COMMAND [FILE...] [key=value...] [options]\n")
        print("PPO post-training of language models; you choose which models share which GPUs.\n")
        for command in COMMANDS.values():
            print(f"  rolepool {command.__name__:<8} {command.__doc__}")
        print(
            "\n`rolepool COMMAND --help` explains a command. Config keys: docs/config.md, or `rolepool config KEY`."
        )
    else:
        raise ConfigError(f"{name!r}: no such command; use one of {', '.join(COMMANDS)}")
    return None


# Commands: each adds its options to the parser, parses the arguments and does its work.


def plan(parser: Parser, arguments: list[str]) -> int | None:
    """Show which roles run on which GPUs, whether they fit in memory, and what runs at the same
    time."""
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument(
        "--inventory", metavar="8,8,4", help="number of GPUs on each node (or 1024x8)"
    )
    nodes.add_argument(
        "--live", action="store_true", help="read the inventory from the running Ray cluster"
    )
    parser.add_argument(
        "--gpu-memory", metavar="80", help="memory of one GPU in GiB; default: this machine's GPU"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with code 2 if the memory estimate does not fit"
    )
    options = parser.parse(arguments)

    from rolepool.placement.hardware import detect_gpu_memory, parse_inventory, parse_memory
    from rolepool.planning import Hardware, checked_for_plan, summarise

    draft = read_words(options)
    inventory: tuple[int, ...] | None = None
    if options.inventory is not None:
        inventory = parse_inventory(options.inventory)
    if options.live:
        from rolepool.cluster.cluster import live_inventory

        config = draft.checked().config
        address = config.ray_kwargs.ray_init.address
        inventory = live_inventory(address, config.trainer.device)
    if options.gpu_memory is None:
        gpu_memory_bytes = detect_gpu_memory()
    else:
        gpu_memory_bytes = parse_memory(options.gpu_memory)
    hardware = Hardware(inventory, gpu_memory_bytes)
    loaded = checked_for_plan(draft, hardware)
    summary = summarise(loaded, hardware)
    print(summary.to_json() if options.json else summary.to_terminal())
    print_errors(loaded.notes(), label="note: ")
    print_errors(summary.warnings, label="warning: ")
    print_errors(summary.problems)
    if summary.problems or (options.strict and summary.memory.excess):
        return EXIT_USER_ERROR
    return None


def config(parser: Parser, arguments: list[str]) -> None:
    """Print the complete config; with KEY, explain that key or group of keys."""
    options = parser.parse(arguments)
    keys: list[str] = []
    inputs: list[str] = []
    for word in options.words:
        if is_input(word):
            inputs.append(word)
        else:
            keys.append(word)
    loaded = load_words(options, inputs)
    if keys:
        explanations = [loaded.explain(key) for key in keys]
        print("\n\n".join(explanations))
        return
    print(loaded.to_yaml().rstrip())
    for setting, reason in loaded.without_effect.items():
        print(f"# no effect: {setting} ({reason})")


def train(parser: Parser, arguments: list[str]) -> int | None:
    """Train; resumes from the newest checkpoint of the run folder if there is one."""
    from rolepool.trainer.main_ppo import train

    return train(arguments, parser.prog)


def signal(parser: Parser, arguments: list[str]) -> None:
    """Generate and score responses to some training prompts, to see whether there is something to
    learn."""
    parser.add_argument(
        "--prompts", type=int, default=64, metavar="N", help="number of prompts; default: 64"
    )
    options = parser.parse(arguments)
    if options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts}: must be at least 1")
    draft = read_words(options)

    from rolepool.config.sources import DEMO_FOLDER, makes_demo
    from rolepool.quick_imports import quick_imports
    from rolepool.trainer.start_checks import check_start, checked

    loaded = checked(draft)
    warnings = check_start(loaded)
    if makes_demo(loaded.config):
        from rolepool.data.demo import make_demo

        make_demo(DEMO_FOLDER)
    print_errors([*loaded.warnings, *warnings], label="warning: ")
    with quick_imports():
        from rolepool.terminal import Terminal
        from rolepool.trainer.signal import measure_signal

    measured = measure_signal(loaded, options.prompts, _print_progress)
    Terminal(soft_wrap=True).print(measured.as_table())
    print(f"{measured.tokens_per_s:,.0f} tokens/s while generating")
    print_errors(measured.advice(), label="")


def move(parser: Parser, arguments: list[str]) -> None:
    """Change the placement of a run while it trains."""
    parser.usage = "rolepool move RUN placement.strategy=split [key=value...] [--timeout SECONDS]"
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="the new placement; other keys stay as they are",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="how many seconds to wait for it; default: 600"
    )
    options = parser.parse(arguments)

    from rolepool.api import Run

    moved = Run(options.run).move(
        *options.words, timeout_s=options.timeout, on_progress=_print_progress
    )
    print_line(moved)


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def export(parser: Parser, arguments: list[str]) -> None:
    """Write the model of a checkpoint as a Hugging Face model folder."""
    parser.add_argument("run", help="the run folder")
    parser.add_argument("folder", help="the new folder to write")
    parser.add_argument(
        "--step",
        type=int,
        help="step of the checkpoint; default: the newest",
    )
    parser.add_argument(
        "--role",
        default="actor",
        help="a role that is trained; default: actor",
    )
    options = parser.parse(arguments)

    from rolepool.config.functions import only_reading
    from rolepool.trainer.checkpoint import export_run

    with only_reading():
        checkpoint = export_run(
            run=Path(options.run),
            step=options.step,
            out_dir=Path(options.folder),
            role=options.role,
        )
    print_line(f"{options.folder}: the {options.role} of {checkpoint}")


def report(parser: Parser, arguments: list[str]) -> None:
    """Write a run's report page: findings, timeline, critical path, step times, training curves."""
    _write_about_run(parser, arguments, "report.html")


def trace(parser: Parser, arguments: list[str]) -> None:
    """Write a run's spans as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    _write_about_run(parser, arguments, "trace.json")


def _write_about_run(parser: Parser, arguments: list[str], name: str) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"default: {name} in the run folder",
    )
    options = parser.parse(arguments)

    from rolepool.config.functions import only_reading
    from rolepool.files import write_atomically
    from rolepool.report.page import render
    from rolepool.report.run import read_run
    from rolepool.report.trace import trace_pieces

    pieces: Iterable[str]
    with only_reading():
        run = read_run(options.run)
        if name == "trace.json":
            pieces = trace_pieces(run)
        else:
            pieces = [render(run)]
    print_errors(run.notes, label="")
    path = Path(options.output or run.folder / name)
    with explained(f"{parser.prog} {path}: cannot be written", "give another file with -o"):
        write_atomically(path, pieces)
    print_line(path)


def watch(parser: Parser, arguments: list[str]) -> None:
    """Show a run's pools, operations and reward in the terminal, during or after training."""
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    options = parser.parse(arguments)

    from rolepool.report.watch import watch as show_run

    show_run(options.run, once=options.once)


def serve(parser: Parser, arguments: list[str]) -> None:
    """Show all runs below a folder in the browser: a live list, the report of each run, and
    comparisons."""
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        metavar="FOLDER",
        help="default: runs",
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free port")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: this machine only"
    )
    options = parser.parse(arguments)

    from rolepool.report.serve import Server

    with explained(
        f"--host {options.host} --port {options.port}: cannot be used",
        "name another one",
        OverflowError,
    ):
        server = Server(Path(options.folder), options.host, options.port)
    address = str(server.server_address[0])
    if not address.startswith("127."):
        warning = (
            f"--host {options.host}: other machines can reach this page, and it is not encrypted"
        )
        print_errors([warning], label="warning: ")
    print_line(f"runs in {server.root}; press Ctrl-C to stop\n{server.url}")
    with suppress(KeyboardInterrupt), server:
        server.serve_forever()
    print("stopped")


def demo(parser: Parser, arguments: list[str]) -> None:
    """Create the demo's models, tokenizer and prompts in a folder, unless they exist."""
    parser.add_argument(
        "folder", nargs="?", default="runs/demo_data", help="default: runs/demo_data"
    )
    options = parser.parse(arguments)

    from safetensors import SafetensorError

    from rolepool.data.demo import make_demo

    with explained(f"{options.folder}: cannot be written", "name another folder", SafetensorError):
        files = make_demo(options.folder)
    print(files.folder)


def recipes(parser: Parser, arguments: list[str]) -> None:
    """List the recipes: configs that are part of rolepool and can be trained by name; with NAME,
    print one."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a recipe; `rolepool train NAME` trains it"
    )
    options = parser.parse(arguments)

    from rolepool.config.sources import recipe_names, recipe_text

    if options.name is not None:
        print(recipe_text(options.name), end="")
        return
    for name in recipe_names():
        first_line, *_ = recipe_text(name).splitlines()
        print(f"{name:<18} {first_line.removeprefix('# ')}")


def compare(parser: Parser, arguments: list[str]) -> int | None:
    """Compare runs: reward, speed and keys; with --run, first train a recipe with each placement
    listed after `--`."""
    usage = (
        "rolepool compare RUN [RUN...] [--output-dir DIR]\n       rolepool compare --run RECIPE "
    )
    parser.usage = usage + "[key=value...] -- standard split placement.strategy=split,key=value"
    words_help = "run folders; with --run, overrides for all placements"
    parser.add_argument("words", nargs="*", metavar="RUN|key=value", help=words_help)
    parser.add_argument(
        "--run", metavar="RECIPE", help="first train this recipe with each placement"
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", help="default: `comparison` next to the first run"
    )
    words, placements = _divided_at_dashes(arguments)
    options = parser.parse(words)

    from rolepool.config.functions import only_reading
    from rolepool.report import compare as comparison
    from rolepool.report.comparison_page import write_comparison
    from rolepool.report.placement_runs import run_placements
    from rolepool.terminal import Terminal
    from rolepool.trainer.supervisor import wait_for

    folders: Sequence[str | Path] = options.words
    failures: list[str] = []
    if options.run is not None:
        say = partial(print, flush=True)
        folders, failures = run_placements(options.run, options.words, placements, say, wait_for)
        print_errors(failures)
    with only_reading():
        runs = comparison.read_runs(folders)
    if len(runs) < 2 or (placements and options.run is None):
        raise ConfigError(
            "compare: needs two runs, or one that moved; give run folders, or --run RECIPE -- PLACEMENTS"
        )
    for name, run in runs.items():
        notes = [f"{name}: {note}" for note in run.notes]
        print_errors(notes, label="")
    lines = comparison.compare(runs)
    terminal = Terminal(width=comparison.TABLE_WIDTH)
    sentences = [comparison.headline(runs, lines), *comparison.notes_on(runs)]
    terminal.print(*sentences, "", sep="\n", soft_wrap=True)
    terminal.print(comparison.as_table(lines))
    output = Path(folders[0]).parent / "comparison"
    if options.output_dir:
        output = Path(options.output_dir)
    with explained(f"--output-dir {output}: cannot be written", "name another folder"):
        page = write_comparison(runs, lines, output)
    print_line(page)
    return EXIT_USER_ERROR if failures else None


def predict(parser: Parser, arguments: list[str]) -> int | None:
    """Predict how long a step takes under other placements, from recorded runs; with --search, find
    the best one."""
    placements, options = _parse_predict(parser, arguments)

    from rolepool.config.functions import only_reading
    from rolepool.report.placement_runs import overrides_of
    from rolepool.report.predicted import TABLE_WIDTH, PredictRequest, plot_scaling, why_best
    from rolepool.terminal import Terminal
    from rolepool.trainer.paper import schedule_of

    own_words: list[str] = []
    for placement in placements:
        own_words += overrides_of(placement)
    with only_reading(*options.set, *own_words):
        request = PredictRequest(options, schedule_of)
        if options.search:
            title = ""
            answer = request.search()
        elif options.scaling is not None:
            title = "GPUs"
            answer = request.scaling(options.scaling)
        else:
            title = "placement"
            answer = request.placements(placements)
    predictions = answer.predictions
    terminal = Terminal(width=TABLE_WIDTH)
    if predictions:
        terminal.print(request.as_table(title, predictions))
    if not placements:
        for label, prediction in predictions.items():
            terminal.print(f"{label}: {prediction.name}", soft_wrap=True)
    if options.search:
        terminal.print(why_best(*predictions.values()), soft_wrap=True)
    elif predictions and options.scaling is not None:
        path = Path(options.output or "scaling.png")
        with explained(
            f"{parser.prog} {path}: cannot be written", "give another file with -o", ValueError
        ):
            plot_scaling(predictions, path)
        print_line(path)
    notes: dict[str, None] = {}
    for prediction in predictions.values():
        notes.update(dict.fromkeys(prediction.notes))
    print_errors(notes, label="note: ")
    print_errors(answer.problems)
    if answer.problems and not predictions:
        return EXIT_USER_ERROR
    return None


def _parse_predict(parser: Parser, arguments: list[str]) -> tuple[list[str], Namespace]:
    """The placements after `--`, and the options before it. Exactly one of three things is
    asked."""
    parser.usage = "rolepool predict RUN [RUN...] -- standard split ...\n       rolepool predict RUN [RUN...] --search"
    parser.add_argument(
        "runs", nargs="+", metavar="RUN|LOG", help="run folders with the same models, or a verl log"
    )
    parser.add_argument(
        "--measured",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs to compare the predictions with",
    )
    parser.add_argument("--search", action="store_true", help="search for the best placements")
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument("--gpus", type=int, help="number of GPUs of one node; default: as the run")
    gpus.add_argument(
        "--inventory", metavar="8,8,4", help="number of GPUs on each node (or 1024x8)"
    )
    parser.add_argument("--objective", choices=("time", "throughput_per_gpu"), default="time")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="other work: new values of keys"
    )
    parser.add_argument(
        "--speed", nargs="+", default=[], metavar="rollout=2", help="what if a role were faster"
    )
    parser.add_argument(
        "--scaling", metavar="1,2,4,8", help="the best step time for each number of GPUs"
    )
    parser.add_argument(
        "--gpu-memory", metavar="80", help="memory of one GPU in GiB; default: this machine's GPU"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where the plot of --scaling goes; default: scaling.png",
    )
    words, placements = _divided_at_dashes(arguments)
    options = parser.parse(words)
    questions = [bool(placements), options.search, options.scaling is not None]
    if questions.count(True) != 1:
        raise ConfigError(
            "predict: give placements after `--`, such as `-- standard split`, or --search, or --scaling"
        )
    return placements, options


def _divided_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def plot(parser: Parser, arguments: list[str]) -> None:
    """Plot the timings of console logs or run folders, and write all numbers as CSV."""
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="console log or folder of a run",
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        default="plots",
        help="default: plots",
    )
    options = parser.parse(arguments)

    from rolepool.report.plots import plot_logs

    with explained(f"--output-dir {options.output_dir}: cannot be written", "name another folder"):
        written = plot_logs(options.logs, options.output_dir)
    for path in written:
        print_line(path)


_ALL = (
    plan,
    config,
    signal,
    train,
    move,
    predict,
    recipes,
    watch,
    serve,
    report,
    compare,
    plot,
    trace,
    export,
    demo,
)
COMMANDS: dict[str, Callable[[Parser, list[str]], int | None]] = {
    command.__name__: command for command in _ALL
}
CONFIG_WORDS = "RECIPE, FILE or key=value"
WORDS = {"plan": CONFIG_WORDS, "signal": CONFIG_WORDS, "config": f"KEY, {CONFIG_WORDS}"}
"""What the positional arguments are, for commands that load a config."""
