"""Training over two nodes as docs/multinode.md says, by its own commands; and what a user is told
when a token, a file or a node is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cluster_helpers import wait_until
from node_namespaces import ADDRESSES, Node, TwoNodes, output_of, why_no_nodes

PAGE = Path(__file__).parents[2] / "docs" / "multinode.md"
TOKEN_MODE = {"RAY_AUTH_MODE": "token"}
BRIEF = "trainer.test_freq=-1 trainer.val_before_train=false"
ONE_SLOT_EACH = "trainer.n_gpus_per_node=1 placement.split.axis=node"
AXES = {"node": ONE_SLOT_EACH, "gpu": "placement.split.axis=gpu"}
SETTING = f"error: ray_kwargs.ray_init.address={ADDRESSES[0]}:6379: "
FIX = "copy ~/.ray/auth_token of the first node to every node with mode 0600, and set RAY_AUTH_MODE=token for every"


def commands_of(section: str) -> list[str]:
    """The blocks of commands under a heading of the page."""
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (found,) = [part for part in text if part.startswith(f"{section}\n")]
    return re.findall(r"^```bash\n(.*?)\n```$", found, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    """Two nodes that share the token, without Ray."""
    reason = why_no_nodes()
    if reason is not None:
        pytest.skip(reason)
    with TwoNodes(tmp_path) as nodes:
        ssh = nodes.one.home / "bin" / "ssh"  # to a node that sees the same files
        ssh.write_text(
            f"#!/bin/sh\n[ $1 = {nodes.two.address} ] && HOME='{nodes.two.home}' exec sh -c \"$2\"\n"
        )
        ssh.chmod(0o755)
        for command in commands_of("Share a token"):
            nodes.one.run(command, tmp_path)
        yield nodes


@pytest.fixture
def work(tmp_path: Path, root: Path) -> Path:
    """The folder to train in, which all nodes share; Ray runs in another."""
    folder = tmp_path / "work"
    shutil.copytree(root / "recipes", folder / "recipes")
    return folder


def start_ray(nodes: TwoNodes, folder: Path) -> None:
    head, join = commands_of("Start Ray on each node")
    nodes.one.run(head, folder)
    nodes.two.run(join, folder)


def start_training(node: Node, folder: Path, overrides: str) -> subprocess.Popen[str]:
    (commands,) = commands_of("Train")
    return node.start(f"{commands} {BRIEF} {overrides}", folder)


def problems_of(process: subprocess.Popen[str], timeout_s: float = 120) -> list[str]:
    """The errors of a program that ends because the user has to change something."""
    output = output_of(process, timeout_s)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    return [line for line in output.splitlines() if line.startswith("error: ")]


def steps_of(run: Path) -> list[int]:
    """The steps whose rows are written."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["step"] for row in rows if "training/epoch" in row]


# The token


def test_who_has_no_token_or_the_wrong_one_is_told_so_and_a_wrong_address_is_another_line(
    nodes: TwoNodes, tmp_path: Path, work: Path
) -> None:
    tokens = [node.home / ".ray" / "auth_token" for node in (nodes.one, nodes.two)]
    assert tokens[0].read_text() == tokens[1].read_text() != ""
    assert [oct(token.stat().st_mode)[-3:] for token in tokens] == ["600", "600"]

    nodes.one.run(commands_of("Start Ray on each node")[0], tmp_path)
    look = (
        f"rolepool plan recipes/demo_split.yaml --live ray_kwargs.ray_init.address={ADDRESSES[0]}"
    )
    asked = [
        nodes.one.start(f"{look}:6379", work),
        nodes.one.start(f"{look}:6379", work, **TOKEN_MODE, RAY_AUTH_TOKEN="0" * 64),
        nodes.two.start(f"{look}:6379", work, **TOKEN_MODE, HOME=str(tmp_path)),
        nodes.two.start(f"{look}:6380", work, **TOKEN_MODE),
    ]
    outputs = [output_of(process, 120) for process in asked]
    assert [process.returncode for process in asked] == [2, 2, 2, 2], outputs
    assert [output.count("\n") for output in outputs] == [1, 1, 1, 1], (
        f"one line, none of Ray's: {outputs}"
    )
    unset, other, missing, wrong = outputs
    assert unset.startswith(
        f"{SETTING}the Ray cluster there requires a token, but RAY_AUTH_MODE=token is not set here;"
    )
    assert other.startswith(
        f"{SETTING}the token of this node differs from the token of the Ray cluster there;"
    )
    assert missing.startswith(
        f"{SETTING}RAY_AUTH_MODE=token is set, but there is no token on this node;"
    )
    assert all(FIX in output for output in (unset, other, missing))
    refused = "no Ray cluster answers there (Connection refused); start one with `ray start --head`"
    assert wrong.startswith(f"{SETTING.replace(':6379', ':6380')}{refused}")


@pytest.mark.slow
def test_a_node_without_ray_and_a_port_of_another_program_are_named(
    nodes: TwoNodes, tmp_path: Path, work: Path
) -> None:
    nodes.one.run(commands_of("Start Ray on each node")[0], tmp_path)
    nodes.one.start("exec python -m http.server 8000", tmp_path)
    look = (
        f"rolepool plan recipes/demo_split.yaml --live ray_kwargs.ray_init.address={ADDRESSES[0]}"
    )
    outside = nodes.two.start(f"{look}:6379", work, **TOKEN_MODE)
    (problem,) = problems_of(nodes.two.start(f"{look}:8000", work, **TOKEN_MODE), timeout_s=60)
    assert (
        "no Ray cluster answers there (a program listens there, but did not answer like Ray within 30 s)"
        in problem
    )
    (problem,) = problems_of(outside)
    assert problem == (
        f"{SETTING}this node is not part of the Ray cluster there; "
        f"run `ray start --address={ADDRESSES[0]}:6379` here first"
    )


# Training


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_the_demo_trains_over_two_nodes_from_a_folder_with_relative_paths(
    nodes: TwoNodes, tmp_path: Path, work: Path, axis: str
) -> None:
    start_ray(nodes, tmp_path)
    run = work / "runs" / "demo_split"
    for num_steps in (2, 3):  # and once more, from the checkpoint
        overrides = (
            f"{AXES[axis]} trainer.total_training_steps={num_steps} trainer.resume_mode=auto"
        )
        training = start_training(nodes.one, work, f"{overrides} trainer.save_freq=2")
        output = output_of(training, 140)
        assert training.returncode == 0, output
        assert steps_of(run) == list(range(1, num_steps + 1))
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    where = {
        (span["role"], span["rank"]): span["node"]
        for span in spans
        if span["operation"] != "save_checkpoint"
    }
    one, two = ADDRESSES
    planned = {
        "node": {("actor", 0): one, ("critic", 0): two},
        "gpu": {("actor", 0): one, ("actor", 1): two, ("critic", 0): one, ("critic", 1): two},
    }
    assert {who: node for who, node in where.items() if who[0] in ("actor", "critic")} == planned[
        axis
    ]
    assert where["reward", 0] == one, "the rule runs beside the driver, where its file is"


@pytest.mark.slow
def test_a_model_or_a_run_folder_that_a_node_lacks_is_named_with_the_node_before_the_first_step(
    nodes: TwoNodes, tmp_path: Path, work: Path
) -> None:
    start_ray(nodes, tmp_path)
    nodes.one.run("rolepool demo ../alone/demo_data", work)
    nodes.two.hide(tmp_path / "alone")
    training = start_training(
        nodes.one, work, f"{ONE_SLOT_EACH} critic.model.path=../alone/demo_data/model"
    )
    (problem,) = problems_of(training)
    assert problem == (
        f"error: critic.model.path=../alone/demo_data/model: node {ADDRESSES[1]} has no "
        f"{work}/../alone/demo_data/model; copy the model there, or to a folder that all nodes share"
    )
    training = start_training(
        nodes.one, work, f"{ONE_SLOT_EACH} trainer.default_local_dir=../alone/run"
    )
    (problem,) = problems_of(training)
    assert problem.startswith(
        f"error: trainer.default_local_dir=../alone/run: node {ADDRESSES[1]} has no {work}/../al"
    )
    assert not (tmp_path / "alone" / "run").exists() and not (work / "runs" / "demo_split").exists()


# A node that is lost


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_a_run_that_loses_a_node_ends_soon_and_names_it(
    nodes: TwoNodes, tmp_path: Path, work: Path, axis: str
) -> None:
    start_ray(nodes, tmp_path)
    lose_while_training(nodes, work, AXES[axis], nodes.two.end, within_s=60)


@pytest.mark.slow
def test_a_node_that_loses_its_network_is_noticed_too(
    nodes: TwoNodes, tmp_path: Path, work: Path
) -> None:
    start_ray(nodes, tmp_path)
    unplug = partial(nodes.two.in_network, "ip", "link", "set", "eth0", "down")
    lose_while_training(nodes, work, AXES["node"], unplug, within_s=150)


def lose_while_training(
    nodes: TwoNodes, work: Path, overrides: str, lose: Callable[[], object], within_s: float
) -> None:
    """Train for two steps, lose the second node, and look at how the run ends."""
    run = work / "runs" / "demo_split"
    keys = "trainer.total_training_steps=1000 trainer.save_freq=1 placement.timeout_s=15"
    training = start_training(nodes.one, work, f"{overrides} {keys}")
    wait_until(lambda: len(steps_of(run)) >= 2 or training.poll() is not None, timeout_s=180)
    assert training.poll() is None, output_of(training, 1)
    lose()
    (problem,) = problems_of(training, within_s + 30)
    lost = f"node {ADDRESSES[1]} was lost, and no other node replaced it in placement.timeout_s=15"
    assert problem.startswith(f"error: {lost}"), problem
    assert (run / "checkpoints" / "step_000001" / "trainer.json").is_file()
