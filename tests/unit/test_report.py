"""The page: what is on it, that nothing in a run can break it, and that it stays small."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import ACTOR, CRITIC, make_long_run, make_run
from synthetic_runs import write_run

from commands import Outcome
from rolepool.metrics.spans import Part, Recorded
from rolepool.report.curves import MAX_POINTS, MAX_SMALL_POINTS
from rolepool.report.page import page_data, render
from rolepool.report.page_timeline import MAX_LANES, MAX_SPANS
from rolepool.report.run import ReadRun

HOSTILE = "</script><script>window.broken=1</script><!--<img src=x onerror=alert(1)>\u2028'\"&${x}`"


def data_in(page: str) -> dict[str, Any]:
    (text,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', page, flags=re.DOTALL
    )
    return json.loads(text)  # type: ignore[no-any-return]


def make_hostile(run: ReadRun) -> ReadRun:
    """Text that would end a script wherever a user or a worker can write text."""
    spans = []
    for step, operation, span in run.spans:
        spans.append(
            Recorded(step, operation + HOSTILE, span._replace(parts=(Part(HOSTILE, 0.1),)))
        )
    config = {**run.config, "trainer": {**run.config["trainer"], "experiment_name": HOSTILE}}
    rows = {step: {**row, f"val-core/{HOSTILE}": 1.0} for step, row in run.metrics.items()}
    return replace(
        run, name=HOSTILE, spans=spans, config=config, metrics=rows, skipped={HOSTILE: 2}
    )


def test_the_command_writes_the_page_into_the_run_folder_and_names_it(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(tmp_path / "run", "split")
    assert rolepool("report", str(folder)) == (0, f"{folder}/report.html\n", "")
    data = data_in((folder / "report.html").read_text(encoding="utf-8"))
    assert data["name"] == "run"
    assert list(data["pools"]) == [ACTOR, CRITIC, "driver", "reward_cpu"]
    planned = data["plan"][ACTOR]
    assert (planned["roles"], planned["slots"]) == (["actor", "rollout", "ref"], [[0, 0], [0, 1]])
    assert ["data.train_batch_size", "64", "1024"] in data["config"]
    assert {chart["title"] for chart in data["curves"]} >= {"Reward", "Tokens per second and GPU"}
    assert not list(folder.glob(".tmp*"))


def test_the_page_can_be_written_elsewhere(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(tmp_path / "run")
    rolepool("report", str(folder), "-o", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").exists()
    assert not (folder / "report.html").exists()


def test_a_place_where_nothing_can_be_written_is_refused_in_one_line(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    code, _, err = rolepool("report", str(folder), "-o", str(tmp_path / "nowhere" / "page.html"))
    assert (code, err.count("\n")) == (2, 1)
    assert "No such file or directory" in err


@pytest.mark.parametrize("command", ["report", "watch", "trace"])
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, rolepool: Callable[..., Outcome], command: str
) -> None:
    code, out, err = rolepool(command, str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(tmp_path) in err


def test_the_trace_command_writes_a_trace(tmp_path: Path, rolepool: Callable[..., Outcome]) -> None:
    folder = write_run(tmp_path / "run")
    assert rolepool("trace", str(folder), "-o", str(tmp_path / "trace.json")).code == 0
    json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def test_no_text_of_a_run_can_leave_the_data(tmp_path: Path) -> None:
    plain, page = render(make_run()), render(make_hostile(make_run()))
    for opening in ("<script", "</script", "<!--", "<img"):
        assert page.count(opening) == plain.count(opening)
    data = data_in(page)
    assert data["name"] == HOSTILE
    assert f"update_actor{HOSTILE}" in data["operations"]
    assert data["skipped"] == [f"skipped 2 unreadable lines of {HOSTILE}"]
    assert any(
        HOSTILE.startswith(value.removesuffix("...")) or HOSTILE[:20] in value
        for _, value, _ in data["config"]
    )


def test_only_config_that_differs_is_shown_and_a_key_that_follows_another_does_not() -> None:
    overrides = (
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"data.train_files=[{'x' * 90}.jsonl]",
    )
    shown = {
        key: (value, default)
        for key, value, default in page_data(make_run(overrides=overrides))["config"]
    }
    assert shown.keys() == {
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "data.train_batch_size",
        "data.train_files",
        "placement.strategy",
        "trainer.n_gpus_per_node",
    }
    assert shown["placement.strategy"] == ("split", "standard")


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = render(make_run())
    assert not re.search(r"(src|href)=|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page
    assert [
        address
        for address in re.findall(r"https?://[^\s\"')]+", page)
        if "www.w3.org" not in address
    ] == []


def test_a_diverged_loss_is_no_number_on_the_page() -> None:
    run = make_run()
    diverged = {"actor/pg_loss": math.nan, "actor/ppo_kl": math.inf}
    run = replace(run, metrics={step: {**row, **diverged} for step, row in run.metrics.items()})
    curves = {chart["title"]: chart["series"][0] for chart in data_in(render(run))["curves"]}
    assert set(curves["Loss"]["mean"]) == set(curves["KL"]["max"]) == {None}


def test_unreadable_lines_are_skipped_and_said(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "spans.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "oper\nnonsense\n')
    assert rolepool("report", str(folder)).err == "skipped 2 unreadable lines of spans.jsonl\n"
    data = data_in((folder / "report.html").read_text(encoding="utf-8"))
    assert data["skipped"] == ["skipped 2 unreadable lines of spans.jsonl"]
    assert data["num_steps"] == 12


@pytest.mark.parametrize(
    "missing", ["spans.jsonl", "metrics.jsonl", "monitor.jsonl", "plan.json", "config.yaml"]
)
def test_a_page_is_made_of_what_is_there(
    tmp_path: Path, rolepool: Callable[..., Outcome], missing: str
) -> None:
    folder = write_run(tmp_path / "run", "split", num_steps=3)
    (folder / missing).unlink()
    assert rolepool("report", str(folder)).code == 0


def test_the_critical_path_adds_up_to_the_step_and_a_pools_time_too() -> None:
    data = page_data(make_run(late={("gen", 1): 1.0}))
    assert sum(seconds for *_, seconds in data["path"]) == pytest.approx(data["step_s"])
    for times_s in data["pools"].values():
        assert sum(seconds for *_, seconds in times_s) == pytest.approx(data["step_s"])


def test_a_span_on_the_timeline_is_whole_and_the_wait_before_it_named() -> None:
    data = page_data(make_run())
    windows = {window["why"]: window for window in data["windows"]}
    assert list(windows) == ["median", "slowest", "all"]  # the page opens on the first
    assert len(windows["median"]["starts"]) == 1
    window = windows["all"]
    assert [step for step, _ in window["starts"]] == [1, 2, 3, 4, 5, 6]
    lane = next(lane for lane in window["lanes"] if (lane["pool"], lane["rank"]) == (CRITIC, 1))
    first = lane["spans"][0]
    assert (data["operations"][first[0]], first[1:4]) == ("values", (1, 4.0, 1.0))
    assert lane["waits"][0] == ("data", ACTOR, "gen", 0.0, 4.0)


def test_utilization_and_memory_of_a_pool_come_from_the_monitor() -> None:
    run = make_run()
    assert page_data(run)["usage"] == []
    process = {
        "pid": 1,
        "pool": CRITIC,
        "rank": 0,
        "roles": [],
        "cpu_percent": 80.0,
        "memory_bytes": 2**31,
    }
    monitor = [
        {
            "time_s": 5.0,
            "node": "n",
            "gpus": [],
            "processes": [process, {**process, "cpu_percent": 40.0}],
        }
    ]
    used, memory = page_data(replace(run, monitor=monitor))["usage"]
    assert [(series["name"], series["x"], series["mean"]) for series in used["series"]] == [
        (CRITIC, [0.0], [60.0])
    ]
    assert memory["series"][0]["max"] == [2.0]


def check_bounds(run: ReadRun, page: str) -> dict[str, Any]:
    data = data_in(page)
    windows = data["windows"]
    assert (
        0 < sum(len(lane["spans"]) for window in windows for lane in window["lanes"]) <= MAX_SPANS
    )
    series = [series for chart in (*data["curves"], *data["usage"]) for series in chart["series"]]
    assert max(len(one["x"]) for one in (*series, *data["breakdown"]["series"])) <= MAX_POINTS
    assert max(len(one["mean"]) for one in data["metrics"]["charts"]) <= MAX_SMALL_POINTS
    assert len(page) < 2e6
    return data


def test_of_a_long_run_whole_steps_are_left_out_and_curves_keep_their_extremes() -> None:
    run = make_long_run(600)
    slow = [
        each if each.step <= 300 else each._replace(span=each.span.on_clock(-5.0))
        for each in run.spans
    ]
    rows = {**run.metrics, 77: {**run.metrics[77], "actor/pg_loss": 99.0}}
    data = check_bounds(run, render(replace(run, spans=slow, metrics=rows)))
    steps = {window["why"]: [step for step, _ in window["starts"]] for window in data["windows"]}
    assert list(steps) == ["median", "slowest", "first", "last"]
    assert (steps["first"][0], steps["slowest"], steps["last"][-1]) == (1, [300], 600)
    assert sum(map(len, steps.values())) < data["num_steps"] == 600
    (loss,) = next(chart for chart in data["curves"] if chart["title"] == "Loss")["series"]
    assert max(loss["max"]) == 99.0


def test_lanes_are_left_out_when_one_step_has_too_many_spans() -> None:
    run = make_run(num_steps=2)
    num_lanes = len({(recorded.span.pool, recorded.span.rank) for recorded in run.spans})
    num_ranks = MAX_SPANS // 4  # there are at least four spans of each rank in a step
    spans = list(run.spans)
    for recorded in run.spans:
        if (recorded.span.pool, recorded.span.rank) == ("critic_pool", 0):
            for rank in range(2, num_ranks):
                spans.append(recorded._replace(span=recorded.span._replace(rank=rank)))
    windows = page_data(replace(run, spans=spans))["windows"]
    num_hidden = num_lanes + num_ranks - 2 - MAX_LANES
    assert [(window["why"], len(window["starts"]), window["num_hidden"]) for window in windows] == [
        ("median", 1, num_hidden)
    ]


@pytest.mark.slow
def test_ten_thousand_steps_of_sixteen_ranks_make_a_small_page_in_a_minute() -> None:
    run = make_long_run()
    start = time.monotonic()
    page = render(run)
    assert time.monotonic() - start < 60
    check_bounds(run, page)
