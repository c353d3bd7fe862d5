"""Rules score as users of verl expect, and errors in the user's own function say where."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config.run_keys import CustomRewardFunctionConfig
from rolepool.data.rewards import (
    RewardError,
    RewardFunction,
    exact_match,
    extract_final_answer,
    gsm8k,
    load_reward_function,
    position_match,
    rule_for,
    score_batch,
)
from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto

# Built-in rules


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Paris, France", "Paris", 0),
        ("42", 42, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("", "Paris", 0),
    ],
)
def test_exact_match_compares_all_but_the_white_space_around(response: str, truth: Any, score: float) -> None:
    assert exact_match(response, truth) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("b c d e", 1),
        ("b c d a", 0.75),
        ("c b d e", 0.5),
        ("b c", 0.5),
        ("", 0),
        ("b c d e f g h a", 0.5),
        ("x b c d", 0),
    ],
)
def test_position_match_is_the_fraction_of_words_in_their_place(response: str, score: float) -> None:
    assert position_match(response, "b c d e") == score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,000.50", "1000.50"),
        ("#### -12", "-12"),
        ("#### -$12", "-12"),
        ("####7", "7"),
        ("#### 7.", "7"),
        ("#### 7\nno, wait\n#### 8", "8"),
        ("#### 7 apples, 3 left", "7"),
        ("the answer is 7.", None),
        ("it costs $3.50 in all", None),
        ("the answer is seven", None),
        ("#### seven", None),
        ("", None),
        ("#### ,", None),
        ("#### .5", ".5"),
        ("#### 5 " + "x" * 400, None),
    ],
)
def test_the_final_answer_is_the_last_number_after_the_marks(response: str, answer: str | None) -> None:
    assert extract_final_answer(response) == (None if answer is None else Decimal(answer))


def test_gsm8k_compares_numbers() -> None:
    assert gsm8k("#### 72", "72") == 1
    assert gsm8k("#### $1,072.00", "1072") == 1
    assert gsm8k("#### 72", "1,072") == 0
    assert gsm8k("#### 72", 72) == 1
    assert gsm8k("72", "72") == 0


def test_the_data_source_chooses_the_rule() -> None:
    assert rule_for("openai/gsm8k") is gsm8k
    assert rule_for("exact_match/capitals") is exact_match


def test_an_unknown_data_source_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(DataError) as caught:
        rule_for("lighteval/MATH")
    said = str(caught.value)
    assert "data_source 'lighteval/MATH'" in said
    assert "openai/gsm8k" in said
    assert "custom_reward_function.path" in said


# Batches


def batch(**changes: Any) -> DataProto:
    columns = {
        "data_source": ["openai/gsm8k", "exact_match"],
        "reward_model": [{"ground_truth": "7"}, {"ground_truth": "b"}],
        "extra_info": [{}, {"level": 3}],
        "origin": ["train.jsonl, line 1", "train.jsonl, line 9"],
        "uid": ["epoch0-row0", "epoch0-row8"],
        **changes,
    }
    return DataProto.from_dict(non_tensors=columns)


def custom(folder: Path, text: str, name: str = "compute_score") -> RewardFunction:
    file = folder / "my_reward.py"
    file.write_text(text, encoding="utf-8")
    return load_reward_function(CustomRewardFunctionConfig(path=str(file), name=name))


def test_rows_of_one_batch_may_have_different_rules() -> None:
    scored = score_batch(load_reward_function(CustomRewardFunctionConfig()), batch(), ["#### 7", "c"])
    assert [one.score for one in scored] == [1, 0]


def test_a_built_in_rule_that_cannot_score_a_row_names_it() -> None:
    function = load_reward_function(CustomRewardFunctionConfig())
    with pytest.raises(RewardError) as caught:
        score_batch(function, batch(reward_model=[{"ground_truth": "seven"}, {}]), ["#### 7", "c"])
    assert str(caught.value) == (
        "built-in reward: reward_model.ground_truth is 'seven'; the rule gsm8k needs a number, "
        "for train.jsonl, line 1 (uid epoch0-row0)"
    )


# The user's function


def test_the_users_function_is_given_the_row(tmp_path: Path) -> None:
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "length": len(solution_str), "is_seven": ground_truth == "7",
            "level": extra_info.get("level", 0), "pred": solution_str, "source_length": len(data_source)}
"""
    first, second = score_batch(custom(tmp_path, text), batch(), ["abc", ""])
    assert first.score == 0.5
    assert first.numbers == {"length": 3, "is_seven": 1, "level": 0, "source_length": 12}
    assert second.numbers == {"length": 0, "is_seven": 0, "level": 3, "source_length": 11}


def test_the_function_may_have_another_name_and_take_keywords(tmp_path: Path) -> None:
    function = custom(tmp_path, "def mine(solution_str, **rest):\n    return len(rest)\n", name="mine")
    assert score_batch(function, batch(), ["a", "b"])[0].score == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (torch.tensor(0.25), 0.25)],
)
def test_any_kind_of_number_is_a_score(value: Any, expected: float) -> None:
    scored = RewardFunction(lambda **_: value, "f").score("row 1")
    assert scored.score == expected
    assert type(scored.score) is float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "the score is NoneType None, not a number"),
        ("1.0", "the score is str '1.0', not a number"),
        ([1.0], "the score is list [1.0], not a number"),
        (np.array([1.0]), "the score is ndarray array([1.]), not a number"),
        (float("nan"), "the score is nan; it must be finite"),
        ({"acc": 1}, "returned a dict without 'score'; it has acc"),
        ({"score": "x"}, "score is str 'x', not a number"),
        ({"score": 1, "acc": float("inf")}, "acc is inf; it must be finite"),
    ],
)
def test_what_is_no_score_is_an_error_with_the_function_and_the_row(value: Any, expected: str) -> None:
    with pytest.raises(RewardError) as caught:
        RewardFunction(lambda **_: value, "f of x.py").score("train.jsonl, line 3")
    assert str(caught.value) == f"f of x.py: {expected}, for train.jsonl, line 3"


def test_an_error_in_the_users_function_names_file_function_line_and_row(tmp_path: Path) -> None:
    text = """
def helper(text):
    return int(text)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return helper(solution_str)
"""
    with pytest.raises(RewardError) as caught:
        score_batch(custom(tmp_path, text), batch(), ["1", "two"])
    assert str(caught.value) == (
        f"custom_reward_function.path={tmp_path / 'my_reward.py'}: compute_score: ValueError at my_reward.py:3: "
        "invalid literal for int() with base 10: 'two', for train.jsonl, line 9 (uid epoch0-row8)"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301


def test_a_file_may_define_dataclasses(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Answer:
    value: float

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Answer(1.0).value
"""
    assert score_batch(custom(tmp_path, text), batch(), ["a", "b"])[0].score == 1


def test_annotations_of_the_file_are_values_unless_it_asks_for_texts(tmp_path: Path) -> None:
    text = (
        "def compute_score(solution_str: str, **_):\n    return compute_score.__annotations__['solution_str'] is str\n"
    )
    assert score_batch(custom(tmp_path, text), batch(), ["a", "b"])[0].score == 1


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("import no_such_module_at_all", "compute_score", "cannot be imported: ModuleNotFoundError: No module named"),
        ("def f(:", "compute_score", "cannot be imported: SyntaxError"),
        ("1 / 0", "compute_score", "cannot be imported: ZeroDivisionError: division by zero"),
        ("from math import sqrt\ndef f(): ...\ndef g(): ...", "compute_score", "which defines f, g"),
        ("", "compute_score", "which defines no function"),
        ("compute_score = 3", "compute_score", "3 is not a callable object"),
        ("async def compute_score(**_): ...", "compute_score", "is async in"),
        ("def compute_score(solution_str): ...", "compute_score", "got an unexpected keyword argument"),
        ("def f(data_source, solution_str, ground_truth, extra_info, model): ...", "f", "missing a required argument"),
    ],
)
def test_a_file_that_is_no_use_is_refused_before_any_row(tmp_path: Path, text: str, name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        custom(tmp_path, text, name)
    assert "my_reward.py" in str(caught.value)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path=.*nowhere\.py: there is no such file"):
        load_reward_function(CustomRewardFunctionConfig(path="nowhere.py"))
