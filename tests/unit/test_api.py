"""`import rolepool as rp`: what needs no process. The rest is in
tests/train/test_api_training.py."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_run

import rolepool as rp
from rolepool.errors import ConfigError, DataError, PlacementError
from rolepool.report.run import read_run

Rolepool = Callable[..., Any]
SPLIT = "placement.strategy=split"


def test_the_page_is_the_generated_one(root: Path) -> None:
    generated = runpy.run_path(str(root / "scripts" / "write_api_docs.py"))["markdown"]()
    page = (root / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == generated, "run `python scripts/write_api_docs.py`"


def test_every_public_name_is_listed_for_tab_completion_and_has_a_docstring() -> None:
    assert dir(rp) == sorted(rp.__all__)
    assert {"load_config", "Config", "plan", "train", "Run"} <= set(dir(rp))
    for name in set(dir(rp)) - {"__version__"}:
        assert inspect.getdoc(getattr(rp, name)), name
    first = ["model", "data", "reward", "placement"]
    assert list(inspect.signature(rp.train).parameters)[:4] == first


def test_planning_imports_nothing_heavy(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    program = "import sys, rolepool as rp; rp.load_config(); rp.plan('demo', placement='split'); print(*sys.modules)"
    ended = python("-c", program)
    assert ended.returncode == 0, ended.stderr
    assert {"torch", "ray", "transformers", "matplotlib"}.isdisjoint(ended.stdout.split())


# Keys


def test_keys_are_nested_dicts_or_dotted_names_and_the_last_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {seed: 3, nnodes: 2}\n", encoding="utf-8")
    optim = {"actor_rollout_ref": {"actor.optim": {"lr": 0.5}}}
    loaded = rp.load_config(
        ["demo", file, optim], trainer={"seed": 4}, **{"data.train_files": [Path("a.jsonl")]}
    )
    keys = loaded.config.trainer
    assert (keys.experiment_name, keys.seed, keys.nnodes) == ("demo", 4, 2)
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 0.5
    assert loaded.config.data.train_files == ("a.jsonl",)


def test_a_loaded_config_can_be_changed_and_what_follows_a_key_still_follows_it() -> None:
    loaded = rp.load_config("demo")
    changed = rp.load_config(loaded, **{"actor_rollout_ref.model.path": "mine"}).config
    assert (changed.critic.model.path, changed.trainer.experiment_name) == ("mine", "demo")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"trainer.nodes": 2}, ["trainer.nodes=2"]),
        ({"trainer": {"nodes": 2, "seed": "x"}}, ["trainer.nodes=2", "trainer.seed=x"]),
        ({"config": "nowhere.yaml"}, ["nowhere.yaml"]),
        (
            {"placement": "split", "trainer.n_gpus_per_node": 1},
            [SPLIT, "trainer.n_gpus_per_node=1"],
        ),
        ({"inventory": "lots"}, ["--inventory", "lots"]),
        ({"gpu_memory": "lots"}, ["--gpu-memory", "lots"]),
    ],
)
def test_errors_have_the_lines_of_the_command_line(
    rolepool: Rolepool, keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(rp.RolepoolError) as raised:
        rp.plan(**keys)
    assert (
        "".join(f"error: {line}\n" for line in raised.value.problems)
        == rolepool("plan", *words).err
    )


def test_a_value_that_no_config_can_hold_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer.seed=<object .*: cannot be stored .*; use texts, numbers"
    ):
        rp.load_config(**{"trainer.seed": object()})


# Plans


def test_a_plan_reads_as_the_command_prints_it(rolepool: Rolepool) -> None:
    words = (SPLIT, "trainer.n_gpus_per_node=4", "--gpu-memory", "80")
    keys = {"placement": "split", "trainer.n_gpus_per_node": 4, "gpu_memory": 80}
    assert f"{rp.plan(**keys)}\n" == repr(rp.plan(**keys)) + "\n" == rolepool("plan", *words).out
    assert json.loads(rp.plan(**keys).to_json()) == json.loads(
        rolepool("plan", "--json", *words).out
    )


def test_the_keys_of_a_placement_may_be_beside_its_name() -> None:
    share, gpus = {"placement.split.share": 0.5}, {"trainer.n_gpus_per_node": 2}
    both = "actor_rollout_ref_pool [2] with share 0.5 and critic_pool [2] with share 0.5"
    assert rp.plan(share, placement="split", **gpus).plan.in_words == both
    assert rp.plan(placement="split", **share, **gpus).plan.in_words == both
    pools = {"placement": {"pools": {"a": [1], "b": [1]}}}
    custom = {"strategy": "custom", "roles": {"actor_rollout": "a", "critic": "b"}}
    assert rp.plan(pools, placement=custom, **gpus).plan.in_words == "a [1] and b [1]"
    with pytest.raises(
        ConfigError, match=r"^placement\.split\.share=0\.5: is for placement\.strategy=split, but"
    ):
        rp.plan(share, **gpus)


def test_an_inventory_is_a_list_of_gpus_per_node() -> None:
    assert rp.plan(inventory=[8, 8]).plan.gpus_per_node == (8, 8)
    with pytest.raises(PlacementError, match="Not enough GPUs"):
        rp.plan(inventory=[4], **{"trainer.n_gpus_per_node": 8})


# Runs


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    return write_run(tmp_path / "run", "split")


def test_a_run_folder_is_opened_and_read(folder: Path) -> None:
    run = rp.Run(str(folder))
    assert repr(run) == f"Run({str(folder)!r})"
    assert run.config.placement.strategy == "split"
    assert run.plan.plan == read_run(folder).plan
    assert run.report() == folder / "report.html"
    assert "<html" in run.report(folder / "other.html").read_text(encoding="utf-8")


def test_metrics_are_a_table_of_pandas_or_a_list_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = rp.Run(folder), read_run(folder).metrics
    pandas = pytest.importorskip("pandas")
    table = run.metrics()
    assert isinstance(table, pandas.DataFrame) and table.index.name == "step"
    (column, *_) = expected[1]
    assert table[column].loc[1] == expected[1][column]
    assert list(table.index) == list(expected)
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    assert run.metrics() == [{"step": step, **row} for step, row in expected.items()]


def test_what_is_not_there_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="nowhere: is not a folder; give the folder a run wrote to"
    ):
        rp.Run(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"no checkpoint of actor; set trainer\.save_freq when training"
    ):
        rp.Run(folder).export(tmp_path / "model")
    (folder / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"has no readable plan\.json"):
        str(rp.Run(folder).plan)


# What `train` refuses before it starts a process


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return 1.0


def no_reward(text: str) -> float:
    return 1.0


LOCK = threading.Lock()


def locked(**inputs: Any) -> float:
    with LOCK:
        return 1.0


locked.__module__ = "__main__"  # as in a notebook, where functions are copied


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"data": ["a.jsonl", {}]},
            "train data: row 1 is of type str, not a dict; give files, a list of dicts or",
        ),
        (
            {"val_data": [{"a": object()}]},
            "val data: row 1 cannot be written as JSON (Object of type object is not",
        ),
        (
            {"reward": locked},
            "reward=locked: cannot be sent to the reward workers (cannot pickle '_thread.lock'",
        ),
        ({"reward": "nowhere.py"}, "nowhere.py: cannot be imported"),
        (
            {"reward": no_reward},
            "reward=no_reward: no_reward does not take data_source, solution_str, ground_truth, extra_info; ",
        ),
        (
            {"reward": reward, "reward_model.enable": True},
            "reward: it is not used, because reward_model.enable=true",
        ),
        ({"trainer.nodes": 2}, "trainer.nodes=2: unknown key; did you mean trainer.nnodes?"),
    ],
)
def test_what_train_cannot_use_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError)) as raised:
        rp.train(**{"config": "demo_reward_model", "reward_model.enable": False, **arguments})
    (line,) = raised.value.problems
    assert problem in line
    assert not (tmp_path / "runs" / "demo_reward_model").exists()


# Recipes


def test_recipes_are_listed_and_printed(rolepool: Rolepool, root: Path) -> None:
    listed = rolepool("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(
        file.stem for file in (root / "recipes").glob("*.yaml")
    )
    assert all(len(line.split()) > 5 for line in listed)
    text = (root / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    assert rolepool("recipes", "demo") == (0, text, "")
    assert (
        "recipe 'fly': there is no such recipe; use one of deepseek7b_split, demo"
        in rolepool("recipes", "fly").err
    )


def test_a_name_stands_for_a_recipe_unless_a_file_has_it(
    rolepool: Rolepool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rolepool("config", "recipes/demo_split.yaml").out
    monkeypatch.chdir(tmp_path)
    assert rolepool("config", "demo_split").out == expected
    assert rolepool("config", "demo_split", "trainer.seed").out.startswith("trainer.seed = ")
    (tmp_path / "demo_split").write_text("trainer: {seed: 77}\n", encoding="utf-8")
    assert "  seed: 77\n" in rolepool("config", "demo_split").out
