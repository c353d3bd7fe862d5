"""The code blocks of docs/extending.md, each trained for two steps by the command that the page
names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_helpers import ONE_RANK, small_keys

from rolepool.data.demo import Demo

EXAMPLES = ["estimator", "loss", "engine", "placement", "role", "style", "step", "ahead"]
TWO_STEPS = [*ONE_RANK, "trainer.total_training_steps=2", "trainer.val_before_train=false"]
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator=my_estimator:batch_mean"
ENGINE = "actor_rollout_ref.rollout.name=my_engine:MyEngine"
STRATEGY = "placement.strategy=my_placement:reward_alone"


def write_blocks(root: Path, folder: Path) -> None:
    """Write every Python block that begins with a comment of its file name into that file."""
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page, flags=re.DOTALL)
    assert {name for name, _ in blocks} == {f"my_{name}" for name in EXAMPLES}
    for name, text in blocks:
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def rolepool(command: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as a user starts it: the program, in the folder of the user's files."""
    program = "import sys; from rolepool.cli import main; sys.exit(main())"
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            program,
            command,
            *words,
        ],  # -P: like `rolepool`, without the folder on sys.path
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train_two_steps(demo: Demo, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train in the folder of the user's files; the rows of metrics of the two steps."""
    ended = rolepool("train", folder, *small_keys(demo, folder / "run", *TWO_STEPS, *overrides))
    assert ended.returncode == 0, ended.stderr
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    updates = [row for row in rows if "actor/updates" in row]
    assert [row["actor/updates"] for row in updates] == [2, 2]
    assert all(row["actor/grad_norm"] > 0 for row in updates)
    return updates


@pytest.fixture(scope="module")
def trained(
    root: Path, demo: Demo, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """One run with the page's estimator, loss, engine and strategy: its folder, and the rows of its
    two steps."""
    folder = tmp_path_factory.mktemp("page")
    write_blocks(root, folder)
    words = [ESTIMATOR, f"{LOSS_MODE}=my_loss:truncated", ENGINE, STRATEGY, *reward_model_of(demo)]
    words += ["actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.val_before_train=true"]
    return folder, train_two_steps(demo, folder, *words, "trainer.n_gpus_per_node=2")


def reward_model_of(demo: Demo) -> list[str]:
    return ["reward_model.enable=true", f"reward_model.model.path={demo.reward_model}"]


def test_the_estimator_and_the_loss_of_the_page_train(
    trained: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, updates = trained
    assert all("actor/truncated_fraction" in row for row in updates), "a metric of the loss"
    assert "critic/vf_loss" not in updates[0], "an estimator without needs has no critic"


def test_the_engine_of_the_page_samples_with_the_weights_of_each_step(
    trained: tuple[Path, list[dict[str, Any]]],
) -> None:
    """The actor's own log-probs of its tokens are those of the engine, also after an update;
    validation is greedy."""
    folder, updates = trained
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in updates)
    assert "val-core/" in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_the_strategy_of_the_page_gives_the_reward_model_a_gpu_of_its_own(
    trained: tuple[Path, list[dict[str, Any]]], demo: Demo
) -> None:
    folder, _ = trained
    two_nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    planned = rolepool("plan", folder, "--json", STRATEGY, *reward_model_of(demo), *two_nodes)
    pools = json.loads(planned.stdout)["pools"]
    assert {name: pool["per_node"] for name, pool in pools.items()} == {
        "main": [4, 3],
        "reward": [0, 1],
    }
    assert pools["reward"]["roles"] == ["reward_model"]
    spans = [json.loads(line) for line in (folder / "run" / "spans.jsonl").read_text().splitlines()]
    assert {span["role"] for span in spans if span["pool"] == "reward"} == {"reward_model"}


def test_the_step_of_two_phases_generates_ahead_and_a_step_in_one_function_is_refused(
    root: Path, demo: Demo, tmp_path: Path
) -> None:
    write_blocks(root, tmp_path)
    (tmp_path / "mine.py").write_text("def step(*arguments):\n    pass\n")
    ahead = "algorithm.max_staleness=1"
    planned = rolepool("plan", tmp_path, "--json", "trainer.step=my_ahead:ahead_step", ahead)
    assert "1 step ahead" in json.loads(planned.stdout)["settings"]["staleness"]
    for words in (["plan"], ["train", *small_keys(demo, tmp_path / "run")]):
        command, *others = words
        refused = rolepool(command, tmp_path, *others, "trainer.step=mine:step", ahead)
        assert refused.returncode == 2
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert "one function cannot generate ahead, and trainer.step=mine:step is one" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_role_of_the_page_is_planned_placed_called_and_measured(
    root: Path, demo: Demo, tmp_path: Path
) -> None:
    """Its files are in a folder below that of the command, and in the path that names the
    extension."""
    (tmp_path / "parts").mkdir()
    write_blocks(root, tmp_path / "parts")
    words = [
        "trainer.extensions=parts/my_role.py",
        "trainer.step=my_step:style_step",
        f"roles.style.model.path={demo.reward_model}",
        "roles.style.weight=0.25",
    ]
    split = ["trainer.n_gpus_per_node=2", "placement.strategy=split"]
    keys = small_keys(demo, tmp_path / "run", *words, *split)
    planned = json.loads(rolepool("plan", tmp_path, "--json", *keys).stdout)
    assert planned["pools"]["critic_pool"]["roles"] == ["critic", "style"]
    assert ["style", "old_log_prob"] in planned["overlaps"]
    assert "style" in json.dumps(planned["memory"])
    updates = train_two_steps(demo, tmp_path, *words, *split)
    for row in updates:
        assert row["timing_s/style"] > 0
        rule = row["critic/score/mean"] - 0.25 * row["reward/style/mean"]
        assert rule * 32 * 4 == pytest.approx(round(rule * 32 * 4), abs=1e-3), (
            "32 responses, scored in quarters"
        )
    spans = [
        json.loads(line) for line in (tmp_path / "run" / "spans.jsonl").read_text().splitlines()
    ]
    assert {span["pool"] for span in spans if span["operation"] == "style"} == {"critic_pool"}
    assert rolepool("report", tmp_path, "run").returncode == 0
    explained = rolepool(
        "config", tmp_path, "trainer.extensions=parts/my_role.py", "roles.style.weight"
    )
    assert "Weight of the style score" in explained.stdout


FUNCTIONS = {
    "algorithm.adv_estimator=no_module:f": "cannot be imported (ModuleNotFoundError: ",
    "algorithm.adv_estimator=mine:f": "cannot be imported (AttributeError: module 'mine' has no attribute 'f')",
    f"{LOSS_MODE}=broken:f": "cannot be imported (SyntaxError: ",
    f"{LOSS_MODE}=mine:strict": "must accept further keyword arguments; add **kwargs to it",
    "algorithm.adv_estimator=mine:with_values": "it needs values; set critic.enable=true",
}
EXTENSIONS = {
    "trainer.extensions=no_module": "cannot be imported (ModuleNotFoundError: No module named 'no_module')",
    "trainer.extensions=parts/none.py": "cannot be imported (ModuleNotFoundError: No module named 'none')",
    "trainer.extensions=json.py": "has the same module name; rename your file",
    "trainer.extensions=twice": "ConfigError: register_role: the name critic is already used",
    "trainer.step=mine:no_step": "cannot be imported (AttributeError: module 'mine' has no attribute 'no_step')",
    "placement.strategy=no_module:f": "cannot be imported (ModuleNotFoundError: ",
    "placement.strategy=mine:fails": "the function failed (KeyError at mine.py:9: 'GPUs'); correct the function",
    "placement.strategy=mine:nothing": "the function returned a NoneType; return a ResourcePoolManager",
    "placement.strategy=mine:no_actor": "no pool for actor, rollout; give each role one of all",
    "actor_rollout_ref.rollout.name=no_module:Engine": "cannot be imported (ModuleNotFoundError: ",
}
FILES = {
    "broken.py": "def f(:\n",
    "json.py": "",
    "mine.py": """
from rolepool import ResourcePoolManager, Role, register_adv_est
def strict(log_prob): ...
@register_adv_est('mine', needs=['values'])
def with_values(values, **_): ...
def no_actor(config, gpus_per_node):
    return ResourcePoolManager({'all': gpus_per_node}, {Role.Critic: 'all'})
def fails(config, gpus_per_node):
    return {}['GPUs']
def nothing(config, gpus_per_node): ...
""",
    "twice.py": """
from rolepool.placement.roles import ROLE_SPECS, Role, register_role
register_role(ROLE_SPECS[Role.Critic])
""",
}
FORKS = """
import json, os, sys
import rolepool.trainer.loop  # takes seconds, so it is imported once; after that each command is a process of its own
from rolepool.cli import main

for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = ["rolepool", *words]
        code = 1
        try:
            code = main()
        except SystemExit as ended:  # in the driver, which the command forks
            code = ended.code
        finally:
            os._exit(code)  # without clearing every module, which takes longer than the command
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def refused(
    demo: Demo, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """For each command and override, the exit code and the lines of errors."""
    folder = tmp_path_factory.mktemp("refused")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    cases = [("train", override) for override in (*FUNCTIONS, *EXTENSIONS)]
    cases += [("plan", override) for override in EXTENSIONS]
    keys = small_keys(demo, folder / "run", *TWO_STEPS)
    words = json.dumps([[command, *keys, override] for command, override in cases])
    ended = subprocess.run(
        [sys.executable, "-P", "-c", FORKS, words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert not (folder / "run").exists(), "nothing is written before the first process starts"
    texts = [(folder / f"{number}.txt").read_text().splitlines() for number in range(len(cases))]
    codes = [int(line) for line in ended.stdout.splitlines() if line.isdigit()]
    return dict(zip(cases, zip(codes, texts, strict=True), strict=True))


@pytest.mark.parametrize(
    ("command", "override"),
    [
        *(("train", override) for override in (*FUNCTIONS, *EXTENSIONS)),
        *(("plan", override) for override in EXTENSIONS),
    ],
)
def test_a_function_or_an_extension_that_cannot_be_used_is_one_line_before_a_process_starts(
    refused: dict[tuple[str, str], tuple[int, list[str]]], command: str, override: str
) -> None:
    code, lines = refused[command, override]
    (line,) = [line for line in lines if not line.startswith("note: no effect here: ")]
    assert (code, line.startswith(f"error: {override}: ")) == (2, True), line
    assert (FUNCTIONS | EXTENSIONS)[override] in line
