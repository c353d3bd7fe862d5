"""`rolepool train` reports all problems that it can find before it imports torch, together."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolepool.config.model_files import why_no_model

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
    for key in ("data.train_files=", "custom_reward_function.path=", "actor_rollout_ref.rollout.tensor_", "trainer.nn"):
        assert len([line for line in lines if line.startswith(f"error: {key}")]) == 1, (key, lines)
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("gpus", "words", "problem"),
    [
        (0, "trainer.device=cuda", "error: trainer.device=cuda: this machine has no GPU; set trainer.device=cpu"),
        (2, "trainer.n_gpus_per_node=4", "error: trainer.n_gpus_per_node=4: this machine has 2 GPUs; use at most 2"),
        (1, "trainer.n_gpus_per_node=2", "error: trainer.n_gpus_per_node=2: this machine has 1 GPU; use at most 1"),
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
    assert [line.startswith(str(problem)) for line in found] == [True] * (problem is not None), outcome.err


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
        ("models/llama", "has no weights and no config.json; give a folder with a config.json and *.safetensors files"),
        ("Qwen/Qwen2.5-0.5B", None),
        ("gpt2", None),
        ("~nobody-with-this-name/x", "cannot be read (Could not determine home directory.); give a folder or a hub id"),
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
    assert why_no_model(KEY, "org/name") == f"{KEY}=org/name: there is no such folder; org contains no folder"
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert why_no_model(KEY, "org/name") is None


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("environment.path=nowhere.py environment.name=A", "environment.path=nowhere.py: cannot be imported"),
        ("environment.path=FILE environment.name=B", "environment.name=B: there is no such environment in "),
        ("environment.name=nowhere:A", "environment.name=nowhere:A: cannot be imported (ModuleNotFoundError"),
        ("environment.path=FILE environment.name=A TURNS.format=nowhere:parse", "TURNS.format=nowhere:parse: cannot"),
        ("environment.path=FILE environment.name=A ROLLOUT.tensor_model_parallel_size=2", "ROLLOUT.tensor_model_"),
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
    given = [f"{KEY}=recipes/shapes/qwen2.5-0.5b", "actor_rollout_ref.rollout.multi_turn.enable=true", *words.split()]
    outcome = rolepool(command, *given)
    assert outcome.code == 2
    found = [line for line in outcome.err.splitlines() if line.startswith(f"error: {problem}")]
    assert len(found) == 1, outcome.err
