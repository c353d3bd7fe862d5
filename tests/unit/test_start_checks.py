"""`rolepool train` reports all problems that it can find before it imports torch, together."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rolepool as rp
from rolepool.config import load_config
from rolepool.config.model_files import why_no_model
from rolepool.errors import ConfigError
from rolepool.trainer.start_checks import check_start

Rolepool = Callable[..., Any]
KEY = "actor_rollout_ref.model.path"


def test_all_problems_are_reported_together_and_without_torch(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    words = [
        f"{KEY}=recipes/shapes/qwen2.5-05b",
        f"data.train_files={tmp_path / 'nowhere.jsonl'}",
        f"custom_reward_function.path={tmp_path / 'nowhere.py'}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
    ]
    code = "import sys; from rolepool.cli import main; code = main(sys.argv[1:])\n"
    code += "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules]); sys.exit(code)"
    ended = python("-c", code, "train", *words)
    assert (ended.returncode, ended.stdout) == (2, "[]\n"), ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0] == (
        f"error: {KEY}=recipes/shapes/qwen2.5-05b: there is no such folder; did you mean recipes/shapes/qwen2.5-0.5b?"
    )
    for key in (
        "data.train_files=",
        "custom_reward_function.path=",
        "actor_rollout_ref.rollout.tensor_",
        "trainer.nn",
    ):
        assert len([line for line in lines if line.startswith(f"error: {key}")]) == 1, (key, lines)
    assert len(lines) == 5


MISTAKES = {
    "trainer.seeed": 1,  # an unknown key
    "data.shuffle": "perhaps",  # a wrong value
    "actor_rollout_ref.rollout.temperature": 0,  # a combination that contradicts itself
    "actor_rollout_ref.model.path": "./models/lama",
    "actor_rollout_ref.model.lora_rank": 3,  # a value that can only be planned
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 3,  # a count
    "data.train_files": "nowhere.parquet",
    "data.val_files": "val.jsonl",
    "data.prompt_key": "question",  # columns that do not exist
    "data.answer_key": "anser",
    "custom_reward_function.path": "no.py",
}
RIGHT = {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}
BEGINNINGS = [
    "trainer.seeed=1: unknown key; did you mean trainer.seed?",
    "data.shuffle=perhaps: must be true or false",
    "actor_rollout_ref.rollout.temperature=0: must be greater than 0",
    f"{KEY}=./models/lama: there is no such folder",
    "actor_rollout_ref.model.lora_rank=3: not implemented yet",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=3: must divide the number of processes of global_pool",
    "data.train_files=nowhere.parquet: is not a local file",
    "val.jsonl, line 1: data.prompt_key=question: there is no such column (columns: prompt)",
    "val.jsonl, line 1: data.answer_key=anser: there is no such column (columns: prompt)",
    "custom_reward_function.path=/",
]


def are_all(problems: Sequence[str]) -> bool:
    return len(problems) == len(BEGINNINGS) and all(map(str.startswith, problems, BEGINNINGS))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a user, with a file of prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


def test_mistakes_of_all_kinds_are_reported_in_one_round(rolepool: Rolepool, folder: Path) -> None:
    trained = rolepool("train", *(f"{key}={value}" for key, value in {**MISTAKES, **RIGHT}.items()))
    assert (trained.code, trained.out) == (2, "")
    lines = [line.removeprefix("error: ") for line in trained.err.splitlines()]
    assert are_all(lines), lines
    with pytest.raises(ConfigError) as raised:
        rp.train(**MISTAKES, **RIGHT)
    assert raised.value.problems == tuple(lines)
    assert [path.name for path in folder.iterdir()] == ["val.jsonl"]


def test_a_plan_with_mistakes_also_says_why_training_would_not_start(
    rolepool: Rolepool, folder: Path
) -> None:
    words = [f"{key}={value}" for key, value in {**MISTAKES, **RIGHT}.items()]
    planned = rolepool("plan", *words)
    assert (planned.code, planned.out) == (2, "")
    lines = [line.removeprefix("error: ") for line in planned.err.splitlines()]
    later = "training does not start: "
    assert [line.startswith(later) for line in lines] == [False] * 4 + [True] * 6, lines
    mistakes = [line.removeprefix(later) for line in lines]
    assert are_all([*mistakes[:3], mistakes[5], mistakes[4], mistakes[3], *mistakes[6:]]), (
        "counts before models"
    )
    with pytest.raises(ConfigError) as raised:
        rp.plan(**MISTAKES, **RIGHT)
    assert raised.value.problems == tuple(lines)
    elsewhere = rolepool("plan", *words, "--inventory", "2").err
    assert "nowhere.parquet" not in elsewhere, "another machine may have the files"


def test_a_plan_warns_of_files_that_this_machine_does_not_have(
    rolepool: Rolepool, folder: Path
) -> None:
    words = ["data.train_files=nowhere.parquet", "trainer.device=cpu", "trainer.n_gpus_per_node=2"]
    here, elsewhere = rolepool("plan", *words), rolepool("plan", *words, "--inventory", "2")
    assert (here.code, elsewhere.code) == (0, 0)
    begins = (
        "warning: training does not start: data.train_files=nowhere.parquet: is not a local file"
    )
    assert [line.startswith(begins) for line in here.err.splitlines()] == [True]
    assert elsewhere.err == ""
    unplaced = rolepool("plan", *words[:2], "trainer.n_gpus_per_node=1", "placement.strategy=split")
    assert unplaced.code == 2
    assert [line.split(":")[1] for line in unplaced.err.splitlines()] == [
        " placement.strategy=split",
        " training does not start",
    ]


@pytest.mark.parametrize(
    ("path", "warns"),
    [
        ("./models/lama", True),
        ("~nobody-with-this-name/x", True),
        ("x" * 300, True),
        ("SHAPE", False),
        ("a/b", False),
    ],
)
def test_a_plan_warns_of_a_model_that_is_not_there(
    rolepool: Rolepool, root: Path, folder: Path, path: str, warns: bool
) -> None:
    path = path.replace("SHAPE", str(root / "recipes" / "shapes" / "qwen2.5-0.5b"))
    outcome = rolepool("plan", f"{KEY}={path}", "trainer.device=cpu", "trainer.n_gpus_per_node=1")
    assert outcome.code == 0, outcome.err
    begins = f"warning: training does not start: {KEY}="
    assert [line.startswith(begins) for line in outcome.err.splitlines()] == [True] * warns


def test_rows_of_a_python_program_are_checked_together_with_the_rest_and_nothing_stays(
    folder: Path,
) -> None:
    rows = [{"prompt": "a", "data_source": "exact_match"}]
    with pytest.raises(ConfigError) as raised:
        rp.train(
            data=rows,
            val_data=[3],
            config="demo",
            **{"trainer.seeed": 1, "data.answer_key": "answer"},
        )
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "trainer.seeed=1",
        "val data",
        "train data, line 1",
    ]
    with pytest.raises(
        ConfigError
    ) as raised:  # the rows can be checked even if there is no folder for them
        rp.train(
            data=rows,
            config="demo",
            **{"trainer.default_local_dir": [1], "data.answer_key": "answer"},
        )
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "trainer.default_local_dir=[1]",
        "train data, line 1",
    ]
    assert [path.name for path in folder.iterdir()] == ["val.jsonl"]


@pytest.mark.parametrize(
    ("gpus", "words", "problem"),
    [
        (
            0,
            "trainer.device=cuda",
            "error: trainer.device=cuda: this machine has no GPU; set trainer.device=cpu",
        ),
        (
            2,
            "trainer.n_gpus_per_node=4",
            "error: trainer.n_gpus_per_node=4: this machine has 2 GPUs; use at most 2",
        ),
        (
            1,
            "trainer.n_gpus_per_node=2",
            "error: trainer.n_gpus_per_node=2: this machine has 1 GPU; use at most 1",
        ),
        (2, "trainer.n_gpus_per_node=2", None),
        (0, "trainer.n_gpus_per_node=2", None),
        (2, "trainer.n_gpus_per_node=4 trainer.device=cpu", None),
        (2, "trainer.n_gpus_per_node=4 ray_kwargs.ray_init.address=10.0.0.1:6379", None),
    ],
)
def test_the_gpus_of_a_local_run_are_counted(
    rolepool: Rolepool, monkeypatch: pytest.MonkeyPatch, gpus: int, words: str, problem: str | None
) -> None:
    monkeypatch.setattr("rolepool.config.fitting.num_gpus", lambda: gpus)
    monkeypatch.setattr("rolepool.trainer.start_checks.num_gpus", lambda: gpus)
    outcome = rolepool("train", *words.split())  # without a model, so that nothing starts
    found = [line for line in outcome.err.splitlines() if line.startswith("error: trainer.")]
    assert outcome.code == 2
    assert [line.startswith(str(problem)) for line in found] == [True] * (problem is not None), (
        outcome.err
    )


def test_the_gpus_of_a_ray_that_the_program_has_started_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have other nodes, or count a GPU several times."""
    monkeypatch.setattr("rolepool.config.fitting.num_gpus", lambda: 1)
    monkeypatch.setattr("rolepool.trainer.start_checks.num_gpus", lambda: 1)
    words = "trainer.device=auto trainer.n_gpus_per_node=4 trainer.nnodes=2"
    loaded = load_config(["demo"], words.split())

    def problems() -> list[str]:
        try:
            check_start(loaded)
        except ConfigError as error:
            return [problem.partition("=")[0] for problem in error.problems]
        return []

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert problems() == ["trainer.nnodes", "trainer.n_gpus_per_node"]
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert problems() == []


# Model paths


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("models/lama", "there is no such folder; did you mean models/llama?"),
        ("./models/lama", "there is no such folder; did you mean models/llama?"),
        ("model/llama", None),
        ("./model/llama", "there is no such folder; did you mean models/llama?"),
        ("./modles/llama/1b", "there is no such folder; did you mean models/llama/1b?"),
        ("modles/llama/2b", "there is no such folder; did you mean models?"),
        ("models/llama/x/y", "there is no such folder; the folders in models/llama are 1b"),
        ("models/llama/1b/x", "there is no such folder; models/llama/1b contains no folder"),
        (
            "models/llama",
            "has no weights and no config.json; give a folder with a config.json and *.safetensors files",
        ),
        ("Qwen/Qwen2.5-0.5B", None),
        ("gpt2", None),
        (
            "~nobody-with-this-name/x",
            "cannot be read (Could not determine home directory.); give a folder or a hub id",
        ),
    ],
)
def test_a_mistyped_folder_is_answered_with_the_nearest_one_and_a_hub_id_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str | None
) -> None:
    (tmp_path / "models" / "llama" / "1b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty_cache"))
    assert why_no_model(KEY, path) == (None if reason is None else f"{KEY}={path}: {reason}")


def test_a_hub_id_in_the_cache_counts_even_if_a_folder_has_the_name_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert (
        why_no_model(KEY, "org/name")
        == f"{KEY}=org/name: there is no such folder; org contains no folder"
    )
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert why_no_model(KEY, "org/name") is None


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "environment.path=nowhere.py environment.name=A",
            "environment.path=nowhere.py: cannot be imported",
        ),
        (
            "environment.path=FILE environment.name=B",
            "environment.name=B: there is no such environment in ",
        ),
        (
            "environment.name=nowhere:A",
            "environment.name=nowhere:A: cannot be imported (ModuleNotFoundError",
        ),
        (
            "environment.path=FILE environment.name=A TURNS.format=nowhere:parse",
            "TURNS.format=nowhere:parse: cannot",
        ),
        (
            "environment.path=FILE environment.name=A ROLLOUT.tensor_model_parallel_size=2",
            "ROLLOUT.tensor_model_",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(
    rolepool: Rolepool, tmp_path: Path, command: str, words: str, problem: str
) -> None:
    file = tmp_path / f"{tmp_path.name}.py"  # a module of its own in each test
    file.write_text("class A:\n    def reset(self): ...\n\nB = 3\n")
    names = {"FILE": str(file), "TURNS": "ROLLOUT.multi_turn"}
    for name, text in {**names, "ROLLOUT": "actor_rollout_ref.rollout"}.items():
        words, problem = words.replace(name, text), problem.replace(name, text)
    given = [
        f"{KEY}=recipes/shapes/qwen2.5-0.5b",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        *words.split(),
    ]
    outcome = rolepool(command, *given)
    assert outcome.code == 2
    found = [line for line in outcome.err.splitlines() if line.startswith(f"error: {problem}")]
    assert len(found) == 1, outcome.err
