"""Plots are made of what logs say, and the CSV says the same."""

from __future__ import annotations

import csv
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.artist import Artist
from synthetic_runs import write_run

from rolepool.placement.roles import OPERATIONS
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import REWARD
from rolepool.report.operations import colors_for, in_step_order, mean_times
from rolepool.report.plots import (
    _overview,
    _small_multiples,
    grouped_bars,
    new_figure,
    plot_logs,
    style,
)

VERL_LOG = """\
(TaskRunner pid=7) Training Progress:   0%|          | 0/2 [00:00<?, ?it/s]
(TaskRunner pid=7) step:1 - timing_s/gen:np.float64(4.0) - timing_s/generate_sequences:3.9 - timing_s/adv:nan \
- timing_s/update_actor:2.0 - timing_s/step:6.5 - timing_per_token_ms/gen:0.5 - perf/throughput:120.0
(TaskRunner pid=7) step:2 - timing_s/gen:np.float64(5.0) - timing_s/update_actor:2.5 - timing_s/step:8.0
"""


def size_of_png(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_each_kind_of_plot_is_written_for_runs_that_have_its_numbers(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "one", num_steps=4),
        write_run(tmp_path / "two", "split", num_steps=3),
    ]
    written = plot_logs(runs, tmp_path / "out")
    names = {"overview", "timings", "time_per_token", "throughput", "memory", "comparison"}
    assert {file.name for file in written} == {f"{name}.png" for name in names} | {
        "timing_metrics.csv"
    }
    assert written[1].name == "overview.png"
    for file in written[1:]:
        width, height = size_of_png(file)
        assert width == 1350 and height > 300


def test_a_log_of_verl_gives_the_plots_it_has_numbers_for(tmp_path: Path) -> None:
    (tmp_path / "verl.log").write_text(VERL_LOG)
    written = plot_logs([tmp_path / "verl.log"], tmp_path / "out")
    assert {file.stem for file in written} == {
        *("timing_metrics", "overview", "timings", "time_per_token", "throughput")
    }


def test_the_csv_holds_the_parsed_numbers_exactly(tmp_path: Path) -> None:
    (tmp_path / "verl.log").write_text(VERL_LOG)
    folder = write_run(tmp_path / "one", num_steps=3)
    plot_logs([folder, tmp_path / "verl.log"], tmp_path / "out")
    with (tmp_path / "out" / "timing_metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    parsed = [
        (name, step, row)
        for name, metrics in read_logs([folder, tmp_path / "verl.log"]).items()
        for step, row in metrics.items()
    ]
    assert len(lines) == len(parsed) == 4 + 2
    for line, (name, step, row) in zip(lines, parsed, strict=True):
        numbers = {key: text for key, text in line.items() if key not in ("run", "step") and text}
        assert (line["run"], int(line["step"])) == (name, step)
        assert {key: repr(float(text)) for key, text in numbers.items()} == {
            key: repr(row[key]) for key in row
        }


def test_bars_are_as_high_as_the_means_and_labelled_with_the_ratio_to_the_first(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.log").write_text(
        "step:1 - timing_s/gen:1 - timing_s/step:4\nstep:2 - timing_s/gen:3 - timing_s/step:4"
    )
    (tmp_path / "b.log").write_text(
        "step:1 - timing_s/gen:5 - timing_s/step:2 - timing_s/generate_sequences:4"
    )
    logs = read_logs([tmp_path / "a.log", tmp_path / "b.log"])
    with style():
        axes = new_figure(3).subplots()
        grouped_bars(axes, {name: mean_times(metrics) for name, metrics in logs.items()})
    assert [bar.get_height() for bar in axes.patches] == [2.0, 4.0, 5.0, 2.0]  # type: ignore[attr-defined]
    assert [text.get_text() for text in axes.texts] == ["×2.50", "×0.50"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]  # type: ignore[union-attr]


def test_a_run_may_have_any_name_and_one_step_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a$b$ <c> [d]_{.log").write_text("step:5 - timing_s/gen:1 - timing_s/step:2")
    written = plot_logs([tmp_path / "a$b$ <c> [d]_{.log"], tmp_path / "out")
    assert {file.name for file in written} == {"timing_metrics.csv", "overview.png", "timings.png"}


def test_no_title_or_legend_is_cut_off_however_long_the_names_are(tmp_path: Path) -> None:
    pool = "a_pool_with_a_name_" * 5
    names = ["a_run_with_a_long_name_" * 4, "b" * 90]
    for name in names:
        row = f"timing_s/gen:1 - timing_s/step:2 - {REWARD}:0.5 - perf/throughput:9 - pool/{pool}/peak_memory_gb:1"
        (tmp_path / f"{name}.log").write_text(
            f"step:1 - {row} - pool/critic_pool/peak_memory_gb:2\n"
        )
    logs = read_logs([tmp_path / f"{name}.log" for name in names])
    memory = dict.fromkeys(sorted(key for key in logs[names[0]][1] if key.endswith("_gb")), "GiB")
    with style():
        for figure in (_overview(logs), _small_multiples(logs, memory)):
            assert figure is not None
            figure.draw_without_rendering()
            artists: list[Artist] = [axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
            artists += [
                *figure.legends,
                *(legend for axes in figure.axes if (legend := axes.get_legend())),
            ]
            for artist in artists:
                box = artist.get_window_extent()
                assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, artist


def test_panels_of_several_logs_have_the_same_time_axis_and_all_begin_at_zero(
    tmp_path: Path,
) -> None:
    for name, seconds in (("short", 1), ("long", 50)):
        (tmp_path / f"{name}.log").write_text(
            f"step:1 - timing_s/gen:{seconds} - timing_s/step:{seconds} - {REWARD}:0.5"
        )
    figure = _overview(read_logs([tmp_path / "short.log", tmp_path / "long.log"]))
    assert figure is not None
    limits = [axes.get_ylim() for axes in figure.axes]
    assert limits[1] == limits[2] and limits[1][1] > 50
    assert {low for low, _ in limits} == {0}


def test_the_script_is_the_command(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "verl.log").write_text(VERL_LOG)
    ended = python(
        "plot_timing_metrics.py", str(tmp_path / "verl.log"), "--output-dir", str(tmp_path / "out")
    )
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path / "out" / "overview.png") in ended.stdout.splitlines()


@pytest.mark.parametrize("arguments", [[], ["nothing.log"], ["--output-dir"]])
def test_a_wrong_command_line_is_answered_in_one_line(
    rolepool: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    code, out, err = rolepool("plot", *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1


# Colours


def test_operations_have_colours_of_their_own() -> None:
    assert len({operation.color for operation in OPERATIONS.values()}) == len(OPERATIONS)


def test_unknown_operations_come_last_and_have_a_colour_too() -> None:
    assert in_step_order(["zip", "update_actor", "gen", "archive"]) == [
        "gen",
        "update_actor",
        "archive",
        "zip",
    ]
    colors = colors_for(["archive", "gen", "zip"])
    assert colors["gen"] == OPERATIONS["gen"].color and colors["archive"] != colors["zip"]
