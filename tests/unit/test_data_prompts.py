"""Rows of Parquet and JSONL files become prompts, and what is wrong with them is said with file and
row."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.prompts import PromptSet, load_tokenizer, truncate
from rolepool.errors import ConfigError, DataError, RolepoolError


@pytest.fixture
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Letters a to h are the tokens 4 to 11; a chat is its letters and then `=`, token 3."""
    return load_tokenizer(PolicyModelConfig(path=str(model)))


def row(letters: str = "a b c", **changes: Any) -> dict[str, Any]:
    whole = {
        "prompt": [{"role": "user", "content": letters}],
        "data_source": "exact_match",
        "reward_model": {"style": "rule", "ground_truth": letters},
        "extra_info": {"letters": letters},
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not ...}


def write_jsonl(file: Path, *rows: Any) -> str:
    file.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows),
        "utf-8",
    )
    return str(file)


def write_parquet(file: Path, *rows: dict[str, Any]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file, row_group_size=2)
    return str(file)


WRITERS = pytest.mark.parametrize(
    ("write", "ending"), [(write_jsonl, "jsonl"), (write_parquet, "parquet")]
)
Write = Callable[..., str]


def prompts_of(
    tokenizer: PreTrainedTokenizerBase,
    *files: str,
    max_samples: int = -1,
    needs_ground_truth: bool = True,
    max_prompt_length: int = 8,
    **options: Any,
) -> PromptSet:
    keys = {
        "train_files": list(files),
        "train_max_samples": max_samples,
        "max_prompt_length": max_prompt_length,
        **options,
    }
    overrides = [f"data.{name}={value}" for name, value in keys.items()]
    overrides += [] if needs_ground_truth else ["custom_reward_function.path=mine.py"]
    return PromptSet("train", load_config(overrides=overrides).config, tokenizer)


def problem(make: Callable[[], object]) -> str:
    with pytest.raises(RolepoolError) as caught:
        make()
    return str(caught.value)


# Reading


@WRITERS
def test_a_row_becomes_tokens_with_everything_else_as_it_was_written(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, write: Write, ending: str
) -> None:
    file = write(tmp_path / f"x.{ending}", row("a b"), row("c", extra_info=None), row("h g f"))
    prompts = prompts_of(tokenizer, file)
    assert prompts.take([0, 1, 2])["raw_prompt_ids"] == [[4, 5, 3], [6, 3], [11, 10, 9, 3]]
    assert prompts.take([0])["data_source"][0] == "exact_match"
    assert prompts.take([0])["reward_model"][0] == {"style": "rule", "ground_truth": "a b"}
    assert (prompts.take([0])["extra_info"][0], prompts.take([1])["extra_info"][0]) == (
        {"letters": "a b"},
        {},
    )


def test_files_of_both_kinds_are_read_one_after_another(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    files = [
        write_jsonl(tmp_path / "1.jsonl", row("a"), row("b")),
        write_parquet(tmp_path / "2.parquet", row("c"), row("d"), row("e")),
        write_jsonl(tmp_path / "3.jsonl", row("f")),
    ]
    prompts = prompts_of(tokenizer, *files)
    assert [ids[0] for ids in prompts.take(range(6))["raw_prompt_ids"]] == [4, 5, 6, 7, 8, 9]
    assert prompts.take([1])["origin"][0] == f"{files[0]}, line 2"
    assert prompts.take([2])["origin"][0] == f"{files[1]}, row 0 (the first is 0)"
    assert prompts.take([5])["origin"][0] == f"{files[2]}, line 1"


def test_blank_lines_are_no_rows_but_count_as_lines(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = prompts_of(
        tokenizer, write_jsonl(tmp_path / "x.jsonl", "\n", row("a"), "  \n", row("b"), "\n")
    )
    assert [origin.split(", ")[1] for origin in prompts.take([0, 1])["origin"]] == [
        "line 2",
        "line 4",
    ]


def test_letters_beyond_ascii_do_not_shift_the_lines_after_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = json.dumps(row("a", extra_info={"note": "Größe 🦙\u2028"}), ensure_ascii=False) + "\n"
    prompts = prompts_of(tokenizer, write_jsonl(tmp_path / "x.jsonl", text, row("b")))
    assert prompts.take([0])["extra_info"][0] == {"note": "Größe 🦙\u2028"}
    assert prompts.take([1])["raw_prompt_ids"][0] == [5, 3]


def test_another_column_can_hold_the_prompt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_parquet(tmp_path / "x.parquet", row(prompt=..., question="a b"))
    assert prompts_of(tokenizer, file, prompt_key="question").take([0])["raw_prompt_ids"][0] == [
        4,
        5,
    ]
    said = problem(lambda: prompts_of(tokenizer, file))
    assert (
        "data.prompt_key=prompt: there is no such column (columns: data_source, reward_model,"
        in said
    )


def test_only_the_first_samples_are_used_and_looked_at(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a"), row("b"), "not json\n")
    assert len(prompts_of(tokenizer, file, max_samples=2)) == 2
    assert len(prompts_of(tokenizer, write_jsonl(tmp_path / "y.jsonl", row()), max_samples=2)) == 1


def test_a_token_that_a_model_does_not_have_is_named_with_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = prompts_of(
        tokenizer, write_jsonl(tmp_path / "x.jsonl", row("a b"), row("h a"), row("b"))
    )
    prompts.check_vocabulary("critic.model.path=small", 12)
    said = problem(lambda: prompts.check_vocabulary("critic.model.path=small", 11))
    assert said.startswith(
        f"{tmp_path / 'x.jsonl'}, line 2: the prompt has the token id 11, but critic.model.path=small"
    )
    assert "0 to 10" in said


def test_the_digest_is_that_of_the_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    def digest(name: str, *rows: dict[str, Any]) -> str:
        return prompts_of(tokenizer, write_jsonl(tmp_path / name, *rows)).digest

    assert digest("1.jsonl", row("a b"), row("c")) == digest("2.jsonl", row("a b"), row("c"))
    assert digest("3.jsonl", row("a"), row("b c")) != digest("4.jsonl", row("a b"), row("c"))


# Templates


def test_plain_strings_are_tokenized_as_they_are(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(prompt="a b"), row("c d"), row(prompt="e"))
    assert prompts_of(tokenizer, file).take([0, 1, 2])["raw_prompt_ids"] == [[4, 5], [6, 7, 3], [8]]


def test_a_prompt_is_tokenized_once(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts: list[str] = []

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: list[str], **options: Any) -> Any:
            texts.extend(text)
            return super().__call__(text, **options)

    tokenizer.__class__ = Watched
    prompts = prompts_of(tokenizer, write_jsonl(tmp_path / "x.jsonl", row("a b"), row("c")))
    assert prompts.take([1, 0, 1])["raw_prompt_ids"] == [[6, 3], [4, 5, 3], [6, 3]]
    assert len(texts) == 2


def test_a_chat_gives_what_the_tokenizer_itself_makes_of_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b c"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert (
        prompts_of(tokenizer, write_jsonl(tmp_path / "x.jsonl", row(prompt=chat))).take([0])[
            "raw_prompt_ids"
        ][0]
        == expected
    )


def test_a_chat_without_a_template_is_an_error_and_a_plain_string_is_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = None
    file = write_jsonl(tmp_path / "x.jsonl", row(prompt="a"), row("b"))
    said = problem(lambda: prompts_of(tokenizer, file))
    assert f"{file}, line 2" in said
    assert "chat_template is not set" in said
    assert "plain string" in said
    assert len(prompts_of(tokenizer, file, max_samples=1)) == 1


def test_a_chat_that_the_template_refuses_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write_jsonl(tmp_path / "x.jsonl", row())
    said = problem(lambda: prompts_of(tokenizer, file))
    assert f"{file}, line 1" in said
    assert "roles must alternate" in said


# Length


@pytest.mark.parametrize(
    ("mode", "length", "expected"),
    [
        ("left", 3, [3, 4, 5]),
        ("right", 3, [1, 2, 3]),
        ("middle", 3, [1, 4, 5]),
        ("middle", 4, [1, 2, 4, 5]),
        ("middle", 1, [5]),
        ("left", 5, [1, 2, 3, 4, 5]),
        ("error", 5, [1, 2, 3, 4, 5]),
    ],
)
def test_truncation_keeps_the_end_the_start_or_both(
    mode: Any, length: int, expected: list[int]
) -> None:
    assert truncate([1, 2, 3, 4, 5], length, mode) == expected


def test_a_truncated_prompt_has_the_longest_length_allowed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a b c d"), row("a"))
    prompts = prompts_of(tokenizer, file, max_prompt_length=3, truncation="left")
    assert prompts.take([0, 1])["raw_prompt_ids"] == [[6, 7, 3], [4, 3]]


def test_a_prompt_that_is_too_long_is_an_error_with_its_place_its_length_and_the_fix(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a"), row("a b c"), row("a b c d e"))
    said = problem(lambda: prompts_of(tokenizer, file, max_prompt_length=3))
    assert said.startswith(
        f"{file}, line 2: the prompt has 4 tokens, more than data.max_prompt_length=3"
    )
    assert "2 of 3 prompts are too long, the longest has 6" in said
    assert (
        "Set data.max_prompt_length=6, data.filter_overlong_prompts=true, or data.truncation=left"
        in said
    )


def test_prompts_that_are_too_long_can_be_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a b c"), row("b"), row("c d e f"), row("d"))
    with caplog.at_level(logging.WARNING):
        prompts = prompts_of(tokenizer, file, max_prompt_length=3, filter_overlong_prompts=True)
    assert prompts.take(range(len(prompts)))["raw_prompt_ids"] == [[5, 3], [7, 3]]
    assert prompts.take([1])["origin"][0] == f"{file}, line 4"
    assert "skipped 2 of 4 prompts, longer than data.max_prompt_length=3" in caplog.text


def test_leaving_out_every_prompt_is_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a b c"), row("a b c d"))
    said = problem(
        lambda: prompts_of(tokenizer, file, max_prompt_length=2, filter_overlong_prompts=True)
    )
    assert (
        "all 2 prompts have more tokens than data.max_prompt_length=2; set data.max_prompt_length to at least 4"
        in said
    )


# Bad rows


@WRITERS
@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (row(prompt=None), "prompt=null: Input should be a valid list"),
        (row(prompt=""), "prompt=: String should have at least 1 character"),
        (row(prompt=[]), "prompt=[]: List should have at least 1 item"),
        (
            row(prompt=7),
            "prompt=7: Input should be a valid list; a prompt is a string, or a list of messages {role, content}",
        ),
        (
            row(prompt=["a"]),
            "prompt.0=a: Input should be a valid dictionary; a prompt is a string, or",
        ),
        (row(prompt=[{"content": "a"}]), "prompt.0.role: Field required"),
        (
            row(prompt=[{"role": "user", "content": None}]),
            "prompt.0.content=null: Input should be a valid string",
        ),
        (
            row(prompt=[{"role": "user", "content": [{"type": "image"}]}]),
            "prompt.0.content=[{type:image}]: Input should be a valid string",
        ),
        (
            row(data_source=...),
            "there is no built-in reward for data_source 'x'; set reward.functions to a rule",
        ),
        (row(data_source=3), "data_source=3: Input should be a valid string; it names the dataset"),
        (row(data_source=""), "data_source=: String should have at least 1 character"),
        (
            row(reward_model=...),
            "there is no ground truth, and the rule exact_match compares it with",
        ),
        (
            row(reward_model={"style": "rule"}),
            "there is no ground truth, and the rule exact_match compares it with",
        ),
        (row(reward_model="rule"), "reward_model=rule: Input should be a valid dictionary"),
        (row(extra_info=[1]), "extra_info=[1]: Input should be a valid dictionary"),
        (row(prompt="   "), "prompt has no tokens"),
        (
            row(images=["a.png"]),
            "has images, and only texts can be read; remove the column, or use other rows",
        ),
        (row(image={"path": "a.png"}), "has image, and only texts can be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_row_is_named_with_what_is_wrong_with_it(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    write: Write,
    ending: str,
    bad: dict[str, Any],
    expected: str,
) -> None:
    file = write(tmp_path / f"x.{ending}", bad)
    said = problem(lambda: prompts_of(tokenizer, file))
    assert said.startswith(f"{file}, {'line 1' if ending == 'jsonl' else 'row 0'}")
    assert expected in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": \n', "line 2: is not JSON"),
        ("[\n", "line 2: is not JSON"),
        ("3\n", "line 2: is a JSON int; write one object per line"),
        ("[" * 100_000 + "\n", "line 2: is nested too deeply; write one object per line"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: str, expected: str
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(), line)
    assert f"{file}, {expected}" in problem(lambda: prompts_of(tokenizer, file))


def test_bytes_that_are_not_utf8_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    assert f"{file}, line 1: is not JSON" in problem(lambda: prompts_of(tokenizer, str(file)))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            row(prompt="a \ud83d"),
            "prompt='a \\ud83d': Input should be a valid string, unable to parse",
        ),
        (row(letters="a \udc00"), "the chat template of"),
        (
            row(data_source="exact_match/\ud800"),
            "data_source='exact_match/\\ud800': Input should be",
        ),
    ],
)
def test_half_a_character_is_named_with_its_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, bad: dict[str, Any], expected: str
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(), bad)
    assert problem(lambda: prompts_of(tokenizer, file)).startswith(f"{file}, line 2: {expected}")


def test_a_whole_pair_of_escapes_is_a_character(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(letters="a \U0001f600"))
    assert "\\ud83d\\ude00" in Path(file).read_text()
    assert len(prompts_of(tokenizer, file)) == 1


@pytest.mark.parametrize("truth", ["seven", "nan", [7], "1,072", ""])
def test_a_ground_truth_that_its_rule_cannot_read_is_named_before_anything_is_generated(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, truth: Any
) -> None:
    bad = row(data_source="openai/gsm8k", reward_model={"ground_truth": truth})
    file = write_jsonl(tmp_path / "x.jsonl", row(), bad)
    said = problem(lambda: prompts_of(tokenizer, file))
    reason = f"the ground truth is {truth!r}; the rule gsm8k needs a number without commas"
    assert said == f"{file}, line 2: {reason}"
    assert len(prompts_of(tokenizer, file, needs_ground_truth=False)) == 2


def test_bad_rows_are_one_line_for_each_kind_of_problem(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    sums = [
        row(data_source="gsm8k", reward_model={"ground_truth": truth})
        for truth in ("seven", "eight", "nine")
    ]
    rows = [
        row(prompt=7),
        "{\n",
        row(prompt=8),
        *sums,
        row(),
        "[\n",
        row(prompt="  "),
        row(prompt=" "),
    ]
    file = write_jsonl(tmp_path / "x.jsonl", *rows)
    lines = problem(lambda: prompts_of(tokenizer, file)).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{file}, line {number}" for number in (1, 2, 4, 9)
    ]
    assert [line.rpartition(" (")[2] for line in lines] == [
        f"{n} of 10 rows have this problem)" for n in (2, 2, 3, 2)
    ]
    assert "the ground truth is 'seven'" in lines[2]


def test_rows_that_the_template_refuses_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write_jsonl(tmp_path / "x.jsonl", *[row()] * 3)
    (line,) = problem(lambda: prompts_of(tokenizer, file)).splitlines()
    assert line.startswith(f"{file}, line 1: the chat template of")
    assert line.endswith("(3 of 3 rows have this problem)")


def test_a_ground_truth_is_only_needed_where_a_rule_reads_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(reward_model=...))
    assert prompts_of(tokenizer, file, needs_ground_truth=False).take([0])["reward_model"][0] == {}


# Bad files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.jsonl", "is not a local file (looked in"),
        ("folder", "is not a local file (looked in"),
        ("table.csv", "prompts must be .parquet or .jsonl files, not '.csv'"),
        ("broken.parquet", "cannot be read ("),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_key(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, expected: str
) -> None:
    (tmp_path / "folder").mkdir()
    for other in ("table.csv", "broken.parquet"):
        (tmp_path / other).write_text("a,b", encoding="utf-8")
    path = str(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        prompts_of(tokenizer, path)
    assert str(caught.value).startswith(f"data.train_files={path}: ")
    assert expected in str(caught.value)


def test_remote_files_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    assert "is not a local file" in problem(lambda: prompts_of(tokenizer, "hdfs://x/train.parquet"))


def test_no_files_and_no_rows_are_errors(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert "data.train_files=[]: there are no rows" in problem(lambda: prompts_of(tokenizer))
    file = write_jsonl(tmp_path / "x.jsonl", "\n")
    assert "x.jsonl]: there are no rows; name .parquet" in problem(
        lambda: prompts_of(tokenizer, file)
    )


def test_a_parquet_file_with_none_of_the_columns_says_which_it_has(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_parquet(tmp_path / "x.parquet", {"question": "a", "answer": "b"})
    assert problem(lambda: prompts_of(tokenizer, file)).endswith(
        "there is no such column (columns: question, answer)"
    )


# Files that were not written for rolepool


@WRITERS
def test_two_columns_are_enough(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, write: Write, ending: str
) -> None:
    file = write(
        tmp_path / f"gsm8k.{ending}",
        {"question": "a b", "answer": "7"},
        {"question": "c", "answer": "8"},
    )
    columns = prompts_of(tokenizer, file, prompt_key="question", answer_key="answer").take([0, 1])
    assert columns["raw_prompt_ids"] == [[4, 5], [6]]
    assert columns["data_source"] == ["gsm8k", "gsm8k"]
    assert columns["reward_model"] == [{"ground_truth": "7"}, {"ground_truth": "8"}]
    assert columns["extra_info"] == [{}, {}]


def test_the_answer_key_replaces_the_ground_truth_and_must_exist(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row("a", final="b"), row("b", final=None), row("c"))
    assert prompts_of(tokenizer, file, answer_key="final", max_samples=1).take([0])[
        "reward_model"
    ] == [{"style": "rule", "ground_truth": "b"}]
    lines = problem(lambda: prompts_of(tokenizer, file, answer_key="final")).splitlines()
    assert lines[0].startswith(
        f"{file}, line 2: final is null, and the rule exact_match compares it with the response; "
        "write an answer, or remove such rows (columns: prompt"
    )
    assert lines[1].startswith(
        f"{file}, line 3: data.answer_key=final: there is no such column (columns: prompt, data"
    )
    two = prompts_of(tokenizer, file, answer_key="final", max_samples=2, needs_ground_truth=False)
    assert two.take([1])["reward_model"][0]["ground_truth"] is None


@WRITERS
def test_other_columns_reach_the_reward_function_and_extra_info_wins(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, write: Write, ending: str
) -> None:
    rows = [
        {**row("a"), "level": 3, "letters": "no", "tests": ["x"]},
        {**row("b"), "level": 4, "tests": []},
    ]
    file = write(tmp_path / f"x.{ending}", *rows)
    first, second = prompts_of(tokenizer, file).take([0, 1])["extra_info"]
    assert first == {"letters": "a", "level": 3, "tests": ["x"]}
    assert (second["level"], second["letters"]) == (4, "b")


def test_a_rule_can_be_chosen_for_rows_of_any_data_source(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(
        tmp_path / "x.jsonl", row(data_source=..., reward_model={"ground_truth": "1,072"})
    )
    config = load_config(overrides=[f"data.train_files={file}", "reward.functions=math"]).config
    assert PromptSet("train", config, tokenizer).take([0])["data_source"] == ["x"]
    config = load_config(
        overrides=[f"data.train_files={file}", "reward.functions=[math,gsm8k]"]
    ).config
    assert "the rule gsm8k needs a number" in problem(lambda: PromptSet("train", config, tokenizer))


def test_a_system_prompt_begins_every_chat_that_has_none(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = [{"role": "system", "content": "h"}, {"role": "user", "content": "c"}]
    file = write_jsonl(tmp_path / "x.jsonl", row("b"), row(prompt="b c"), row(prompt=own))
    prompts = prompts_of(tokenizer, file, system_prompt="a a")
    assert prompts.take([0, 1, 2])["raw_prompt_ids"] == [[4, 4, 5, 3], [4, 4, 5, 6, 3], [11, 6, 3]]


# Hugging Face datasets


def test_a_dataset_folder_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    datasets = pytest.importorskip("datasets")
    train, test = (
        datasets.Dataset.from_list([row(letters) for letters in split]) for split in ("abc", "de")
    )
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    (tmp_path / "files").mkdir()
    train.to_parquet(tmp_path / "files" / "train.parquet")
    test.to_parquet(tmp_path / "files" / "test.parquet")

    names = ["one:train", "both:test", "files:train", "files:test", "files:train[1:]"]
    prompts = prompts_of(tokenizer, *[f"hf:{tmp_path}/{name}" for name in names])
    letters = [info["letters"] for info in prompts.take(range(len(prompts)))["extra_info"]]
    assert "".join(letters) == "abc" + "de" + "abc" + "de" + "bc"
    assert prompts.take([4])["origin"] == [f"hf:{tmp_path}/both:test, row 1 (the first is 0)"]


def test_the_default_data_source_of_a_dataset_is_its_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "a b", "answer": "1 + 1 = 2\n#### 2"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "gsm8k")
    prompts = prompts_of(
        tokenizer, f"hf:{tmp_path}/gsm8k:train", prompt_key="question", answer_key="answer"
    )
    assert prompts.take([0])["data_source"] == ["gsm8k"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "hf:{folder}/one:test",
            "cannot be loaded (it has the splits train); check the name, the subset and",
        ),
        ("hf:{folder}/nowhere:train", "there is no such folder; name a dataset folder or org/name"),
        ("hf:{folder}/empty:train", "cannot be loaded ("),
        ("hf:{folder}/one", "write hf:NAME:SPLIT, such as hf:"),
        ("hf:nobody/nothing-like-this:train", "cannot be loaded ("),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, expected: str
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([row()]).save_to_disk(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    path = name.format(folder=tmp_path)
    said = problem(lambda: prompts_of(tokenizer, path))
    assert said.startswith(f"data.train_files={path}: {expected}")
    assert len(said.splitlines()) == 1


# From the config


def test_the_config_says_which_rows_of_which_files(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = load_config(
        overrides=[
            f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', row('a b c d'), row('b'), row('c'))}",
            f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', row('d'), row('e'))}",
            *(
                "data.max_prompt_length=3",
                "data.truncation=right",
                "data.train_max_samples=2",
                "data.val_max_samples=1",
            ),
        ]
    ).config
    train, val = PromptSet("train", config, tokenizer), PromptSet("val", config, tokenizer)
    assert train.take([0, 1])["raw_prompt_ids"] == [[4, 5, 6], [5, 3]]
    assert (len(train), len(val), val.take([0])["raw_prompt_ids"][0]) == (2, 1, [7, 3])


def test_a_data_source_without_a_rule_is_found_at_the_start(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", row(data_source="lighteval/MATH", reward_model=...))
    with pytest.raises(DataError, match="there is no ground truth, and the rule math compares it"):
        PromptSet("train", load_config(overrides=[f"data.train_files={file}"]).config, tokenizer)
    file = write_jsonl(tmp_path / "y.jsonl", row(data_source="hiyouga/geometry3k"))
    with pytest.raises(
        DataError, match="there is no built-in reward for data_source 'hiyouga/geometry3k'"
    ):
        PromptSet("train", load_config(overrides=[f"data.train_files={file}"]).config, tokenizer)
    overrides = [f"data.train_files={file}", "custom_reward_function.path=mine.py"]
    assert len(PromptSet("train", load_config(overrides=overrides).config, tokenizer)) == 1


# The tokenizer


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "padless")
    assert (
        load_tokenizer(PolicyModelConfig(path=str(tmp_path / "padless"))).pad_token_id
        == tokenizer.eos_token_id
    )


def test_a_column_of_texts_may_have_the_name_of_an_image(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", row(image="none", images=[]))
    assert len(prompts_of(tokenizer, file)) == 1


def test_the_tokenizer_may_be_in_another_folder_than_the_model(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    keys = PolicyModelConfig(path=str(tmp_path), tokenizer_path=str(tmp_path / "tokenizer"))
    assert load_tokenizer(keys).get_vocab() == tokenizer.get_vocab()
    (line,) = problem(
        lambda: load_tokenizer(keys.with_value("tokenizer_path", str(tmp_path)))
    ).splitlines()
    assert line.startswith(
        f"actor_rollout_ref.model.tokenizer_path={tmp_path}: no tokenizer can be loaded from there"
    )


def test_a_tokenizer_without_an_end_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    assert "has no end-of-sequence token" in problem(
        lambda: load_tokenizer(PolicyModelConfig(path=str(tmp_path / "endless")))
    )


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    said = problem(lambda: load_tokenizer(PolicyModelConfig(path=str(tmp_path))))
    assert said.startswith(
        f"actor_rollout_ref.model.path={tmp_path}: no tokenizer can be loaded from there"
    )
    assert len(said.splitlines()) == 1
