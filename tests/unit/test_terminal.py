"""What data, models and users write is shown as text: it cannot control the terminal or a
spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import write_run

from commands import Outcome
from rolepool.command_line import run_program
from rolepool.errors import DataError, printable
from rolepool.report.plots import plot_logs
from rolepool.terminal import Terminal
from rolepool.trainer.console import TrainingConsole

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e[red]x[/nothing]"
SHOWN = "\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\u202e[red]x[/nothing]"


def assert_inert(output: str) -> None:
    assert printable(output) == output, repr(output)


@pytest.mark.parametrize(
    "text", ["", "plain", "two\nlines\tand a tab", "数学\u3000题", "naïve 🙂", "\xa0"]
)
def test_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a\r\ud83d\u2028\x00") == "a\\r\\ud83d\\u2028\\x00"


def test_an_error_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: list[str]) -> None:
        raise DataError(f"train.jsonl, line 1: ValueError: {HOSTILE}")

    assert run_program(fail, []) == 2
    assert capsys.readouterr().err == f"error: train.jsonl, line 1: ValueError: {SHOWN}\n"


def test_the_lines_and_samples_of_a_run_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console = TrainingConsole(["verl", "console"])
    console.on_notice(HOSTILE)
    console.on_row(3, {f"val-core/{HOSTILE}/reward/mean@1": 0.5})
    sample = dict.fromkeys(("question", "response", "ground_truth"), HOSTILE)
    console.on_samples(3, [{**sample, "score": 1.0}])
    console.print_summary(Path(f"runs/{HOSTILE}"))
    output = capsys.readouterr().out
    assert_inert(output)
    assert output.count("\\x1b[2J") == 6
    rows = [line for line in output.splitlines() if line[:1] in "┏┃┡│└"]
    assert len({*map(len, rows)}) == 1, "the table is not skewed"


def test_colours_of_our_own_still_reach_a_terminal() -> None:
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, color_system="standard", width=99).print(
        HOSTILE, style="red"
    )
    without_bell = SHOWN.replace("\\x07", "")  # rich removes it
    assert file.getvalue() == f"\x1b[31m{without_bell}\x1b[0m\n"


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run whose folder and whose metrics have such names."""
    folder = write_run(tmp_path / "run", "split")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {**row, f"val-core/{HOSTILE}/reward/mean@1": 0.5, '=HYPERLINK("x")': -1.0} for row in rows
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder.rename(tmp_path / "=run \x1b[2J[red]")


def test_watch_and_compare_are_escaped(
    hostile_run: Path, tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    other = Path(shutil.copytree(hostile_run, tmp_path / "other"))
    compare = ["compare", str(hostile_run), str(other), "--output-dir", str(tmp_path / "c")]
    for arguments in (["watch", str(hostile_run), "--once"], compare):
        code, out, err = rolepool(*arguments)
        assert code == 0, err
        assert_inert(out)
        assert_inert(err)
        assert "\\x1b[2J[red]" in out


def test_no_cell_of_a_csv_file_is_a_formula(hostile_run: Path, tmp_path: Path) -> None:
    with plot_logs([hostile_run], tmp_path / "plots")[0].open(newline="") as file:
        header, *rows = csv.reader(file)
    assert '\'=HYPERLINK("x")' in header
    assert not [name for name in header if name.startswith(("=", "+", "-", "@"))]
    assert rows and all(row[0].startswith("'=run ") for row in rows)
    assert rows[0][header.index('\'=HYPERLINK("x")')] == "-1.0", "a number stays a number"
