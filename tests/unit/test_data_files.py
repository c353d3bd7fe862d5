"""Files are checked before anything slow is imported, and all problems are reported together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rolepool.config import load_config
from rolepool.data.files import find_problems

ROW = {"prompt": "a b", "data_source": "exact_match", "reward_model": {"ground_truth": "b c"}}


def jsonl(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def problems(*overrides: str) -> list[str]:
    return find_problems(load_config(overrides=overrides).config)


def test_good_files_have_no_problems(tmp_path: Path) -> None:
    parquet = tmp_path / "val.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 3), parquet)
    (tmp_path / "mine.py").write_text(
        "from math import sqrt as root\nclass A:\n    def f(self): ...\nscore = root\n"
    )
    files = [
        f"data.train_files={jsonl(tmp_path / 'train.jsonl', ROW)}",
        f"data.val_files={parquet}",
    ]
    assert problems(*files) == []
    for name in ("root", "A", "score"):
        own = f"custom_reward_function.path={tmp_path / 'mine.py'}"
        assert problems(*files, own, f"custom_reward_function.name={name}") == []
        assert problems(*files, f"reward.functions=[math,{tmp_path / 'mine.py'}:{name}]") == []


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    nowhere, broken, empty = (
        tmp_path / "nowhere.jsonl",
        tmp_path / "broken.parquet",
        jsonl(tmp_path / "empty.jsonl"),
    )
    broken.write_text("a,b", encoding="utf-8")
    bad = jsonl(tmp_path / "bad.jsonl", {"question": "a", "answer": "b"}, "not looked at")
    (tmp_path / "mine.py").write_text("def f(): ...\ndef g(): ...\n")
    lines = problems(
        f"data.train_files=[{nowhere},{broken}]",
        f"data.val_files=[{bad},{empty},'hf:{tmp_path}/none:train']",
        f"custom_reward_function.path={tmp_path / 'mine.py'}",
    )
    starts = [
        f"data.train_files={nowhere}: is not a local file (looked in {tmp_path}); name",
        f"data.train_files={broken}: cannot be read (",
        f"{bad}, line 1: data.prompt_key=prompt: there is no such column (columns: question, answer)",
        f"data.val_files={empty}: has no rows; name a file with rows",
        f"data.val_files=hf:{tmp_path}/none:train: there is no such folder; name",
        f"custom_reward_function.path={tmp_path / 'mine.py'}: compute_score is not defined in {tmp_path / 'mine.py'}, "
        "which defines f, g",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        (
            {"prompt": "a", "answer": "7"},
            [],
            "there is no built-in reward for data_source 'x'; set reward.functions",
        ),
        (
            {"prompt": "a", "answer": "7"},
            ["reward.functions=math"],
            "there is no ground truth, and the rule math",
        ),
        ({"prompt": "a", "answer": "7"}, ["reward.functions=math", "data.answer_key=answer"], None),
        (
            {"prompt": "a"},
            ["reward.functions=math", "data.answer_key=answer"],
            "data.answer_key=answer: there is no",
        ),
        (
            {"prompt": 7},
            ["reward.functions=math"],
            "prompt=7: Input should be a valid list; a prompt is a string",
        ),
        (7, [], "is a JSON int; write one object per line"),
    ],
)
def test_the_first_row_is_checked_like_every_row_later(
    tmp_path: Path, row: Any, keys: list[str], expected: str | None
) -> None:
    file = jsonl(tmp_path / "x.jsonl", row)
    found = problems(f"data.train_files={file}", *keys)
    start = f"{file}, line 1: {expected}"
    assert [line[: len(start)] for line in found] == ([] if expected is None else [start])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "def compute_score(:",
            "cannot be imported (invalid syntax (mine.py, line 1)); give a Python file",
        ),
        ("", "compute_score is not defined in {file}, which defines no function"),
        (
            "def f():\n    def compute_score(): ...",
            "compute_score is not defined in {file}, which defines f",
        ),
        ("raise SystemExit\ndef compute_score(): ...", None),
        ("from somewhere import *", None),
        ("if True:\n    from somewhere import compute_score", None),
    ],
)
def test_a_reward_file_is_compiled_and_not_run(
    tmp_path: Path, text: str, expected: str | None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    train = jsonl(tmp_path / "train.jsonl", ROW)
    found = problems(f"data.train_files={train}", f"custom_reward_function.path={file}")
    key = f"custom_reward_function.path={file}"
    assert found == ([] if expected is None else [f"{key}: {expected.format(file=file)}"])


def test_no_training_files_is_a_problem() -> None:
    assert problems() == ["data.train_files=[]: there are no prompts; name files with rows"]


def test_a_reward_function_is_not_looked_for_if_a_model_scores(tmp_path: Path) -> None:
    keys = [
        "reward_model.enable=true",
        "reward_model.model.path=m",
        "custom_reward_function.path=nowhere.py",
    ]
    assert problems(f"data.train_files={jsonl(tmp_path / 'x.jsonl', {'prompt': 'a'})}", *keys) == []


def test_the_check_imports_nothing_heavy(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file = jsonl(tmp_path / "x.jsonl", ROW)
    code = f"""
import sys
from rolepool.config import load_config
from rolepool.data.files import find_problems
print(find_problems(load_config(overrides=["data.train_files=[{file},{file.parent}/no.parquet]"]).config))
print({{"torch", "ray", "transformers", "datasets", "math_verify"}} & set(sys.modules))
"""
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
    found, heavy = ended.stdout.splitlines()
    assert "no.parquet: is not a local file" in found
    assert heavy == "set()"


def test_a_missing_package_is_named_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolepool.data.files.find_spec", lambda name: None)
    line = "data.train_files=hf:a/b:train: needs the package datasets; run pip install 'rolepool[datasets]'"
    assert problems("data.train_files='hf:a/b:train'", "reward.functions=math") == [line]
