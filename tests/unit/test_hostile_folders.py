"""Run folders that somebody made to do harm: no command that reads one imports, executes or looks
up what it names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml
from synthetic_runs import write_run

from rolepool.api import Run
from rolepool.cli import COMMANDS, main
from rolepool.errors import RolepoolError
from rolepool.reading import MAX_LINE_BYTES
from rolepool.report.serve import Server

SECRET = "the-value-of-a-secret"
OWN_CONFIG = {"signal", "plan", "config", "train"}
"""Commands that get a config of the user's own."""
NO_CONFIG = {"recipes", "demo"}
"""Commands that read neither a config nor a run folder."""
ARGUMENTS: dict[str, Callable[[str], list[str]]] = {
    "move": lambda run: [run, "placement.strategy=split"],
    "predict": lambda run: [run, "--", "split", "trainer.nnodes=1"],
    "watch": lambda run: [run, "--once"],
    "report": lambda run: [run],
    "compare": lambda run: [run, run, "--output-dir", f"{run}_compared"],
    "plot": lambda run: [run, "--output-dir", f"{run}_plots"],
    "trace": lambda run: [run],
    "export": lambda run: [run, f"{run}_exported"],
}
"""The words after each command that reads a run folder. `serve`, which does not end, has its own
tests."""


def test_every_command_is_tried_here() -> None:
    """A new command must be added to one of these lists."""
    assert COMMANDS.keys() == {*ARGUMENTS, *OWN_CONFIG, *NO_CONFIG, "serve"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=6)


@pytest.fixture
def copy(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run, in the current folder, beside a module that must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.setenv("ROLEPOOL_TEST_SECRET", SECRET)
    Path("evil.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\n", encoding="utf-8"
    )
    yield Path(shutil.copytree(run, "copy"))
    assert "evil" not in sys.modules
    assert not Path("executed").exists()


def change(folder: Path, **values: object) -> None:
    """Set keys in the config.yaml of a run. `__` in a name stands for a dot."""
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    for name, value in values.items():
        *sections, key = name.split("__")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    file.write_text(yaml.safe_dump(config), encoding="utf-8")


HOSTILE: dict[str, dict[str, object]] = {
    "an extension": {"trainer__extensions": ["evil"]},
    "an extension by path": {"trainer__extensions": ["./evil.py"]},
    "a step": {"trainer__step": "evil:step"},
    "a strategy": {"placement__strategy": "evil:strategy"},
    "an estimator": {"algorithm__adv_estimator": "evil:estimate"},
    "a policy loss": {"actor_rollout_ref__actor__policy_loss__loss_mode": "evil:loss"},
    "an engine": {"actor_rollout_ref__rollout__name": "evil:Engine"},
    "an environment": {
        "environment__path": "evil.py",
        "environment__name": "Env",
        "actor_rollout_ref__rollout__multi_turn__enable": True,
    },
    "a reward function": {"custom_reward_function__path": "evil.py"},
    "the environment's variables": {
        "trainer__experiment_name": "${oc.env:ROLEPOOL_TEST_SECRET}",
        "trainer__project_name": "${oc.decode:${oc.env:ROLEPOOL_TEST_SECRET}}",
    },
    "names of an extension": {
        "trainer__extensions": ["evil"],
        "algorithm__adv_estimator": "its_own",
        "roles__judge__weight": 1.0,
    },
}


SLOW = {"plot", "export"}
"""Commands that take about a second. They are tried with fewer cases."""
TRIED = [(case, command) for case in HOSTILE for command in ARGUMENTS if command not in SLOW]
TRIED += [
    (case, command)
    for case in ("an extension", "the environment's variables")
    for command in sorted(SLOW)
]


@pytest.mark.parametrize(("case", "command"), TRIED)
def test_nothing_that_a_run_folder_names_is_imported_or_looked_up(
    copy: Path, case: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy, **HOSTILE[case])
    code = main([command, *ARGUMENTS[command](str(copy))])
    outcome = capsys.readouterr()
    assert code in (0, 2)
    assert "Traceback" not in outcome.err
    written = [
        file for file in Path.cwd().rglob("*") if file.is_file() and file.stat().st_size < 2**24
    ]
    assert not any(SECRET.encode() in file.read_bytes() for file in written)
    assert SECRET not in outcome.out + outcome.err
    if command in ("watch", "report", "compare", "plot", "trace"):
        assert code == 0, outcome.err
    else:
        assert code == 0 or outcome.err.startswith("error: ")


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_is_imported_by_the_python_api(copy: Path, case: str) -> None:
    change(copy, **HOSTILE[case])
    run = Run(copy)
    run.metrics()
    run.report()
    for read in (
        lambda: run.config,
        lambda: run.plan,
        lambda: run.move("placement.strategy=split"),
    ):
        with suppress(RolepoolError):
            read()
    if case != "a strategy":
        assert run.plan.plan.pools.keys() == {"global_pool"}


def test_the_user_may_name_what_a_prediction_needs(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trusted extension is imported if it is named in the command, and only then."""
    code = "from rolepool.placement.strategies import standard\n\n\n"
    code += "def strategy(*given):\n    return standard(*given)\n"
    Path("harmless.py").write_text(code, encoding="utf-8")
    change(copy, placement__strategy="harmless:strategy")
    assert main(["predict", str(copy), "--", "trainer.nnodes=1"]) == 2
    assert "is not imported, because only the run folder names it" in capsys.readouterr().err
    assert "harmless" not in sys.modules
    assert main(["predict", str(copy), "--", "harmless:strategy"]) == 0
    assert "harmless" in sys.modules


@pytest.mark.parametrize("case", ["names of an extension", "a strategy"])
def test_a_move_that_only_the_run_can_check_is_left_to_the_run(
    copy: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy, **HOSTILE[case])
    (copy / ".lock").write_text("process 1 on elsewhere", encoding="utf-8")
    assert main(["move", str(copy), "trainer.n_gpus_per_node=2", "--timeout", "0.1"]) == 2
    assert "has not moved within --timeout 0.1 s" in capsys.readouterr().err


def test_a_prediction_from_a_run_with_an_extension_says_how_to_name_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy, **HOSTILE["names of an extension"])
    assert main(["predict", str(copy), "--", "split"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "algorithm.adv_estimator=its_own" in line and "roles.judge.weight=1.0" in line
    assert line.endswith("if you trust its extensions, name them: --set trainer.extensions=[...]")


def test_an_extension_that_the_user_names_is_imported_for_a_prediction(copy: Path) -> None:
    code = "from rolepool.config.functions import register_adv_est as add\nadd('its_own', needs=['values'])(print)\n"
    Path("its.py").write_text(code, encoding="utf-8")
    change(copy, trainer__extensions=["its.py"], algorithm__adv_estimator="its_own")
    words = ["predict", str(copy), "--set", "trainer.extensions=[its.py]", "--", "split"]
    ended = subprocess.run(
        [sys.executable, "-m", "rolepool", *words], capture_output=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert b"critic_pool [2]" in ended.stdout


@pytest.mark.parametrize(("command", "name"), [("report", "report.html"), ("trace", "trace.json")])
def test_no_file_outside_of_the_folder_is_overwritten(copy: Path, command: str, name: str) -> None:
    """A folder can have links with the names of the files that are written into it."""
    own = Path("own.txt")
    own.write_text("mine", encoding="utf-8")
    for link in (name, f".tmp-{os.getpid()}-{name}"):
        (copy / link).symlink_to(own.absolute())
    assert main([command, str(copy)]) == 0
    assert own.read_text(encoding="utf-8") == "mine"
    assert (copy / name).stat().st_size > 100


# Damaged files: no traceback, no endless work, no control character


NODE = os.uname().nodename.encode()
DEEP = b"[" * 100_000 + b"]" * 100_000
APPENDED: dict[str, tuple[str, bytes]] = {
    "deep metrics": ("metrics.jsonl", b'{"step": %b}\n' % DEEP),
    "steps without end": (
        "metrics.jsonl",
        b'{"step": 1e999, "a": 1}\n{"step": 1e300, "a": 1}\n{"step": 1.5, "a": 1}\n',
    ),
    "numbers without end": (
        "metrics.jsonl",
        b'{"step": 3, "timing_s/step": 1e308, "training/num_steps": 1e308}\n',
    ),
    "a restart that is not UTF-8": ("metrics.jsonl", b'{"step": 3, "restart": {"what": "\xff"}}\n'),
    "a line without an end": ("metrics.jsonl", b"x" * (MAX_LINE_BYTES + 10)),
    "spans of far steps": ("spans.jsonl", b"FIRST" + b'"step": 123456789012345678901234567890'),
    "spans of far times": ("spans.jsonl", b"FIRST" + b'"end_s": 1e308'),
    "deep spans": ("spans.jsonl", DEEP + b"\n"),
    "large samples": (
        "monitor.jsonl",
        b'{"time_s": 1, "gpus": [], "processes": [{"pool": "p", "cpu_percent": 1e308, "memory_bytes": 1}]}\n'
        * 2,
    ),
}
REPLACED: dict[str, tuple[str, bytes]] = {
    "an alias bomb": (
        "config.yaml",
        b"a: &a [1,1]\n" + b"".join(b"a%d: &a%d [*a,*a]\n" % (n, n) for n in range(9)),
    ),
    "a deep config": ("config.yaml", b"a: " + DEEP),
    "a config with a wrong reference": ("config.yaml", b'trainer: {experiment_name: ${a="x"}}\n'),
    "a config that is a list": ("config.yaml", b"- 1\n"),
    "a config with other types": ("config.yaml", b"trainer: [1]\ndata: 5\nalgorithm: null\n"),
    "a deep plan": ("plan.json", DEEP),
    "a binary plan": ("plan.json", b"\xff\x00"),
    "a plan without GPUs": ("plan.json", b'"gpus_per_node": []'),
    "a plan of too many GPUs": ("plan.json", b'"gpus_per_node": [1000000000]'),
    "a plan without roles' pools": ("plan.json", b'"roles": {"actor": "none"}'),
    "a binary lock": (".lock", b"\xff\x00\x1b[2J"),
    "the lock of a huge process": (".lock", b"process 99999999999999999999 on " + NODE),
    "a state without times": ("state.json", b'[1e308, "x", 1e308, {"p": [["gen", 1e308, null]]}]'),
    "a deep state": ("state.json", DEEP),
}
NOTED_LINES = APPENDED.keys() - {"numbers without end"}
NOTED_FILES = {case for case, (name, _) in REPLACED.items() if name in ("config.yaml", "plan.json")}
NOTED_FILES -= {"a config with other types"}
READERS = {name: command for name, command in ARGUMENTS.items() if name not in ("plot", "export")}
"""Commands that read these files. `plot` reads what `compare` reads, and `export` only the
config."""


def damage(folder: Path, case: str) -> None:
    if case in APPENDED:
        name, content = APPENDED[case]
        file = folder / name
        if content.startswith(b"FIRST"):  # a field of the first span
            span = json.loads(file.read_bytes().splitlines()[0])
            content = (
                json.dumps(
                    {**span, **json.loads(b"{" + content.removeprefix(b"FIRST") + b"}")}
                ).encode()
                + b"\n"
            )
        with file.open("ab") as appended:
            appended.write(content)
        return
    name, content = REPLACED[case]
    if name == "plan.json" and content.startswith(b'"'):  # a field of the plan
        history = json.loads((folder / name).read_bytes())
        history["plans"][0]["plan"] |= json.loads(b"{" + content + b"}")
        content = json.dumps(history).encode()
    (folder / name).write_bytes(content)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("case", [*APPENDED, *REPLACED])
def test_a_damaged_file_is_a_clear_line(
    copy: Path, case: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` passes errors on that no user can cause, so a traceback would fail this test."""
    damage(copy, case)
    code = main([command, *READERS[command](str(copy))])
    outcome = capsys.readouterr()
    assert code == 0 or (code == 2 and outcome.err.startswith("error: "))
    assert "\x1b" not in outcome.err
    if command == "report" and case in NOTED_LINES:
        assert outcome.err.startswith("skipped ") and APPENDED[case][0] in outcome.err
    if command == "report" and case in NOTED_FILES:
        assert (
            outcome.err.startswith(f"{REPLACED[case][0]} cannot be read: ")
            and outcome.err.count("\n") == 1
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_command_waits_for_a_pipe(
    copy: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody ever writes to these pipes."""
    checkpoint = copy / "checkpoints" / "step_000003"
    (checkpoint / "actor").mkdir(parents=True)
    for name in (
        "trainer.json",
        "actor/rank_00000_of_00001.json",
        "actor/x.safetensors",
        "actor/a.sha256",
    ):
        os.mkfifo(checkpoint / name)
    names = ["plan.json", "state.json", ".lock", "spans.jsonl", "monitor.jsonl", "train.log"]
    if command != "export":  # which would not look at the checkpoint without it
        names.append("config.yaml")
    for name in names:
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
    code = main([command, *ARGUMENTS[command](str(copy))])
    assert code == 0 or (code == 2 and capsys.readouterr().err.startswith("error: "))


@pytest.mark.parametrize("command", ["report", "watch", "compare", "plot", "export"])
def test_a_folder_whose_name_is_not_utf_8_can_be_read(copy: Path, command: str) -> None:
    folder = copy.rename(os.fsdecode(b"r\xffn"))
    words = ARGUMENTS[command](str(folder))
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    process = [sys.executable, "-m", "rolepool", command, *words]
    ended = subprocess.run(process, capture_output=True, env=environment, check=False, timeout=60)
    if command == "export":
        assert ended.returncode == 2 and ended.stderr.startswith(b"error: r\\udcffn: no checkpoint")
    else:
        assert ended.returncode == 0 and not ended.stderr, ended.stderr


# serve


def test_serve_shows_hostile_folders_and_stays_usable(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every page comes from a process that ends, and no traceback is printed."""
    root = tmp_path / "served"
    damaged = ("an alias bomb", "a deep config", "a deep plan", "a binary lock", "deep metrics")
    names = {case: f"run_{number}" for number, case in enumerate([*HOSTILE, *damaged])}
    for case, name in names.items():
        folder = Path(shutil.copytree(copy, root / name))
        if case in HOSTILE:
            change(folder, **HOSTILE[case])
        else:
            damage(folder, case)
    before = set(psutil.Process().children())  # other tests keep the processes of reward functions
    with Server(root, "127.0.0.1", 0) as server, ThreadPoolExecutor(5) as threads:
        listener = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        listener.start()

        def page(path: str) -> str:
            request = Request(
                f"http://127.0.0.1:{server.server_port}{path}", headers={"Cookie": server.cookie}
            )
            with urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        try:
            listed = page("/")
            reports = list(threads.map(page, [f"/report?run={name}" for name in names.values()]))
            compared = page("/compare?run=run_0&run=run_1")
        finally:
            server.shutdown()
            listener.join()
    assert all(name in listed for name in names.values())
    assert all(name in report for name, report in zip(names.values(), reports, strict=True))
    assert SECRET not in listed + compared + "".join(reports)
    assert "Traceback" not in capfd.readouterr().err
    assert set(psutil.Process().children()) <= before, "processes of pages are left"
