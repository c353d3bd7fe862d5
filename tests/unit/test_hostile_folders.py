"""Run folders that somebody made to do harm: no command that reads one imports, executes or looks up what it names."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from synthetic_runs import write_run

from rolepool.cli import COMMANDS, main

SECRET = "the-value-of-a-secret"
OWN_CONFIG = {"plan", "config", "train"}
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
"""The words after each command that reads a run folder. `serve`, which does not end, has its own tests."""


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
    Path("evil.py").write_text("from pathlib import Path\nPath('executed').touch()\n", encoding="utf-8")
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


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_that_a_run_folder_names_is_imported_or_looked_up(
    copy: Path, case: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy, **HOSTILE[case])
    code = main([command, *ARGUMENTS[command](str(copy))])
    outcome = capsys.readouterr()
    assert code in (0, 2)
    assert "Traceback" not in outcome.err
    written = [file for file in Path.cwd().rglob("*") if file.is_file() and file.stat().st_size < 2**24]
    assert not any(SECRET.encode() in file.read_bytes() for file in written)
    assert SECRET not in outcome.out + outcome.err
    if command in ("watch", "report", "compare", "plot", "trace"):
        assert code == 0, outcome.err
    else:
        assert code == 0 or outcome.err.startswith("error: ")
