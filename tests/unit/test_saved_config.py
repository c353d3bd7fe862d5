"""The config.yaml of a run: every text in it is the same text when the run is read, and when the
file is used again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_runs import write_run

from rolepool.api import Run
from rolepool.api import load_config as load_in_python
from rolepool.cli import main
from rolepool.config import load_config
from rolepool.config.loading import PlainValues
from rolepool.config.saved import load_saved, saved_values
from rolepool.errors import ConfigError

PIECES = (
    "${",
    "\\",
    "}",
    "$",
    "{",
    "'",
    '"',
    "x",
    "oc.env:HOME",
    "1e3",
    "1_0",
    "???",
    "#",
    ":",
    " ",
    "\n",
    "~",
    "on",
)
TEXTS = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@settings(deadline=None)
@given(text=TEXTS)
def test_every_text_is_the_same_in_a_run_folder_and_in_a_config_file(
    folder: Path, text: str
) -> None:
    keys = {"trainer.experiment_name": text, "data.apply_chat_template_kwargs": {"some": [text]}}
    loaded = load_config([PlainValues(keys)])
    assert loaded.config.trainer.experiment_name == text
    file = folder / "config.yaml"
    file.write_text(loaded.to_yaml(), encoding="utf-8")
    assert load_saved(folder).config == loaded.config
    if text.strip("\\") != "???":  # in a config file, that is a value that is missing
        assert load_config([str(file)]).config == loaded.config


def test_an_escaped_reference_of_the_user_stays_text(folder: Path) -> None:
    loaded = load_config(
        [],
        [r"trainer.experiment_name=a \${x} b", "trainer.project_name=${trainer.experiment_name}"],
    )
    assert loaded.config.trainer.experiment_name == "a ${x} b"
    (folder / "config.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    for again in (
        load_saved(folder),
        load_config([str(folder / "config.yaml")]),
        load_in_python(loaded),
    ):
        assert again.config.trainer == loaded.config.trainer


def test_a_reference_in_a_run_folder_is_text() -> None:
    """An older version did not escape it."""
    assert saved_values(b"trainer: {experiment_name: '${oc.env:HOME}'}") == {
        "trainer": {"experiment_name": "${oc.env:HOME}"}
    }


BOMB = b"a: &a [1,1]\nb: &b [*a,*a]\nc: &c [*b,*b]\n"
BAD = {
    BOMB: "has YAML aliases",
    b"a: " + b"[" * 5000 + b"]" * 5000: "is nested more than",
    b"a: [" + b"1," * 20_000 + b"]": "has more than 10000 values",
    b"a: '" + b"x" * 2**20 + b"'": "has more than 1048576 bytes",
    b"- 1": "must contain keys and values",
    b"a: [": "not valid YAML",
    b"? [1]\n: 2": "not valid YAML",
    b"a: !!python/object/apply:os.getcwd []": "not valid YAML",
    b"a: \xff": "not valid YAML",
    b"a: !!int 0x": "not valid YAML",
    b"a: 2026-99-99": "not valid YAML",
    b"a: 2026-01-01": "not valid YAML",
    b"a: !!binary YQ==": "not valid YAML",
    b'a: ${a="x"}': "unknown key",
    b"'reward_model.x[a': {']': 1}": "unknown key",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_config_over_a_limit_is_one_line_that_names_the_file(tmp_path: Path, number: int) -> None:
    content, reason = list(BAD.items())[number]
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path)
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / 'config.yaml'}: ")
    assert reason in line
    assert "\n" not in line


def test_a_run_with_such_a_text_can_be_read_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(
        tmp_path / "run",
        num_steps=4,
        overrides=(r"trainer.experiment_name=\${x}", r"trainer.seed=3"),
    )
    assert Run(run).config.trainer.experiment_name == "${x}"
    assert main(["predict", str(run), "--", "split"]) == 0
    assert main(["report", str(run)]) == 0
    assert "${x}" in (run / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["move", str(run), "placement.strategy=split"]) == 2
    assert "does not train now" in capsys.readouterr().err, (
        "the config was read, and the run has ended"
    )
    assert (
        load_config([str(run / "config.yaml")], ["trainer.seed=4"]).config.trainer.experiment_name
        == "${x}"
    )
