"""All rows of the table of docs/performance.md that one GPU can measure, one after another.

    python benchmarks/gpu/all_rows.py --trl-116 FOLDER --trl-112 FOLDER --json rows.json
    python benchmarks/gpu/all_rows.py --rows grpo,ppo --limit 570 --json rows.json
    python benchmarks/gpu/all_rows.py --list       the rows and their commands
    python benchmarks/gpu/all_rows.py --tiny       the same programs with small models on the CPU

Each row is a program in a process of its own, with a limit of its own; --limit is that of all
together, and a row that is stopped may take a minute more to end. A row that fails or is stopped
does not stop the others, and what it has measured until then counts. Figures and the end of what
each row printed are written to --json after every row. A later call with the same file keeps the
rows that it does not run, so the rows can be measured in several short calls. The table at the end
has all rows of the file.

Folders and libraries that some rows need:

    --trl-116, --trl-112   `pip install --no-deps --target FOLDER trl==1.16.0 accelerate`, and the
                           same with trl==1.12.0. Without them, rolepool's side runs alone
    --nccl                 a libnccl.so.2 from version 2.30 on, with which several ranks can use one
                           GPU: for the row `weights`, which is skipped without
    --model                a folder with SmolLM2-135M-Instruct, for `start`; random weights without
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHARED_MEMORY = Path("/dev/shm")
SHARED_MODELS = SHARED_MEMORY / f"rolepool_rows_{os.getpid()}"
MODEL_BYTES = 40 * 2**30
"""Free space of shared memory for a 7B model's files to be made there: they and some room."""
LEAST_S = 20.0
"""With less time left no row begins."""
SECONDS_TO_CLOSE = 75.0
POLL_S = 0.2
OUTPUT_CHARACTERS = 20_000
LINES_OF_A_FAILURE = 12
NUM_FIRST_STEPS = 3
"""The steps in which memory of snapshots may be new."""


@dataclass(frozen=True)
class Figure:
    """One cell of the table."""

    what: str
    text: str
    goal: str
    reached: bool | None
    """None if there is no goal, or nothing to compare with it."""

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "NOT reached", None: ""}[self.reached]


@dataclass(frozen=True)
class Row:
    """A program and what its JSON says."""

    what: str
    command: tuple[str, ...]
    """After the interpreter; {json} is the file to write."""
    limit_s: float
    read: Callable[[Any], Iterator[Figure]]
    tiny: tuple[str, ...] | None = None
    """The command on the CPU; None if there is none."""
    needs: str = ""
    """The option without which the row is skipped."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables."""


# What the programs write


def step_s(content: Any, part: str) -> float | None:
    """The seconds of a step of a part; None if it failed."""
    if part not in content["parts"]:
        return None
    seconds: float = content["parts"][part]["seconds"]["step"]
    return seconds


def against_trl(content: Any, parts: Sequence[str], goal: float) -> Iterator[Figure]:
    trl_s = step_s(content, "trl")
    for part in parts:
        ours_s = step_s(content, part)
        if ours_s is None:
            continue
        if trl_s is None:
            yield Figure(f"{part} against TRL", f"{ours_s:.3f} s, no TRL", f"{goal:g}x", None)
            continue
        times = trl_s / ours_s
        text = f"{ours_s:.3f} s against {trl_s:.2f} s: {times:.1f}x"
        yield Figure(f"{part} against TRL", text, f"{goal:g}x", times >= goal)


def read_grpo(content: Any) -> Iterator[Figure]:
    parts = content["parts"]
    yield from against_trl(content, ("standard", "bypass"), goal=6)
    if "standard" in parts:
        prefilled = parts["standard"]["prefilled"]
        once = 1 / content["work"]["num_samples"]
        yield Figure(
            "prefill of the samples of a prompt",
            f"{prefilled / once:.2f} times",
            "once",
            prefilled <= 1.01 * once,
        )
    if "standard" in parts and "bypass" in parts:
        skipped_s = parts["standard"]["seconds"]["old_log_prob"]
        is_skipped = "old_log_prob" not in parts["bypass"]["seconds"]
        losses = [parts[part]["first"]["actor/pg_loss"] for part in ("standard", "bypass")]
        text = f"{skipped_s:.3f} s; first losses {losses[0]:.2e} and {losses[1]:.2e}"
        yield Figure("old_log_prob with bypass_mode", text, "skipped", is_skipped)


def read_ppo(content: Any) -> Iterator[Figure]:
    parts = content["parts"]
    yield from against_trl(content, ("standard", "bypass"), goal=14)
    if "standard" not in parts:
        return
    standard = parts["standard"]
    if "trl" in parts and standard["gpu_gib"] and parts["trl"]["gpu_gib"]:
        share = standard["gpu_gib"] / parts["trl"]["gpu_gib"]
        yield Figure("memory against TRL", f"{share:.2f}", "0.3", share <= 0.3)
    chosen_s = step_s(content, "defaults")
    if chosen_s is not None:
        speed = standard["seconds"]["step"] / chosen_s
        text = f"{speed:.1%} of the speed of the recipe's sizes"
        yield Figure("chosen micro-batches", text, "97%", speed >= 0.97)
    weights_s = standard["seconds"]["update_weights"]
    yield Figure("update_weights in one process", f"{weights_s:.4f} s", "0.05 s", weights_s < 0.05)


def read_quickstart(content: Any) -> Iterator[Figure]:
    for part in content["parts"]:
        seconds = content["parts"][part]["seconds"]["step"]
        yield Figure(f"verl's quickstart, {part}", f"{seconds:.2f} s", "5 s", seconds < 5)


def read_pools(content: Any) -> Iterator[Figure]:
    one_s = step_s(content, "defaults")
    two_s = step_s(content, "mps_defaults")
    if one_s is not None and two_s is not None:
        text = f"{two_s:.2f} s against {one_s:.2f} s"
        yield Figure("two pools with MPS against one", text, "not slower", two_s <= one_s)


def read_snapshots(content: Any) -> Iterator[Figure]:
    parts = content["parts"]
    if "standard" not in parts or "no_snapshots" not in parts:
        return
    with_s = sum(parts["standard"]["steps_s"][:NUM_FIRST_STEPS])
    without_s = sum(parts["no_snapshots"]["steps_s"][:NUM_FIRST_STEPS])
    more = with_s / without_s - 1
    text = f"the first {NUM_FIRST_STEPS} steps take {with_s - without_s:+.2f} s ({more:+.1%})"
    yield Figure("first snapshots", text, "at most 5%", more <= 0.05)


def read_start(content: Any) -> Iterator[Figure]:
    for turn, goal_s in (("cold", 30), ("warm", 15)):
        if turn in content:
            seconds = content[turn]["to_first_step_s"]
            first_s = content[turn]["steps_s"][0]
            text = f"{seconds:.1f} s, of which the first step {first_s:.1f} s"
            yield Figure(f"command to first step, {turn}", text, f"{goal_s} s", seconds <= goal_s)


def read_first_step(content: Any) -> Iterator[Figure]:
    for turn, one in content.items():
        text = f"{one['steps_s'][0]:.1f} s against {one['later_s']:.1f} s: {one['ratio']:.2f}x"
        yield Figure(f"first step, {turn}", text, "1.3x", one["ratio"] <= 1.3)


def read_long_rows(content: Any) -> Iterator[Figure]:
    update = content["update_actor"]
    share = update["share_of_peak"] or 0.0
    text = f"{share:.1%} of the peak, {update['tokens_per_s']:,.0f} tokens/s"
    yield Figure("update of long rows", text, "30%", share >= 0.3)


def read_update(content: Any) -> Iterator[Figure]:
    share = content["update_actor"]["share_of_matmul_rate"]
    yield Figure("update_actor, default keys", f"{share:.1%}", "60%", share >= 0.6)


def read_decode(content: Any) -> Iterator[Figure]:
    for name, one in content.items():
        if name == "refill":
            text = f"{one['share']:.0%}, {one['mixed_tokens_per_s']:,.0f} tokens/s"
            yield Figure("requests of many lengths", text, "80%", one["share"] >= 0.8)
        elif isinstance(one, dict):
            goal = one["case"]["goal"]
            text = f"{one['share']:.0%}, {one['step_ms']:.2f} ms a step"
            yield Figure(f"decode {name}", text, f"{goal:.0%}", one["share"] >= goal)


def read_seven(content: Any) -> Iterator[Figure]:
    for one in content:
        steps = one["steps_s"]
        text = (
            f"planned {one['planned_gib']:.1f} GiB, measured {one['measured_gib']:.1f} GiB; "
            f"{len(steps)} steps, the last {steps[-1]:.1f} s"
        )
        yield Figure("7B with offload, plan", text, "within 15%", one["is_close"])


def read_weights(content: Any) -> Iterator[Figure]:
    goals = {"full": 0.5, "delta, a step at 1e-06": 0.1}
    for name, one in content["ways"].items():
        if isinstance(one, dict) and "seconds" in one:
            goal_s = goals.get(name)
            seconds = one["seconds"]
            goal, is_fast = "", None
            if goal_s is not None:
                goal, is_fast = f"{goal_s:g} s", seconds <= goal_s
            yield Figure(f"weights: {name}", f"{seconds:.3f} s", goal, is_fast)


# The rows


def gpu_script(name: str) -> str:
    return f"benchmarks/gpu/{name}.py"


def shape(name: str) -> str:
    return f"recipes/shapes/{name}"


JSON = ("--json", "{json}")


def all_rows(options: argparse.Namespace) -> dict[str, Row]:
    """The rows by name, in the order in which they run."""
    rows = trl_rows(options) | start_rows(options) | step_rows() | training_rows()
    rows |= memory_rows() | weight_rows(options)
    return {name: rows[name] for name in ORDER}


ORDER = (
    "grpo",
    "ppo",
    "start",
    "decode",
    "quickstart",
    "long-rows",
    "update-3b",
    "pools",
    "snapshots",
    "seven",
    "first-step",
    "weights",
)
"""Those that say most come first, and `snapshots` after `ppo`, which leaves compiled code."""


def trl_rows(options: argparse.Namespace) -> dict[str, Row]:
    """Steps beside those of TRL, if it is given."""
    grpo_parts, ppo_parts = "standard,bypass", "standard,bypass,defaults"
    grpo_site: tuple[str, ...] = ()
    ppo_site: tuple[str, ...] = ()
    if options.trl_116 is not None:
        grpo_parts += ",trl"
        grpo_site = ("--trl-site", str(options.trl_116))
    if options.trl_112 is not None:
        ppo_parts += ",trl"
        ppo_site = ("--trl-site", str(options.trl_112))
    grpo = (gpu_script("grpo_step"), "--parts", grpo_parts, *grpo_site, *JSON)
    ppo = (gpu_script("ppo_step"), "--parts", ppo_parts, *ppo_site, *JSON)
    few = ("--tiny", "--steps=3")
    return {
        "grpo": Row("a GRPO step beside TRL's", grpo, 300, read_grpo, (*grpo, *few)),
        "ppo": Row("a PPO step beside TRL's", ppo, 420, read_ppo, (*ppo, *few)),
    }


def start_rows(options: argparse.Namespace) -> dict[str, Row]:
    start = (gpu_script("first_step"), "--case=smollm2-135m", *JSON)
    first = (gpu_script("first_step"), "--case=qwen2.5-1.5b", *JSON)
    real: tuple[str, ...] = ()
    if options.model is not None:
        real = (f"--model={options.model}",)
    return {
        "start": Row(
            "from the command to the end of the first step",
            (*start, *real),
            200,
            read_start,
            (*start, "--tiny"),
        ),
        "first-step": Row(
            "the first step of 1.5B with responses of 8,192 tokens",
            first,
            500,
            read_first_step,
            (*first, "--tiny"),
        ),
    }


def step_rows() -> dict[str, Row]:
    """Steps of rolepool alone."""
    ppo = gpu_script("ppo_step")
    quickstart = (gpu_script("verl_quickstart"), *JSON)
    snapshots = (ppo, "--parts=no_snapshots,standard", "--steps=6", *JSON)
    pools = (ppo, "--shape=qwen2.5-3b", "--num-prompts=64", "--steps=4")
    return {
        "quickstart": Row(
            "verl's quickstart",
            quickstart,
            300,
            read_quickstart,
            (*quickstart, "--tiny", "--steps=3"),
        ),
        "pools": Row(
            "two pools on one GPU, 3B",
            (*pools, "--parts=defaults,mps_defaults", *JSON, "trainer.snapshot_freq=-1"),
            240,
            read_pools,
            # There is no MPS on a CPU, so this only runs the parts, and has no figure.
            (ppo, "--tiny", "--steps=3", "--parts=split_defaults", *JSON),
        ),
        "snapshots": Row(
            "the first snapshots", snapshots, 200, read_snapshots, (*snapshots, "--tiny")
        ),
    }


def training_rows() -> dict[str, Row]:
    """Generation and updates without the rest of a step."""
    decode = (gpu_script("decode"), *JSON)
    training = (gpu_script("training"), "--alone", *JSON)
    return {
        "decode": Row(
            "decode steps and their bytes", decode, 200, read_decode, (*decode, "--tiny")
        ),
        "long-rows": Row(
            "training alone, rows of 16,384 tokens, 0.6B",
            (*training, f"--shape={shape('qwen3-0.6b')}", "--row-tokens=16384", "--rows=16"),
            120,
            read_long_rows,
            (*training, "--tiny"),
        ),
        "update-3b": Row(
            "update_actor, 3B",
            (*training, f"--shape={shape('qwen2.5-3b')}", "--default-keys"),
            150,
            read_update,
            (*training, "--tiny", "--default-keys"),
        ),
    }


def memory_rows() -> dict[str, Row]:
    seven = (gpu_script("plan_memory_runs"), "--cases", "deepseek-llm-7b", *JSON)
    return {
        "seven": Row(
            "7B on one GPU with offload",
            (*seven, f"--folder={folder_of_models() / 'plan_memory'}"),
            540,
            read_seven,
            (*seven, "--tiny", "--folder=runs/plan_memory_tiny", "--steps=2"),
        ),
    }


def weight_rows(options: argparse.Namespace) -> dict[str, Row]:
    weights = ("benchmarks/weight_transfer.py", *JSON)
    large = (f"--shape={shape('deepseek-llm-7b-chat')}", "--rates=1e-6", "--shares=0.01")
    return {
        "weights": Row(
            "7B weights to another pool",
            (*weights, "--device=cuda", *large, "--rounds=3", "--limit=280"),
            300,
            read_weights,
            (*weights, f"--shape={shape('qwen2-tiny')}", "--rounds=1"),
            needs="nccl",
            variables=(("LD_PRELOAD", str(options.nccl)),),
        ),
    }


def folder_of_models() -> Path:
    """Where large models are made: in shared memory if it has the room, because writing and reading
    14 GB takes a disk longer than a step."""
    with suppress(OSError):
        if shutil.disk_usage(SHARED_MEMORY).free > MODEL_BYTES:
            return SHARED_MODELS
    return ROOT / "runs"


# Running them


@dataclass
class Outcome:
    """What became of a row."""

    what: str
    command: str
    seconds: float = 0.0
    problem: str = ""
    figures: tuple[Figure, ...] = ()
    output: str = ""
    """The end of what it printed."""
    content: Any = None
    """What it wrote as JSON."""


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What the process has started, and what that has started."""
    with suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a row that takes too long, and all that it has started. First with a signal after which
    it shows what it has measured."""
    family = family_of(process)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_CLOSE)
    except subprocess.TimeoutExpired:
        family += family_of(process)
        process.kill()
        process.wait()
    for member in family:
        with suppress(psutil.Error):  # it has ended, as it should
            member.kill()


def command_of(row: Row, file: str, *, tiny: bool) -> list[str]:
    words = row.tiny if tiny else row.command
    assert words is not None
    return [word.replace("{json}", file) for word in words]


def run_row(name: str, row: Row, limit_s: float, folder: Path, options: Any) -> Outcome:
    file = folder / f"{name}.json"
    log = folder / f"{name}.txt"
    command = command_of(row, str(file), tiny=options.tiny)
    shown = " ".join(["python", *command_of(row, f"{name}.json", tiny=options.tiny)])
    outcome = Outcome(row.what, shown)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not options.tiny:
        variables |= dict(row.variables)
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            if code != 0:
                outcome.problem = f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome.problem = f"stopped after {limit_s:.0f} s"
            stop(process)
        except BaseException:
            stop(process)
            raise
    outcome.seconds = round(time.monotonic() - start_s, 1)
    outcome.output = log.read_text(encoding="utf-8", errors="replace")[-OUTPUT_CHARACTERS:]
    read_figures(outcome, row, file)
    return outcome


def read_figures(outcome: Outcome, row: Row, file: Path) -> None:
    """What the row has measured, also if it failed later."""
    try:
        outcome.content = json.loads(file.read_text(encoding="utf-8"))
        outcome.figures = tuple(row.read(outcome.content))
    except Exception as error:
        problem = f"no figures: {type(error).__name__}: {error}"
        outcome.problem = f"{outcome.problem}; {problem}".removeprefix("; ")


def show(name: str, outcome: Outcome) -> None:
    print(f"{name}: {outcome.seconds:.0f} s {outcome.problem}")
    for figure in outcome.figures:
        goal = f" (goal {figure.goal}) {figure.verdict}" if figure.goal else ""
        print(f"    {figure.what}: {figure.text}{goal}")
    if outcome.problem:
        for line in outcome.output.splitlines()[-LINES_OF_A_FAILURE:]:
            print(f"    | {line}")
    sys.stdout.flush()


def print_table(outcomes: dict[str, dict[str, Any]]) -> None:
    """All rows that were ever measured into this file. With --tiny the goals mean nothing, because
    they are those of a GPU."""
    print("\n| row | what | figure | goal | reached | seconds | command |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, outcome in outcomes.items():
        command, seconds = f"`{outcome['command']}`", f"{outcome['seconds']:.0f}"
        if not outcome["figures"]:
            print(
                f"| {name} | {outcome['what']} | {outcome['problem']} | | | {seconds} | {command} |"
            )
        for figure in outcome["figures"]:
            verdict = Figure(**figure).verdict
            cells = (name, figure["what"], figure["text"], figure["goal"], verdict)
            print(f"| {' | '.join(cells)} | {seconds} | {command} |")
            command = seconds = ""


def chosen_rows(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Row]:
    rows = all_rows(options)
    names = list(rows) if options.rows is None else options.rows.split(",")
    if unknown := set(names) - set(rows):
        parser.error(f"--rows: no row {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    return {name: rows[name] for name in names}


def parse_options() -> tuple[argparse.Namespace, dict[str, Row]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="names of rows with commas; default: all")
    parser.add_argument("--limit", type=float, default=1500, help="seconds of all; default: 1500")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "all_rows.json")
    parser.add_argument("--trl-116", type=Path, help="a folder with trl 1.16.0")
    parser.add_argument("--trl-112", type=Path, help="a folder with trl 1.12.0")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 from version 2.30 on")
    parser.add_argument("--model", type=Path, help="a folder with SmolLM2-135M-Instruct")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    options = parser.parse_args()
    for option in ("trl_116", "trl_112", "nccl", "model"):
        path = getattr(options, option)
        if path is not None:
            if not path.exists():
                parser.error(f"--{option.replace('_', '-')} {path}: there is nothing")
            setattr(options, option, path.absolute())
    return options, chosen_rows(options, parser)


def main() -> int:
    options, rows = parse_options()
    if options.list:
        for name, row in rows.items():
            words = command_of(row, f"{name}.json", tiny=options.tiny)
            print(f"{name} (at most {row.limit_s:.0f} s): python {' '.join(words)}")
        return 0
    outcomes: dict[str, dict[str, Any]] = {}
    if options.json.exists():
        outcomes = json.loads(options.json.read_text(encoding="utf-8"))
    end_s = time.monotonic() + options.limit
    is_complete = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, row in rows.items():
                left_s = end_s - time.monotonic()
                if row.needs and not options.tiny and getattr(options, row.needs) is None:
                    print(f"{name}: skipped, because it needs --{row.needs}", flush=True)
                    continue
                if left_s < LEAST_S:
                    print(f"{name}: not run, --limit is over", flush=True)
                    is_complete = False
                    continue
                outcome = run_row(name, row, min(row.limit_s, left_s), Path(folder), options)
                show(name, outcome)
                outcomes[name] = asdict(outcome)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
                is_complete = is_complete and not outcome.problem
    finally:
        shutil.rmtree(SHARED_MODELS, ignore_errors=True)
        print_table(outcomes)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
