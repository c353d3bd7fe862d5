"""A row without what the reward needs is a problem before anything starts, with the key to set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolepool.config import load_config
from rolepool.data.files import find_problems
from rolepool.data.prompts import PromptSet, load_tokenizer
from rolepool.data.reward_needs import likely_answer
from rolepool.errors import DataError


def data_keys(folder: Path, rows: list[dict[str, Any]], *more: str) -> list[str]:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [f"data.train_files={file}", "data.prompt_key=question", *more]


def first_problem(folder: Path, row: dict[str, Any], *more: str) -> str:
    """The only problem of the file's first row, without the place."""
    (line,) = find_problems(load_config(overrides=data_keys(folder, [row], *more)).config)
    place = f"{folder / 'train.jsonl'}, line 1: "
    assert line.startswith(place)
    return line.removeprefix(place)


def own(folder: Path, text: str, name: str = "compute_score") -> list[str]:
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return [
        f"custom_reward_function.path={folder / 'mine.py'}",
        f"custom_reward_function.name={name}",
    ]


USES_TRUTH = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return ground_truth\n"


def test_a_rule_needs_a_ground_truth_and_the_likely_column_is_named(tmp_path: Path) -> None:
    assert first_problem(tmp_path, {"question": "a", "answer": "b"}, "reward.functions=math") == (
        "there is no ground truth, and the rule math compares it with the response; set data.answer_key=answer "
        "(columns: question, answer)"
    )
    assert "; set data.answer_key to the column with the answers (" in first_problem(
        tmp_path, {"question": "a", "other": "b"}, "reward.functions=math"
    )


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("question", "answer"), "answer"),
        (("id", "Answer", "solution"), "Answer"),
        (("solution", "final-answer"), "final-answer"),
        (("target",), "target"),
        (("my_answer_text",), "my_answer_text"),
        (("question", "level"), None),
        (("prompt",), None),
    ],
)
def test_the_column_that_looks_like_the_answer(
    columns: tuple[str, ...], expected: str | None
) -> None:
    assert likely_answer(dict.fromkeys(columns, "x"), "question") == expected


def test_a_function_that_uses_the_ground_truth_needs_one(tmp_path: Path) -> None:
    keys = own(tmp_path, USES_TRUTH)
    assert first_problem(tmp_path, {"question": "a", "answer": "b"}, *keys) == (
        "there is no ground truth, and compute_score needs it; set data.answer_key=answer, or write ground_truth=None "
        "in the parameters of compute_score if it can do without (columns: question, answer)"
    )
    assert (
        find_problems(
            load_config(
                overrides=data_keys(
                    tmp_path, [{"question": "a", "answer": "b"}], *keys, "data.answer_key=answer"
                )
            ).config
        )
        == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n",
        USES_TRUTH.replace("ground_truth,", "ground_truth=None,"),
        "def compute_score(solution_str, **kwargs):\n    return kwargs['ground_truth'] is None\n",
        "def compute_score(prompts, completions, **kwargs):\n    return [1] * len(prompts)\n",
        "compute_score = lambda ground_truth, **_: ground_truth\n",
        "def compute_score(ground_truth, **_):\n    return 0 if ground_truth is None else len(ground_truth)\n",
        "def compute_score(ground_truth, **_):\n    if not ground_truth:\n        return 0\n    return 1\n",
        "def compute_score(ground_truth, **_):\n    return len(ground_truth or 'x')\n",
    ],
)
def test_a_function_that_can_do_without_needs_none(tmp_path: Path, text: str) -> None:
    keys = data_keys(tmp_path, [{"question": "a"}], *own(tmp_path, text))
    assert find_problems(load_config(overrides=keys).config) == []


def test_a_function_for_batches_needs_the_columns_that_it_names(tmp_path: Path) -> None:
    text = (
        "async def f(completions, answer, level, scale, hint=None, **kwargs):\n    return answer\n"
    )
    keys = [*own(tmp_path, text, "f"), "custom_reward_function.reward_kwargs={scale: 1}"]
    assert first_problem(tmp_path, {"question": "a", "answer": "b"}, *keys) == (
        "there is no column level, and f has a parameter with this name; name the column like that, or give the "
        "parameter a default (columns: question, answer)"
    )
    with_key = first_problem(
        tmp_path, {"question": "a", "answer": None, "level": 1}, *keys, "data.answer_key=answer"
    )
    assert with_key.startswith(
        "answer is null, and f needs it; write an answer, or remove such rows, or write"
    )


def test_null_in_some_rows_is_one_line_with_the_first_row_and_their_number(
    tmp_path: Path, model: Path
) -> None:
    rows = [
        {"question": "a b", "answer": None if number in (2, 3, 5) else "a"}
        for number in range(1, 8)
    ]
    more = [
        "data.answer_key=answer",
        f"actor_rollout_ref.model.path={model}",
        *own(tmp_path, USES_TRUTH),
    ]
    config = load_config(overrides=data_keys(tmp_path, rows, *more)).config
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    with pytest.raises(DataError) as caught:
        PromptSet("train", config, tokenizer)
    (line,) = caught.value.problems
    assert line.startswith(
        f"{tmp_path / 'train.jsonl'}, line 2: answer is null, and compute_score needs it; "
    )
    assert line.endswith("(3 of 7 rows have this problem)")


def uses_truth(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    return float(solution_str == ground_truth)


def test_a_function_of_a_python_program_is_looked_at_too(tmp_path: Path, model: Path) -> None:
    keys = [
        "custom_reward_function.path=(a Python function)",
        f"actor_rollout_ref.model.path={model}",
    ]
    config = load_config(
        overrides=data_keys(tmp_path, [{"question": "a", "label": "b"}], *keys)
    ).config
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    with pytest.raises(
        DataError,
        match=r"uses_truth needs it; set data.answer_key=label, or write ground_truth=None",
    ):
        PromptSet("train", config, tokenizer, uses_truth)
    assert len(PromptSet("train", config, tokenizer, len)) == 1


def test_a_model_or_an_environment_that_scores_needs_no_ground_truth(tmp_path: Path) -> None:
    keys = data_keys(
        tmp_path, [{"question": "a"}], "reward_model.enable=true", "reward_model.model.path=m"
    )
    assert find_problems(load_config(overrides=keys).config) == []


def test_the_format_needs_no_ground_truth(tmp_path: Path) -> None:
    keys = data_keys(tmp_path, [{"question": "a"}], "reward.functions=format")
    assert find_problems(load_config(overrides=keys).config) == []
    assert "the rule boxed compares it with" in first_problem(
        tmp_path, {"question": "a"}, "reward.functions=[format,boxed]"
    )
