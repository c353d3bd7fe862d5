"""The demo's folders are whole or absent, always the same, and hold a task that must be learned
from the prompt."""

from __future__ import annotations

import itertools
import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data import demo
from rolepool.data.demo import Demo, make_demo, next_letters
from rolepool.data.prompts import PromptSet, validation_batches
from rolepool.data.rules import rule_for
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("made") / "demo")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


# The task


def test_every_letter_is_answered_with_the_next_one() -> None:
    assert next_letters("c a h b") == "d b a c"


def test_validation_prompts_do_not_occur_in_training(made: Demo) -> None:
    train, val = (
        [row["prompt"][0]["content"] for row in rows(file)]
        for file in (made.train_file, made.val_file)
    )
    assert (len(set(train)), len(set(val))) == (len(train), len(val)) == (3840, 256)
    assert not set(train) & set(val)


def test_no_answer_that_ignores_the_prompt_earns_much(made: Demo) -> None:
    """Positions are scored one by one, so the best constant answer is the best letter of each
    position."""
    for file in (made.train_file, made.val_file):
        truths = [row["reward_model"]["ground_truth"].split() for row in rows(file)]
        best = [
            max(letters.count(letter) for letter in demo.LETTERS)
            for letters in zip(*truths, strict=True)
        ]
        assert sum(best) / len(best) / len(truths) < 0.2


def test_the_right_answer_earns_everything_and_its_parts_earn_parts(made: Demo) -> None:
    row = rows(made.train_file)[0]
    rule, truth = rule_for(row["data_source"]), row["reward_model"]["ground_truth"]
    assert rule(truth, truth) == 1
    for num_right in range(demo.NUM_LETTERS_PER_PROMPT):
        assert (
            rule(" ".join(truth.split()[:num_right]), truth)
            == num_right / demo.NUM_LETTERS_PER_PROMPT
        )


def test_prompts_and_answers_survive_the_tokenizer(made: Demo) -> None:
    tokenizer = load_tokenizer(PolicyModelConfig(path=str(made.model)))
    keys = [f"data.val_files={made.val_file}", "data.max_prompt_length=5"]
    (batch,) = validation_batches(PromptSet("val", load_config(overrides=keys).config, tokenizer))
    for row, ids in zip(rows(made.val_file), batch.non_tensor_batch["raw_prompt_ids"], strict=True):
        assert tokenizer.decode(ids) == row["prompt"][0]["content"] + " ="
        truth = row["reward_model"]["ground_truth"]
        answer_ids = tokenizer(truth)["input_ids"]
        assert len(answer_ids) == demo.NUM_LETTERS_PER_PROMPT
        assert (
            tokenizer.decode([*answer_ids, tokenizer.eos_token_id], skip_special_tokens=True)
            == truth
        )


def test_all_tokens_but_padding_and_end_are_words_that_a_response_shows(made: Demo) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    shown = tokenizer.decode(list(range(len(tokenizer))), skip_special_tokens=True)
    assert shown == "? = a b c d e f g h"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer("a zebra")["input_ids"] == tokenizer("a ?")["input_ids"]


# The models


def test_the_model_is_a_small_transformer_that_answers_at_random(made: Demo) -> None:
    model = AutoModelForCausalLM.from_pretrained(made.model)
    assert 200_000 < model.num_parameters() < 500_000
    tokenizer = load_tokenizer(PolicyModelConfig(path=str(made.model)))
    assert (model.config.eos_token_id, model.config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    with torch.no_grad():
        probabilities = model(torch.tensor([[4, 5, 6, 7, 3]])).logits[0, -1].softmax(-1)
    assert len(probabilities) == len(tokenizer)
    assert probabilities.max() < 0.25


def test_the_reward_model_gives_one_number_for_a_sequence_of_any_padding(made: Demo) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made.reward_model)
    assert (model.config.num_labels, len(AutoTokenizer.from_pretrained(made.reward_model))) == (
        1,
        12,
    )
    with torch.no_grad():
        scores = model(torch.tensor([[4, 5, 3, 6, 7], [5, 5, 3, 6, 7]])).logits
        padded = model(
            torch.tensor([[4, 5, 3, 6, 7, 0]]), attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]])
        ).logits
    assert scores.shape == (2, 1)
    torch.testing.assert_close(padded[0], scores[0])


def test_the_command_makes_all_that_the_demos_recipes_name(
    rolepool: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    for _ in range(2):
        assert rolepool("demo", str(folder)) == (0, f"{folder}\n", "")
    for made in (Demo(folder).model, Demo(folder).reward_model):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names_in(made))
    assert {"model", "reward_model", "train.jsonl", "val.jsonl"} <= set(names_in(folder))


# Whole or absent


def test_two_makings_are_the_same_byte_for_byte_and_leave_the_random_numbers_alone(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)
    make_demo(tmp_path / "1")
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    make_demo(tmp_path / "deep" / "down" / "2")
    assert contents(tmp_path / "1") == contents(tmp_path / "deep" / "down" / "2")


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    first = make_demo(tmp_path / "demo")
    (first.folder / "note.txt").write_text("mine", encoding="utf-8")

    def states() -> dict[Path, tuple[int, int]]:
        files = [*first.folder.rglob("*"), tmp_path]  # a new file also changes its folder
        return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}

    before = states()
    assert make_demo(str(tmp_path / "demo")).folder == first.folder
    assert states() == before, "written again"
    assert names_in(tmp_path) == ["demo"]


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """This process cannot write larger files, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_making_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), files_up_to(1000):
        make_demo(tmp_path / "demo")
    assert names_in(tmp_path) == []


def test_an_empty_folder_is_filled_and_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make_demo(tmp_path / "empty").train_file.is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="was not made by rolepool"):
        make_demo(tmp_path / "mine")
    assert names_in(tmp_path / "mine") == ["thesis.txt"]


def test_of_two_that_make_it_at_once_the_slower_one_takes_the_others(
    tmp_path: Path, made: Demo
) -> None:
    shutil.copytree(made.folder, tmp_path / "other")
    (tmp_path / "other" / "of_the_other.txt").touch()

    def finish_first() -> None:
        while not list(tmp_path.glob(".demo.*/new")):
            time.sleep(0.001)
        (tmp_path / "other").rename(tmp_path / "demo")

    other = threading.Thread(target=finish_first, daemon=True)
    other.start()
    assert make_demo(tmp_path / "demo").folder == tmp_path / "demo"
    other.join(timeout=10)
    assert names_in(tmp_path) == ["demo"]
    assert (tmp_path / "demo" / "of_the_other.txt").exists()


def test_every_prompt_of_the_alphabet_is_in_one_of_the_files(made: Demo) -> None:
    written = [
        row["prompt"][0]["content"]
        for file in (made.train_file, made.val_file)
        for row in rows(file)
    ]
    every = itertools.product(demo.LETTERS, repeat=demo.NUM_LETTERS_PER_PROMPT)
    assert sorted(written) == sorted(" ".join(letters) for letters in every)
