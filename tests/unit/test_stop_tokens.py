"""Which tokens end a response: all those that the files of a model name, and those of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolepool.config import Config, load_config
from rolepool.config.stop_tokens import read_stop_tokens
from rolepool.data.demo import make_demo
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems, find_warnings
from rolepool.trainer.build import stop_tokens_of

GEMMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
)
TOKENS = {"<pad>": 0, "<eos>": 1, "<end_of_turn>": 106, "<|eom_id|>": 128008}
KEY = "actor_rollout_ref.rollout.stop_token_ids"


def model(folder: Path, **files: Any) -> Path:
    """A model folder with these files; a keyword `a_b` is the file a_b.json."""
    folder.mkdir(exist_ok=True)
    added = [{"id": number, "content": text} for text, number in TOKENS.items()]
    settings = {"eos_token": "<eos>", "chat_template": GEMMA_LIKE}
    shape = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    shape |= {"vocab_size": 200_000, "eos_token_id": 1}
    all_files = {
        "config": shape,
        "tokenizer": {"added_tokens": added},
        "tokenizer_config": settings,
        **files,
    }
    for name, content in all_files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def config_of(folder: Path, *words: str) -> Config:
    return load_config(
        [], [f"actor_rollout_ref.model.path={folder}", "trainer.n_gpus_per_node=1", *words]
    ).config


def warnings_of(config: Config) -> list[str]:
    return [
        line for line in find_warnings(config, build_plan(config), on_cpus=False) if "turn" in line
    ]


@pytest.mark.parametrize(
    ("generation", "words", "expected"),
    [
        ({}, (), "<eos> (1)"),
        ({"eos_token_id": 106}, (), "<eos> (1), <end_of_turn> (106)"),
        (
            {"eos_token_id": [128008, 1, 106]},
            (),
            "<eos> (1), <|eom_id|> (128008), <end_of_turn> (106)",
        ),
        ({"eos_token_id": None}, (f"{KEY}=[106,7]",), "<eos> (1), <end_of_turn> (106), 7"),
    ],
)
def test_the_end_tokens_of_all_files_and_of_the_user_are_used_and_shown_by_name(
    generation: dict[str, Any], words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    config = config_of(model(tmp_path / "model", generation_config=generation), *words)
    assert read_stop_tokens(config).in_words() == expected


def test_what_the_config_file_does_not_say_is_not_assumed(tmp_path: Path) -> None:
    """The class of Llama in transformers has 2 as its end token if config.json has none."""
    folder = model(
        tmp_path / "model", config={"model_type": "llama", "vocab_size": 9}, tokenizer_config={}
    )
    assert read_stop_tokens(config_of(folder)).ids == ()


def test_a_template_whose_end_of_turn_ends_no_response_is_warned_of(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (warning,) = warnings_of(config_of(folder))
    assert warning == (
        "the chat template ends a turn with <end_of_turn>, which does not end a response: its responses run past the "
        f"end of a turn; set {KEY}=[106]"
    )
    assert warnings_of(config_of(folder, f"{KEY}=[106]")) == []
    assert warnings_of(config_of(folder, "actor_rollout_ref.rollout.ignore_eos=true")) == []
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}', encoding="utf-8")
    assert warnings_of(config_of(folder)) == []


def test_the_template_may_be_a_file_of_its_own_and_end_turns_with_plain_text(
    tmp_path: Path,
) -> None:
    folder = model(tmp_path / "model")
    template = "{% for message in messages %}{{ message.content }}\n\n### Next{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (warning,) = warnings_of(config_of(folder))
    assert "ends a turn with '### Next', which does not end a response" in warning


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].content }}", "text"]
)
def test_a_template_that_cannot_be_tried_gives_no_warning(template: str, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<eos>"}, "chat_template": template}
    config = config_of(model(tmp_path / "model", tokenizer_config=settings))
    assert warnings_of(config) == []
    assert read_stop_tokens(config).ids == (1,)


def test_texts_that_end_a_response_elsewhere_are_reported(tmp_path: Path) -> None:
    generation = {"eos_token_id": 106, "stop_strings": ["User:"]}
    (warning,) = read_stop_tokens(
        config_of(model(tmp_path / "model", generation_config=generation))
    ).warnings()
    assert "stop_strings ('User:'), which are not used" in warning


@pytest.mark.parametrize("wrong", ["x", [1, None], -1, 1.5, True])
def test_an_end_token_that_is_none_is_one_line_with_its_file(wrong: Any, tmp_path: Path) -> None:
    config = config_of(model(tmp_path / "model", generation_config={"eos_token_id": wrong}))
    with pytest.raises(
        ConfigError, match=r"^generation_config.json: eos_token_id=.* must be a number of a token"
    ):
        read_stop_tokens(config)
    assert any(
        "generation_config.json" in line for line in find_problems(config, build_plan(config))
    )


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    config = config_of(model(tmp_path / "model"), f"{KEY}=[106,200000]")
    problems = [line for line in find_problems(config, build_plan(config)) if KEY in line]
    assert problems == [
        f"{KEY}=[106,200000]: the model has 200000 tokens, numbered from 0; remove [200000]"
    ]


def test_training_uses_the_same_tokens_as_the_plan_shows(tmp_path: Path) -> None:
    config = config_of(make_demo(tmp_path / "demo").model, f"{KEY}=[5]")
    assert stop_tokens_of(config, load_tokenizer(config.actor_rollout_ref.model)) == (1, 5)
    assert read_stop_tokens(config).ids == (1, 5)
