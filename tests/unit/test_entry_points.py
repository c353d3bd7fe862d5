"""The programs that launch scripts call are `rolepool train`: same words, same errors, same exit
codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolepool.data.demo import make_demo
from rolepool.trainer import main_ppo, main_ppo_split

Rolepool = Callable[..., Any]
Called = tuple[int, str, str]

SPLIT = "placement.strategy=split"
ONE_GPU = "trainer.n_gpus_per_node=1"


def called(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> Called:
    capsys.readouterr()
    code = main(arguments)
    return (code, *capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["trainer.nodes=2"],
        ["+trainer.nodes=2", "++critic.optim.lr=no"],
        ["recipes/demo.yaml", "actor_rollout_ref.rollout.name=sglang"],
        ["nowhere.yaml"],
        ["~trainer.nnodes"],
        ["actor_rollout_ref.model.path=no/such/folder"],
        [ONE_GPU, SPLIT],
    ],
    ids=" ".join,
)
def test_both_programs_fail_as_train_does(
    rolepool: Rolepool, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    expected = rolepool("train", *arguments)
    assert expected.code == 2 and expected.err
    assert called(main_ppo.main, arguments, capsys) == expected
    assert called(main_ppo_split.main, arguments, capsys) == rolepool(
        "train", *dict.fromkeys([*arguments, SPLIT])
    )


def test_main_ppo_split_splits_unless_the_user_says_otherwise(
    rolepool: Rolepool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Seen in what one GPU is too few for, and custom placement without pools."""
    split, custom = (
        rolepool("train", SPLIT, ONE_GPU),
        rolepool("train", "placement.strategy=custom"),
    )
    assert called(main_ppo_split.main, [ONE_GPU], capsys) == split != rolepool("train", ONE_GPU)
    assert called(main_ppo_split.main, ["placement.strategy=custom"], capsys) == custom
    file = tmp_path / "custom.yaml"
    file.write_text("placement: {strategy: custom}", encoding="utf-8")
    assert called(main_ppo_split.main, [str(file)], capsys) == custom


def test_keys_of_a_split_need_no_strategy_beside_them_in_main_ppo_split(
    rolepool: Rolepool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["placement.split.share=0.5"]
    assert "is for placement.strategy=split" in called(main_ppo.main, arguments, capsys)[2]
    assert called(main_ppo_split.main, arguments, capsys) == rolepool("train", SPLIT, *arguments)


@pytest.mark.usefixtures("rolepool")
def test_main_ppo_split_refuses_one_pool(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(main_ppo_split.main, ["placement.strategy=standard"], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: placement.strategy=standard: main_ppo_split trains in two pools; "
    )
    assert [line.split(":")[1] for line in err.splitlines()[1:]] == [
        " actor_rollout_ref.model.path=null",
        " data.train_files=[]",
    ]


@pytest.mark.parametrize("program", ["main_ppo", "main_ppo_split"])
def test_they_run_as_modules(
    python: Callable[..., subprocess.CompletedProcess[str]], program: str
) -> None:
    module = f"rolepool.trainer.{program}"
    explained, wrong = python("-m", module, "--help"), python("-m", module, "trainer.nodes=2")
    assert (explained.returncode, explained.stderr) == (0, "")
    assert explained.stdout.startswith(f"usage: python -m {module} ")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(
        "error: trainer.nodes=2: unknown key; did you mean trainer.nnodes?\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("program", "num_pools"), [("main_ppo", 1), ("main_ppo_split", 2)])
def test_they_train(
    python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    program: str,
    num_pools: int,
) -> None:
    demo, run = make_demo(tmp_path / "demo"), tmp_path / "run"
    files = [
        f"data.train_files={demo.train_file}",
        f"data.val_files={demo.val_file}",
        f"actor_rollout_ref.model.path={demo.model}",
        f"trainer.default_local_dir={run}",
    ]
    words = [
        "recipes/demo.yaml",
        *files,
        "++trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    ]
    ended = python("-m", f"rolepool.trainer.{program}", *words, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert f"run folder: {run}" in ended.stdout
    (planned,) = json.loads((run / "plan.json").read_text(encoding="utf-8"))["plans"]
    assert (planned["first_step"], len(planned["plan"]["pools"])) == (1, num_pools)
    operations = [call["operation"] for call in planned["schedule"]["calls"]]
    assert (operations[0], operations[-1]) == ("gen", "next_gen")
