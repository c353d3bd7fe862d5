"""Generators of reasoning-gym as files of prompts, and their verifiers as rewards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rolepool.config import Config, load_config
from rolepool.data import files
from rolepool.data.prompts import PromptSet
from rolepool.data.reasoning_gym import open_generator, reason_of_repeats
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError, RolepoolError

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")

KEY = "data.train_files"
SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def config_of(model: Path, *words: str) -> Config:
    keys = [
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=60",
        "data.max_response_length=4",
    ]
    return load_config([], [*keys, *words]).config


def prompts_of(config: Config, split: Any) -> PromptSet:
    return PromptSet(split, config, load_tokenizer(config.actor_rollout_ref.model))


def test_a_generator_is_read_like_a_file(model: Path) -> None:
    config = config_of(model, f"{KEY}={SUMS}&size=7&seed=3")
    assert files.find_problems(config) == []
    rows = prompts_of(config, "train").take(range(7))
    assert rows["data_source"] == ["reasoning_gym/chain_sum"] * 7
    assert all("arithmetic problem" in prompt[0]["content"] for prompt in rows["raw_prompt"])
    again = prompts_of(config, "train").take(range(7))
    assert rows["raw_prompt"] == again["raw_prompt"], "the seed decides the items"
    other = prompts_of(config_of(model, f"{KEY}={SUMS}&size=7&seed=4"), "train").take(range(7))
    assert rows["raw_prompt"] != other["raw_prompt"]


def test_keys_that_name_columns_of_files_do_not_mean_a_generator(
    model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "2 + 2 =", "result": "4", "data_source": "last_number/own"}\n')
    columns = ("data.prompt_key=question", "data.answer_key=result")
    config = config_of(model, f"{KEY}=['{SUMS}&size=2&seed=3','{own}']", *columns)
    assert files.find_problems(config) == []
    rows = prompts_of(config, "train").take(range(3))
    assert "arithmetic problem" in rows["raw_prompt"][0][0]["content"]
    assert rows["raw_prompt"][2] == "2 + 2 ="
    assert [row["ground_truth"] for row in rows["reward_model"]][2] == "4"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("{0}", 1.0),
        ("The sum is {0}.", 1.0),
        ("<answer>{0}</answer>, and not 99", 1.0),
        ("99", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_of_the_task_scores_the_answer_in_a_response(
    response: str, score: float, model: Path
) -> None:
    config = config_of(model, f"{KEY}={SUMS}&size=1")
    columns = prompts_of(config, "train").take([0])
    truth = columns["reward_model"][0]["ground_truth"]
    inputs = {
        "data_source": columns["data_source"][0],
        "solution_str": response.format(truth),
        "ground_truth": truth,
        "extra_info": columns["extra_info"][0],
    }
    function = load_reward_function(config)
    (call,) = function.calls_for([ResponseRow("line 1", inputs)])
    (scored,) = function.score_call(call)
    assert scored.score == pytest.approx(score, abs=0.01)


def test_a_verifier_may_need_more_than_the_answer(model: Path) -> None:
    """The game of countdown has many right answers."""
    items = open_generator("reasoning_gym:countdown?size=1&seed=1", KEY)
    truth, extra = items[0]["reward_model"]["ground_truth"], items[0]["extra_info"]
    function = load_reward_function(config_of(model))
    inputs = {"data_source": items[0]["data_source"], "ground_truth": truth, "extra_info": extra}
    other_order = f"0 + {truth}"
    for text, at_least in ((truth, 1.0), (other_order, 0.0)):
        (call,) = function.calls_for([ResponseRow("line 1", {**inputs, "solution_str": text})])
        (scored,) = function.score_call(call)
        assert scored.score >= at_least


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("reasoning_gym:", "does not name a task; write reasoning_gym:TASK?name=value"),
        (
            "reasoning_gym:chain_sums",
            "reasoning-gym has no task chain_sums; did you mean chain_sum?",
        ),
        ("reasoning_gym:chain_sum?terms=3", "chain_sum has no parameter terms; it has "),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "reasoning-gym refuses it ("),
        ("reasoning_gym:chain_sum?size=-1", "size=-1 must be an integer from 0 to 1000000"),
        ("reasoning_gym:chain_sum?size=many", "size=many must be an integer"),
        ("reasoning_gym:chain_sum?size", "cannot be read ("),
    ],
)
def test_a_generator_that_cannot_be_is_one_line_with_its_key(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_generator(name, KEY)
    (line,) = caught.value.problems
    assert line.startswith(f"{KEY}={name}: ")
    assert problem in line


def test_rows_of_a_file_cannot_use_the_verifier(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n', encoding="utf-8")
    words = [f"{KEY}={file}", "data.answer_key=answer", "reward.functions=reasoning_gym"]
    (problem,) = files.find_problems(config_of(model, *words))
    assert "the rule reasoning_gym needs rows of reasoning_gym:TASK; use another rule" in problem


def test_validation_items_that_occur_in_training_are_left_out_and_counted(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(model, f"{KEY}={SUMS}&size=40", f"data.val_files={SUMS}&size=60&seed=1001")
    training, validation = prompts_of(config, "train"), prompts_of(config, "val")
    validation.leave_out(training)
    known = {str(prompt) for prompt in training.take(range(len(training)))["raw_prompt"]}
    left = {str(prompt) for prompt in validation.take(range(len(validation)))["raw_prompt"]}
    assert 0 < len(validation) < 60
    assert not known & left
    assert (
        f"{60 - len(validation)} of 60 prompts also occur in training, and are left out"
        in caplog.text
    )


def test_no_validation_items_left_is_an_error(model: Path) -> None:
    tens = "reasoning_gym:chain_sum?min_terms=1&max_terms=1&min_digits=1&max_digits=1"
    config = config_of(model, f"{KEY}={tens}&size=200", f"data.val_files={tens}&size=20&seed=1001")
    with pytest.raises(
        RolepoolError,
        match="20 of 20 prompts also occur in training; give the generator another seed",
    ):
        prompts_of(config, "val").leave_out(prompts_of(config, "train"))


def test_seeds_that_overlap_are_named_as_the_reason_with_a_seed_that_does_not(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = f"{KEY}={SUMS}&size=40"
    config = config_of(model, training, f"data.val_files={SUMS}&size=20&seed=2")
    with pytest.raises(RolepoolError) as caught:
        prompts_of(config, "val").leave_out(prompts_of(config, "train"))
    (line,) = caught.value.problems
    assert "20 of 20 prompts also occur in training; item i of a generator has the seed" in line
    assert "seed=2 repeats items of seed=1 with size=40; write seed=41 or higher" in line

    config = config_of(model, training, f"data.val_files={SUMS}&size=60&seed=40")
    prompts_of(config, "val").leave_out(prompts_of(config, "train"))
    assert "seed=40 repeats items of seed=1 with size=40" in caplog.text

    caplog.clear()
    config = config_of(model, training, f"data.val_files={SUMS}&size=60&seed=41")
    prompts_of(config, "val").leave_out(prompts_of(config, "train"))
    assert "repeats items" not in caplog.text


@pytest.mark.parametrize(
    ("training", "validation", "repeats"),
    [
        (f"{SUMS}&size=40&seed=1", f"{SUMS}&size=1&seed=40", True),
        (f"{SUMS}&size=40&seed=1", f"{SUMS}&size=1&seed=41", False),
        (f"{SUMS}&size=1&seed=41", f"{SUMS}&size=40&seed=1", False),
        (f"{SUMS}&size=1&seed=40", f"{SUMS}&size=40&seed=1", True),
        (f"{SUMS}&seed=1&size=40", "reasoning_gym:basic_arithmetic?size=40&seed=1", False),
        (f"{SUMS}&seed=1&size=40", f"{SUMS}&allow_negation=true&size=40&seed=1", False),
    ],
)
def test_two_generators_repeat_items_if_task_parameters_and_seeds_meet(
    training: str, validation: str, repeats: bool
) -> None:
    assert (reason_of_repeats(training, validation) is not None) == repeats
