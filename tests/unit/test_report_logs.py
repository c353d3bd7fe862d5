"""Console logs are read whoever wrote them and whatever stands between their lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from synthetic_runs import write_run

from rolepool.errors import ConfigError
from rolepool.metrics.row_text import console_line
from rolepool.report.console_logs import parse_log, read_logs
from rolepool.report.metrics_by_step import finite_values


def parse(text: str) -> list[dict[int, dict[str, float]]]:
    return parse_log(text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step:3 - timing_s/gen:1.5 - actor/lr:1e-06", {"timing_s/gen": 1.5, "actor/lr": 1e-06}),
        ("(TaskRunner pid=1234) step:3 - a/b:-0.25", {"a/b": -0.25}),
        ("(TaskRunner pid=1234, ip=10.0.0.7) step:3 - a/b:2", {"a/b": 2.0}),
        (
            "\x1b[36m(TaskRunner pid=99)\x1b[0m step:3 - a:\x1b[1m4.0\x1b[0m - b:5",
            {"a": 4.0, "b": 5.0},
        ),
        ("2026-01-02 03:04:05,678 INFO step:3 - a:1 - b:2", {"a": 1.0, "b": 2.0}),
        (
            "step:3 - a:np.float64(1.5) - b:np.int64(3) - c:numpy.float32(-2e-3)",
            {"a": 1.5, "b": 3.0, "c": -0.002},
        ),
        (
            "step:3 - a:tensor(1.5) - b:tensor(2., device='cuda:0') - c:array(.5)",
            {"a": 1.5, "b": 2.0, "c": 0.5},
        ),
        (
            "step:3 - a:inf - b:-inf - c:np.float64(inf)",
            {"a": math.inf, "b": -math.inf, "c": math.inf},
        ),
        (
            "step:3 - val-core/openai/gsm8k/reward/mean@1:0.75",
            {"val-core/openai/gsm8k/reward/mean@1": 0.75},
        ),
        ("step:3 - val/b:c:0.5", {"val/b:c": 0.5}),
        ("step:3 - a:None - b:[1, 2] - c:words - d:1 - e:", {"d": 1.0}),
        ("step:3 - a:1.5 (WorkerDict pid=7) loading - b:2", {"a": 1.5, "b": 2.0}),
        (
            "step:3 - training/global_step:3 - timing_s/step:9.5",
            {"training/global_step": 3.0, "timing_s/step": 9.5},
        ),
        ("Training:  30%|███       | 3/10 [00:05<00:12,  1.7s/it]step:3 - a:1", {"a": 1.0}),
        (
            "Training:  20%|██ | 2/10\rTraining:  30%|███ | 3/10\rstep:3 - a:1\rTraining:  40%|",
            {"a": 1.0},
        ),
        (
            "(main_task pid=9) step:3 - timing/gen:1.5 - my/timing/x:2",
            {"timing_s/gen": 1.5, "my/timing/x": 2.0},
        ),
        ("step:3 - a:1e", {}),
        ("step:3 - ", {}),
        ("step:3", {}),
        ("training/global_step:3 - a:1", {}),
        ("timing_s/step:3 - a:1", {}),
        ("epoch 3 - a:1", {}),
        ("at step:x - a:1", {}),
    ],
)
def test_a_line_gives_its_numbers_and_no_others(line: str, expected: dict[str, float]) -> None:
    assert parse(line) == ([{3: expected}] if expected else [])


def test_not_a_number_is_kept_and_left_out_of_values(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "step:1 - a:nan - b:1\nstep:2 - a:np.float64(nan) - b:2\nstep:3 - a:3\n"
    )
    metrics = read_logs([tmp_path / "a.log"])["a"]
    assert math.isnan(metrics[1]["a"]) and math.isnan(metrics[2]["a"])
    assert finite_values(metrics, "a") == {3: 3.0}
    assert finite_values(metrics, "b") == {1: 1.0, 2: 2.0}


def test_our_own_line_is_read_back() -> None:
    row = {
        "timing_s/step": 12.25,
        "critic/score/mean": -0.5,
        "actor/lr": 1e-6,
        "perf/total_num_tokens": 123456.0,
    }
    assert parse(console_line(7, row)) == [{7: row}]


def test_other_lines_in_between_do_not_matter() -> None:
    text = """\
    Setting up ... step: 1 of 3
    step:0 - val-core/demo/reward/mean:0.1
    (pid=12) UserWarning: a module returned a view - see step:notes
    \x1b[33mstep:1 - timing_s/gen:1.0 - timing_s/step:2.0\x1b[0m
    Traceback (most recent call last):
    {"step": 5, "a": 1}
    step:2 - timing_s/step:2.5
    """
    expected = {
        0: {"val-core/demo/reward/mean": 0.1},
        1: {"timing_s/gen": 1.0, "timing_s/step": 2.0},
        2: {"timing_s/step": 2.5},
    }
    assert parse(text) == [expected]


@pytest.mark.parametrize("width", [*range(40, 260, 7), 185])
def test_lines_that_a_terminal_has_cut_at_its_width_are_read(width: int) -> None:
    row = {
        "timing_s/gen": 1.5,
        "actor/lr": 1e-06,
        "timing_s/update_actor": 12.25,
        "timing_s/step": 14.125,
        "val/x": 0.5,
    }
    lines = []
    for step in (1, 2, 3):
        lines += [
            f"\x1b[36m(TaskRunner pid=7)\x1b[0m Training Progress: {step}0%|███ | {step}/10 [00:05<00:12, 1.7s/it]"
        ]
        lines += [
            f"(TaskRunner pid=7) {console_line(step, row)} - critic/score/mean:np.float64(0.25)",
            "Done",
        ]
    whole = [line.replace("\x1b[36m", "").replace("\x1b[0m", "") for line in lines]
    cut = [line[start : start + width] for line in whole for start in range(0, len(line), width)]
    assert parse("\n".join(cut)) == parse("\n".join(lines))
    assert parse("\n".join(lines))[0][2] == {**row, "critic/score/mean": 0.25}


# Several runs in one file


def test_a_step_number_that_goes_down_begins_a_new_run() -> None:
    assert parse("step:1 - a:1\nstep:2 - a:2\nstep:1 - a:3\nstep:2 - a:4") == [
        {1: {"a": 1.0}, 2: {"a": 2.0}},
        {1: {"a": 3.0}, 2: {"a": 4.0}},
    ]


def test_a_step_number_that_comes_again_begins_a_new_run() -> None:
    assert parse("step:1 - a:1\nstep:1 - a:2") == [{1: {"a": 1.0}}, {1: {"a": 2.0}}]


def test_a_validation_after_a_step_belongs_to_it() -> None:
    text = "step:4 - a:1\nstep:4 - val-core/x/mean:0.5 - timing_s/testing:2\nstep:5 - a:2"
    assert parse(text) == [
        {4: {"a": 1.0, "val-core/x/mean": 0.5, "timing_s/testing": 2.0}, 5: {"a": 2.0}}
    ]


def test_two_validations_of_the_same_step_are_two_runs() -> None:
    assert (
        len(parse("step:0 - val-core/x/mean:0.5\nstep:0 - val-core/x/mean:0.25\nstep:1 - a:1")) == 2
    )


def test_a_line_that_came_twice_is_one_line() -> None:
    assert parse("step:1 - a:1 - b:nan\n(pid=3) step:1 - a:1 - b:nan\nstep:2 - a:2").__len__() == 1


def test_a_run_begun_on_the_line_where_another_was_killed_is_seen() -> None:
    assert parse("step:8 - a:1\nstep:9 - a:1 - timing_s/(TaskRunner pid=5) step:1 - a:7") == [
        {8: {"a": 1.0}, 9: {"a": 1.0}},
        {1: {"a": 7.0}},
    ]


# Files and folders


def test_a_run_folder_stands_for_its_metrics_and_without_them_for_its_log(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", num_steps=4)
    metrics = read_logs([folder])["one"]
    (folder / "metrics.jsonl").unlink()
    rounded = read_logs([folder])["one"]
    assert list(metrics) == list(rounded) == [0, 1, 2, 3, 4]
    assert metrics[3].keys() == rounded[3].keys()
    assert all(
        math.isclose(metrics[3][name], rounded[3][name], rel_tol=1e-5) for name in metrics[3]
    )
    assert metrics[3] != rounded[3]


def test_lines_of_metrics_that_are_cut_off_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1}\n[2]\n{"a": 3}\n\n{"step": 2, "a": "x"}\n{"step": 3, "a"'
    )
    assert list(read_logs([tmp_path]).values()) == [{1: {"a": 1.0}}]


def test_names_tell_runs_and_files_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.log").write_text("step:1 - a:1\nstep:1 - a:2\n")
    (tmp_path / "y.log").write_text("step:1 - a:1\n")
    names = list(
        read_logs([tmp_path / "a" / "x.log", tmp_path / "b" / "x.log", tmp_path / "y.log"])
    )
    assert len(names) == 5
    assert names[4] == "y" and names[0] == f"{tmp_path / 'a' / 'x.log'}, run 1"


@pytest.mark.parametrize("name", ["nothing.log", "empty", "words.log"])
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.log").write_bytes(b"\xff\xfe only words\n")
    with pytest.raises(ConfigError) as refused:
        read_logs([tmp_path / name])
    assert len(refused.value.problems) == 1 and name in str(refused.value)
