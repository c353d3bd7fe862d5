"""The command line: exit codes, what is printed where, and the table that people see first."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolepool import __version__
from rolepool.config.schema import all_keys

SNAPSHOT = Path(__file__).parent / "snapshots" / "plan_deepseek7b_split.txt"
DEEPSEEK_PLAN = (
    "plan",
    "recipes/deepseek7b_split.yaml",
    "actor_rollout_ref.model.path=recipes/shapes/deepseek-llm-7b-chat",
    "--gpu-memory",
    "80",
)
RECIPES = sorted(
    path.name for path in (Path(__file__).parent.parent.parent / "recipes").glob("*.yaml")
)

Rolepool = Callable[..., Any]


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# Exit codes and help


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command(rolepool: Rolepool, arguments: tuple[str, ...]) -> None:
    outcome = rolepool(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("usage: rolepool COMMAND")
    for command in ("plan", "config", "train"):
        assert f"  rolepool {command} " in outcome.out


@pytest.mark.parametrize("command", ["plan", "config", "train"])
def test_every_command_explains_itself(rolepool: Rolepool, command: str) -> None:
    outcome = rolepool(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: rolepool {command} ")


def test_the_version_is_printed(rolepool: Rolepool) -> None:
    assert rolepool("--version") == (0, f"rolepool {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("fly",), "'fly': no such command; use one of plan, config, signal, train"),
        (
            ("plan", "--fast"),
            "rolepool plan: unrecognized arguments: --fast; see `rolepool plan --help`",
        ),
        (("plan", "--inventory"), "rolepool plan: argument --inventory: expected one argument"),
        (("plan", "--gpu", "80"), "rolepool plan: unrecognized arguments: --gpu"),
        (("plan", "trainer.nodes=2"), "trainer.nodes=2: unknown key; did you mean trainer.nnodes?"),
        (("plan", "nowhere.yaml"), "config file nowhere.yaml: cannot be read"),
        (("plan", "recipes"), "config file recipes: cannot be read"),
        (
            ("plan", "nnodes"),
            "No such file or directory); give a YAML file, or key=value for an override",
        ),
        (("plan", "--inventory", "lots"), "--inventory 'lots': write GPUs per node, such as 8,8,4"),
        (
            ("plan", "--gpu-memory", "lots"),
            "--gpu-memory 'lots': write the memory of one GPU, such as 80 (GiB)",
        ),
        (
            ("plan", "trainer.nnodes=2", "--inventory", "8"),
            "Not enough GPUs: global_pool needs 8 on node 1",
        ),
        (("config", "trainer.nodes"), "trainer.nodes: unknown key; did you mean trainer.nnodes?"),
        (("config", "x" * 300), "unknown key; `rolepool config` lists all keys"),
    ],
)
def test_what_the_user_must_change_is_one_line_on_stderr_and_exit_2(
    rolepool: Rolepool, arguments: tuple[str, ...], expected: str
) -> None:
    outcome = rolepool(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


def test_every_problem_has_a_line_of_its_own(rolepool: Rolepool) -> None:
    outcome = rolepool("plan", "trainer.nodes=2", "trainer.seed=x", "missing.yaml")
    assert outcome.code == 2
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["error"] * 3


def test_a_file_that_is_no_yaml_is_one_line(rolepool: Rolepool, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\n  b: {\n", encoding="utf-8")
    outcome = rolepool("plan", str(tmp_path / "bad.yaml"))
    assert outcome.code == 2
    assert re.fullmatch(r"error: config file .*bad\.yaml, line 2, column 4: .+\n", outcome.err)


def test_files_and_overrides_may_come_in_any_order(rolepool: Rolepool) -> None:
    one = rolepool("config", "trainer.seed=5", "recipes/demo.yaml", "recipes/demo_split.yaml")
    other = rolepool("config", "recipes/demo.yaml", "recipes/demo_split.yaml", "trainer.seed=5")
    assert one == other
    assert "experiment_name: demo_split" in one.out


def test_a_plan_with_counts_that_do_not_divide_is_shown_and_refused(rolepool: Rolepool) -> None:
    outcome = rolepool("plan", "trainer.n_gpus_per_node=3")
    assert outcome.code == 2
    assert "1 pool on 3 of 3 GPUs" in outcome.out
    assert (
        "error: data.train_batch_size=1024: 1024 sequences cannot be split into 3 equal parts"
        in outcome.err
    )


# As a program


def test_python_dash_m_is_the_same_program(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    fine, wrong = (
        python("-m", "rolepool", "--version"),
        python("-m", "rolepool", "plan", "trainer.nodes=2"),
    )
    assert (fine.returncode, fine.stdout) == (0, f"rolepool {__version__}\n")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: trainer.nodes=2: unknown key; did you mean trainer.nnodes?\n"


@pytest.mark.parametrize(
    "arguments", [("--help",), ("config",), ("plan",), ("plan", "--json"), ("config", "trainer")]
)
def test_a_reader_that_leaves_early_is_no_error(
    python: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = python(
            "-m",
            "rolepool",
            *arguments,
            capture_output=False,
            stdout=writer,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


# The table


def test_the_printed_plan_is_the_one_on_record(rolepool: Rolepool) -> None:
    """After a change on purpose: run it with UPDATE_SNAPSHOTS=1, and paste the snapshot into
    docs/placement.md."""
    outcome = rolepool(*DEEPSEEK_PLAN)
    assert (outcome.code, outcome.err) == (0, "")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(stripped(outcome.out), encoding="utf-8")
    assert stripped(outcome.out) == stripped(SNAPSHOT.read_text(encoding="utf-8"))


def test_the_page_about_placement_shows_the_same_plan(root: Path) -> None:
    page = (root / "docs" / "placement.md").read_text(encoding="utf-8")
    recorded = stripped(SNAPSHOT.read_text(encoding="utf-8")).rstrip()
    assert recorded in stripped(page), "paste the snapshot into docs/placement.md"


def test_many_nodes_that_look_alike_are_one_row(rolepool: Rolepool) -> None:
    batches = ("data.train_batch_size=8192", "actor_rollout_ref.actor.ppo_mini_batch_size=8192")
    out = rolepool("plan", "trainer.nnodes=1024", "trainer.n_gpus_per_node=8", *batches).out
    assert re.search(r"^0-1023( +A){8} *$", out, flags=re.MULTILINE)


def test_gpus_in_no_pool_and_gpus_in_two_pools_are_shown_so(rolepool: Rolepool) -> None:
    half = (
        "placement.strategy=custom",
        "placement.roles.actor_rollout=a",
        "placement.roles.critic=b",
    )
    pools = [f"placement.pools.{name}={{per_node: [1], share: 0.5}}" for name in "ab"]
    out = rolepool("plan", *half, *pools, "--inventory", "2").out
    assert re.search(r"^0 +A0 B0 +\. *$", out, flags=re.MULTILINE)
    assert "1 x 0.5 GPU" in out
    assert out.startswith("2 pools on 1 of 2 GPUs")


def test_without_a_gpu_the_plan_shows_cpu_slots_unless_it_is_for_another_machine(
    rolepool: Rolepool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rolepool.placement.hardware.detect_gpu_memory", lambda: None)
    assert "CPU slots" in rolepool("plan").out
    for elsewhere in (("--gpu-memory", "80"), ("--inventory", "8"), ("trainer.n_gpus_per_node=8",)):
        assert "CPU slots" not in rolepool("plan", *elsewhere).out


def test_a_plan_says_where_mps_is_started(rolepool: Rolepool) -> None:
    pools = (
        "placement.pools.a={per_node: [1], share: 0.5}",
        "placement.pools.b={per_node: [1], share: 0.5}",
    )
    roles = (
        "placement.roles.actor_rollout=a",
        "placement.roles.critic=b",
        "placement.strategy=custom",
    )
    shared = rolepool("plan", *pools, *roles, "placement.mps=true", "trainer.n_gpus_per_node=2")
    assert "CUDA MPS: started on the nodes of a, b, and stopped with the run\n" in shared.out
    assert "MPS" not in rolepool("plan", *pools, *roles).out


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (
            "gspo",
            "policy loss: gspo, aggregated by actor.loss_agg_mode=token-mean (its authors use seq-mean-token-mean)",
        ),
        (
            "geo_mean",
            "policy loss: geo_mean, always the mean over sequences (actor.loss_agg_mode=token-mean is not used)",
        ),
        ("cispo", "policy loss: cispo, aggregated by actor.loss_agg_mode=token-mean"),
    ],
)
def test_a_plan_says_how_another_policy_loss_is_aggregated(
    rolepool: Rolepool, loss: str, line: str
) -> None:
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    out = rolepool("plan", key).out
    assert line in " ".join(out.split())
    title, _, words = line.partition(": ")
    assert json.loads(rolepool("plan", "--json", key).out)["settings"][title] == words


def test_a_cpu_plan_speaks_of_slots(rolepool: Rolepool) -> None:
    out = rolepool("plan", "recipes/demo_split.yaml").out
    assert out.startswith("2 pools on 2 of 2 CPU slots")
    assert "slot 0" in out
    assert "GPU 0" not in out


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_plans_without_problems(
    rolepool: Rolepool, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr("rolepool.placement.checks.num_cores", lambda: 8)
    outcome = rolepool("plan", f"recipes/{recipe}", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["problems"] == []


@pytest.mark.parametrize(
    ("recipe", "shape", "gpu_memory"),
    [
        ("deepseek7b_split.yaml", "deepseek-llm-7b-chat", "80"),
        ("qwen0.5b_h200.yaml", "qwen2.5-0.5b", "141GB"),
    ],
)
def test_a_recipe_fits_the_gpu_it_was_written_for(
    rolepool: Rolepool, recipe: str, shape: str, gpu_memory: str
) -> None:
    model = f"actor_rollout_ref.model.path=recipes/shapes/{shape}"
    assert (
        rolepool("plan", f"recipes/{recipe}", model, "--gpu-memory", gpu_memory, "--strict").code
        == 0
    )


# The plan as JSON


def test_json_holds_slots_roles_overlaps_and_memory(rolepool: Rolepool) -> None:
    outcome = rolepool(*DEEPSEEK_PLAN, "--json")
    document = json.loads(outcome.out)
    assert document["pools"]["actor_rollout_ref_pool"]["slots"] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert document["pools"]["critic_pool"]["slots"] == [[0, 4], [0, 5], [0, 6], [0, 7]]
    assert document["roles"] == {
        "actor": "actor_rollout_ref_pool",
        "rollout": "actor_rollout_ref_pool",
        "ref": "actor_rollout_ref_pool",
        "critic": "critic_pool",
    }
    assert ["update_critic", "next_gen"] in document["overlaps"]
    memory = document["memory"]["pools"]["critic_pool"]
    assert memory["limit_bytes"] == 80 * 2**30
    assert memory["fits"] is True
    assert (
        memory["peak_bytes"]
        == memory["overhead_bytes"] + memory["roles"]["critic"]["working_bytes"]
    )
    assert document["memory"]["unknown"] == {}
    assert (document["problems"], document["advice"]) == ([], [])


def test_json_holds_the_problems_too(rolepool: Rolepool) -> None:
    outcome = rolepool("plan", "trainer.n_gpus_per_node=3", "--json")
    assert outcome.code == 2
    problems = json.loads(outcome.out)["problems"]
    assert [f"error: {problem}" for problem in problems] == outcome.err.splitlines()


def test_json_says_what_is_unknown(rolepool: Rolepool) -> None:
    memory = json.loads(rolepool("plan", "--json").out)["memory"]
    assert memory["pools"] == {}
    assert memory["unknown"] == dict.fromkeys(
        ("actor", "rollout", "critic"), "no model path is set"
    )


# Inventory and memory


def test_an_inventory_is_divided_whole(rolepool: Rolepool) -> None:
    batches = ("data.train_batch_size=1000", "actor_rollout_ref.actor.ppo_mini_batch_size=1000")
    document = json.loads(
        rolepool("plan", "--inventory", "8,8,4", "placement.strategy=split", "--json", *batches).out
    )
    assert document["gpus_per_node"] == [8, 8, 4]
    assert len(document["pools"]["critic_pool"]["slots"]) == 10


def test_an_inventory_with_counts_of_the_users_own_is_taken_from(rolepool: Rolepool) -> None:
    document = json.loads(
        rolepool("plan", "--inventory", "4,8,8", "trainer.nnodes=1", "--json").out
    )
    assert document["pools"]["global_pool"]["slots"] == [[1, gpu] for gpu in range(8)]


def test_the_memory_of_a_gpu_decides_the_verdict(rolepool: Rolepool) -> None:
    *plan, _ = DEEPSEEK_PLAN
    assert "69.1 of 80.0 GiB, fits" in rolepool(*plan, "80GiB").out
    assert "of 30.0 GiB, does not fit" in rolepool(*plan, "30").out


# Config


def test_config_prints_every_key_with_its_value_in_force(rolepool: Rolepool) -> None:
    import yaml

    outcome = rolepool("config", "recipes/deepseek7b_split.yaml", "+trainer.nnodes=2")
    tree = yaml.safe_load(outcome.out)
    assert outcome.code == 0
    assert (tree["trainer"]["nnodes"], tree["critic"]["ppo_mini_batch_size"]) == (2, 256)
    for path in all_keys():
        node = tree
        for part in path.split("."):
            assert part in node, path
            node = node[part]


def test_config_of_a_key_explains_it(rolepool: Rolepool) -> None:
    outcome = rolepool("config", "trainer.nnodes", "trainer.nnodes=3")
    assert outcome.code == 0
    assert outcome.out.splitlines()[:4] == [
        "trainer.nnodes = 3",
        "  Number of nodes.",
        "  type: an integer, at least 1, at most 65536",
        "  default: 1",
    ]


def test_every_key_can_be_explained(rolepool: Rolepool) -> None:
    outcome = rolepool("config", *all_keys())
    assert outcome.code == 0
    explained = re.split(r"^(?=[a-z][\w.]+ = )", outcome.out, flags=re.MULTILINE)[1:]
    assert len(explained) == len(all_keys())
    for (key, known), text in zip(all_keys().items(), explained, strict=True):
        assert text.startswith(f"{key} = ")
        assert known.doc in text
        assert ("not implemented yet" in text) == (key == "actor_rollout_ref.model.lora_rank")


def test_config_of_a_section_explains_its_keys(rolepool: Rolepool) -> None:
    outcome = rolepool("config", "placement.split", "data.seed")
    assert outcome.code == 0
    shown = re.findall(r"^([a-z][\w.]+) = ", outcome.out, flags=re.MULTILINE)
    assert shown == [
        *(
            f"placement.split.{name}"
            for name in ("axis", "actor_gpus_per_node", "actor_nodes", "share")
        ),
        "data.seed",
    ]


# Train


def test_train_refuses_values_that_are_not_built(rolepool: Rolepool) -> None:
    outcome = rolepool(
        "train", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=sglang"
    )
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        "error: actor_rollout_ref.model.path=null: no model is set; give a folder or a hub id",
        "error: actor_rollout_ref.model.lora_rank=8: not implemented yet, only 0 works; remove it",
        "error: actor_rollout_ref.rollout.name=sglang: not implemented yet; set "
        "actor_rollout_ref.rollout.fallback=native to generate with rolepool's own engine",
        "error: data.train_files=[]: there are no prompts; name files with rows",
    ]


def test_train_takes_a_value_in_force_of_a_key_that_is_not_built(rolepool: Rolepool) -> None:
    outcome = rolepool(
        "train", "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.rollout.name=native"
    )
    assert outcome.code == 2, "there is no model"
    assert "not implemented yet" not in outcome.err


def test_train_without_a_model_or_with_one_that_is_not_there_says_so(rolepool: Rolepool) -> None:
    without = rolepool("train")
    assert without.code == 2
    assert without.err.startswith("error: actor_rollout_ref.model.path=null: no model is set; ")
    wrong = rolepool("train", "actor_rollout_ref.model.path=no/such/folder")
    assert wrong.code == 2
    assert "error: actor_rollout_ref.model.path=no/such/folder: " in wrong.err


def test_train_reports_a_wrong_config_as_plan_does_and_what_else_it_needs(
    rolepool: Rolepool,
) -> None:
    planned, trained = rolepool("plan", "trainer.nodes=2"), rolepool("train", "trainer.nodes=2")
    assert (planned.code, planned.err) == (
        2,
        "error: trainer.nodes=2: unknown key; did you mean trainer.nnodes?\n",
    )
    assert trained.code == 2
    assert trained.err.startswith(planned.err)
    assert [line.split(":")[1] for line in trained.err.splitlines()[1:]] == [
        " actor_rollout_ref.model.path=null",
        " data.train_files=[]",
    ]
