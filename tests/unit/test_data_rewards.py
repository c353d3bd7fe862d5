"""Functions score batches, alone or as a weighted sum, and errors in the user's own function say
where."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.rewards import (
    RewardError,
    RewardFunction,
    Scored,
    WeightedRewards,
    score_batch,
    with_overlong_penalty,
)
from rolepool.errors import ConfigError

# Batches


def batch(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": ["openai/gsm8k", "exact_match"],
        "reward_model": [{"ground_truth": "7"}, {"ground_truth": "b"}],
        "extra_info": [{}, {"level": 3}],
        "origin": ["train.jsonl, line 1", "train.jsonl, line 9"],
        "uid": ["epoch0-row0", "epoch0-row8"],
        "raw_prompt": ["3 + 4 =", [{"role": "user", "content": "a or b?"}]],
        **changes,
    }


def row(name: str, response: str) -> ResponseRow:
    return ResponseRow(
        name, {"data_source": "", "solution_str": response, "ground_truth": "", "extra_info": {}}
    )


def custom(
    folder: Path, text: str, name: str = "compute_score"
) -> RewardFunction | WeightedRewards:
    file = folder / "my_reward.py"
    file.write_text(text, encoding="utf-8")
    return load_reward_function(
        load_config([{"custom_reward_function": {"path": file, "name": name}}]).config
    )


def built_in() -> RewardFunction | WeightedRewards:
    return load_reward_function(load_config().config)


def test_rows_of_one_batch_may_have_different_rules() -> None:
    scored = score_batch(built_in(), batch(), ["#### 7", "c"])
    assert [one.score for one in scored] == [1, 0]


def test_a_built_in_rule_that_cannot_score_a_row_names_it() -> None:
    with pytest.raises(RewardError) as caught:
        score_batch(
            built_in(), batch(reward_model=[{"ground_truth": "seven"}, {}]), ["#### 7", "c"]
        )
    assert str(caught.value) == (
        "built-in reward: the ground truth is 'seven'; the rule gsm8k needs a number without commas, "
        "for train.jsonl, line 1 (uid epoch0-row0); the response is '#### 7'"
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
    assert (first.pred, second.pred) == ("abc", "")


def test_the_answer_may_be_a_number_and_a_sum_takes_the_first_one(tmp_path: Path) -> None:
    number = custom(tmp_path, "def compute_score(**row):\n    return {'score': 1, 'pred': 7}\n")
    (first, _) = score_batch(number, batch(), ["", ""])
    assert (first.numbers, first.pred) == ({"pred": 7}, "7.0")
    (summed, _) = score_batch(
        of_keys("reward.functions=[exact_match,math_dapo]"), batch(), ["Answer: $7$", ""]
    )
    assert summed.pred == "7"


def test_the_function_may_have_another_name_and_take_keywords(tmp_path: Path) -> None:
    function = custom(
        tmp_path, "def mine(solution_str, **rest):\n    return len(rest)\n", name="mine"
    )
    assert score_batch(function, batch(), ["a", "b"])[0].score == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (torch.tensor(0.25), 0.25)],
)
def test_any_kind_of_number_is_a_score(value: Any, expected: float) -> None:
    (scored,) = RewardFunction(lambda **_: value, "f").score_rows([row("row 1", "")])
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
def test_what_is_no_score_is_an_error_with_the_function_and_the_row(
    value: Any, expected: str
) -> None:
    with pytest.raises(RewardError) as caught:
        RewardFunction(lambda **_: value, "f of x.py").score_rows(
            [row("train.jsonl, line 3", "x" * 300)]
        )
    place = f"for train.jsonl, line 3; the response begins with '{'x' * 200}'"
    assert str(caught.value) == f"f of x.py: {expected}, {place}"


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
        "invalid literal for int() with base 10: 'two', for train.jsonl, line 9 (uid epoch0-row8); "
        "the response is 'two'"
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
        "def compute_score(solution_str: str, **_):\n"
        "    return compute_score.__annotations__['solution_str'] is str\n"
    )
    assert score_batch(custom(tmp_path, text), batch(), ["a", "b"])[0].score == 1


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            "import no_such_module_at_all as compute_score",
            "compute_score",
            "cannot be imported: ModuleNotFoundError: No module named",
        ),
        (
            "x = 1\ndef f(:",
            "compute_score",
            "cannot be imported (invalid syntax (my_reward.py, line 2)",
        ),
        ("x = '\0'", "compute_score", "cannot be imported ("),
        (
            "compute_score = 1 / 0",
            "compute_score",
            "cannot be imported: ZeroDivisionError: division by zero",
        ),
        (
            "from math import sqrt\ndef f(): ...\ndef g(): ...",
            "compute_score",
            "which defines f, g",
        ),
        ("", "compute_score", "which defines no function"),
        ("compute_score = 3", "compute_score", "compute_score is not a function in"),
        ("from math import *", "compute_score", "compute_score is not a function in"),
        (
            "def compute_score(solution_str): ...",
            "compute_score",
            "compute_score does not take data_source, ground_truth, extra_info; add **kwargs to its parameters, "
            "because it is called as compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        ),
        (
            "def f(completions, answer): ...",
            "f",
            "f does not take prompts; add **kwargs to its parameters, because it is called as "
            "f(prompts, completions, **kwargs)",
        ),
        (
            "async def f(prompts, completions): ...",
            "f",
            "f does not take the columns of the data; add **kwargs to its parameters",
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info, model): ...",
            "f",
            "f needs model, but it is called as f(data_source, solution_str, ground_truth, extra_info=None); "
            "give model a default, or set custom_reward_function.reward_kwargs.model",
        ),
        (
            "def f(data_source, /, **rest): ...",
            "f",
            "cannot be called as f(data_source, solution_str",
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None, /): ...",
            "f",
            "its parameter data_source",
        ),
    ],
)
def test_a_file_that_is_no_use_is_refused_before_any_row(
    tmp_path: Path, text: str, name: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        custom(tmp_path, text, name)
    assert "my_reward.py" in str(caught.value)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("arguments", ["solution_str, scale, **_", "scale, **rest"])
def test_further_arguments_come_from_the_config(tmp_path: Path, arguments: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def compute_score({arguments}):\n    return 2 * scale\n", encoding="utf-8")
    keys = [
        f"custom_reward_function.path={file}",
        "+custom_reward_function.reward_kwargs.scale=1.5",
    ]
    assert [one.score for one in score_batch(of_keys(*keys), batch(), ["a", "b"])] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (
            "{scale: 1, other: x}",
            "reward_kwargs.other=x: compute_score does not take it (custom_reward_function.path={file}); remove it",
        ),
        (
            "{scale: 1, extra_info: 2}",
            "reward_kwargs.extra_info=2: every call sets it (custom_reward_function.path={file}); remove it",
        ),
        (
            "{}",
            "path={file}: compute_score needs scale, but it is called as compute_score(data_source, solution_str",
        ),
    ],
)
def test_an_argument_that_the_function_does_not_take_is_one_line(
    tmp_path: Path, kwargs: str, expected: str
) -> None:
    file = tmp_path / "mine.py"
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info, scale):\n    return 1\n"
    file.write_text(text, encoding="utf-8")
    keys = [f"custom_reward_function.path={file}", f"custom_reward_function.reward_kwargs={kwargs}"]
    with pytest.raises(ConfigError) as caught:
        of_keys(*keys)
    assert str(caught.value).startswith("custom_reward_function." + expected.format(file=file))
    assert len(str(caught.value).splitlines()) == 1


def test_the_penalty_for_overlong_responses_is_that_of_dapo() -> None:
    """The lengths of the DAPO paper divided by 1024: 16 tokens are free, and the penalty grows over
    4 more."""
    section = "reward_model.reward_kwargs"
    buffer = [
        f"{section}.overlong_buffer_cfg.{word}"
        for word in ("enable=true", "len=4", "penalty_factor=1.0")
    ]
    words = [*buffer, "reward_model.reward_manager=dapo", f"{section}.max_resp_len=20"]
    keys = load_config(overrides=words).config.reward_model.reward_kwargs
    lengths = {1: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 20: -1.0, 22: -1.5}
    for num_tokens, penalty in lengths.items():
        assert with_overlong_penalty(Scored(1.0, {"acc": 1.0}), num_tokens, keys) == Scored(
            1.0 + penalty, {"acc": 1.0}
        )
    logs = load_config(
        overrides=[*words, f"{section}.overlong_buffer_cfg.log=true"]
    ).config.reward_model.reward_kwargs
    assert with_overlong_penalty(Scored(1.0, {}), 18, logs).numbers == {
        "overlong_reward": -0.5,
        "overlong": 1.0,
    }
    assert with_overlong_penalty(Scored(1.0, {}), 16, logs).numbers == {
        "overlong_reward": 0.0,
        "overlong": 0.0,
    }


def test_a_missing_file_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"custom_reward_function\.path=.*nowhere\.py: .*No such file or directory",
    ):
        load_reward_function(
            load_config(overrides=["custom_reward_function.path=nowhere.py"]).config
        )


# Several functions


def of_keys(*overrides: str) -> RewardFunction | WeightedRewards:
    return load_reward_function(load_config(overrides=overrides).config)


MINE = """
def brevity(solution_str, **_):
    return {"score": -len(solution_str), "words": len(solution_str.split())}

def constant(**_):
    return 2
"""


def test_the_score_is_the_weighted_sum_and_each_part_is_a_number_to_log(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE, encoding="utf-8")
    parts = f"[exact_match,{file}:constant,{{function: {file}:brevity, weight: -0.1}}]"
    first, second = score_batch(of_keys(f"reward.functions={parts}"), batch(), ["# 7", "b"])
    assert first.score == pytest.approx(0 + 2 + 0.3)
    assert first.numbers == {"exact_match": 0, "constant": 2, "brevity": -3, "brevity/words": 2}
    assert second.score == pytest.approx(1 + 2 + 0.1)


def test_one_rule_can_score_all_rows_whatever_their_data_source() -> None:
    function = of_keys("reward.functions=math_dapo")
    rows = batch(data_source=["train", "openai/gsm8k"])
    first, second = score_batch(function, rows, ["Answer: 7", "no idea"])
    assert (first.score, second.score) == (1, -1)
    assert first.numbers == {"math_dapo": 1, "math_dapo/acc": 1}


def test_an_error_in_one_of_several_functions_names_its_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(**_):\n    return 1 / 0\n")
    with pytest.raises(RewardError) as caught:
        score_batch(of_keys(f"reward.functions=[exact_match, {file}:f]"), batch(), ["a", "b"])
    said = f"reward.functions={file}:f: f: ZeroDivisionError at mine.py:2: division by zero, for train.jsonl, line 1"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ("maths", "reward.functions=maths: is not a rule; use exact_match, position_match, gsm8k,"),
        ("mine.py", "reward.functions=mine.py: is not a rule; use exact_match"),
        ("nowhere.py:f", "reward.functions=nowhere.py:f: cannot be imported ("),
        (
            "[math, math]",
            "reward.functions=math: there are two functions with the name math; rename one",
        ),
        (
            "[a.py:f, b.py:f]",
            "reward.functions=b.py:f: there are two functions with the name f; rename one",
        ),
    ],
)
def test_a_function_that_does_not_exist_is_named(
    functions: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def f(**_):\n    return 0\n")
    with pytest.raises(ConfigError) as caught:
        of_keys(f"reward.functions={functions}")
    assert str(caught.value).startswith(expected)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["custom_reward_function.path=a.py"],
            "reward.functions: contradicts custom_reward_function.path=a.py; set only one of them",
        ),
        (
            ["reward_model.enable=true", "reward_model.model.path=m"],
            "reward.functions: contradicts reward_model.enable=true; set only one of them",
        ),
    ],
)
def test_functions_are_refused_where_something_else_scores(
    overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["reward.functions=math", *overrides])
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (
            "[{function: math, weight: heavy}]",
            "reward.functions.0.weight=heavy: must be a valid number; see `rolepool",
        ),
        (
            "[{weight: 1}]",
            "reward.functions.0.function: Field required; see `rolepool config reward.functions`",
        ),
        (
            "{function: math}",
            "reward.functions={function:math}: must be a list, each text or a mapping",
        ),
    ],
)
def test_an_entry_of_another_form_is_refused(functions: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"reward.functions={functions}"])
    assert str(caught.value).startswith(expected)
