"""A run that changed its placement while it trained: what is written about it, and how it is
shown."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from report_runs import ACTOR, CRITIC, make_run
from synthetic_runs import MOVE_S, write_run
from test_report import HOSTILE, data_in
from test_serve import serving

import rolepool as rp
from commands import Outcome
from rolepool.config import load_config
from rolepool.metrics.run_folder import RunFolder, State
from rolepool.metrics.run_rows import last_step
from rolepool.metrics.spans import step_bounds
from rolepool.placement import Plan
from rolepool.report.compare import compare, headline, read_runs
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import finite_values
from rolepool.report.page import page_data, render
from rolepool.report.run import ReadRun, parts_of, read_run
from rolepool.report.watch import WatchedRun
from rolepool.terminal import Terminal
from rolepool.trainer.paper import schedule_of

GLOBAL_WORDS, SPLIT_WORDS = "global_pool [4]", f"{ACTOR} [2] and {CRITIC} [2]"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one pool, then two pools from step 8 on, then one pool again from step 15 on."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    return write_run(folder, num_steps=21, moves={8: "split", 15: "standard"})


@pytest.fixture(scope="module")
def plans(moved: Path) -> list[Plan]:
    """One pool; two pools."""
    return [planned.plan for planned in read_run(moved).plans[:2]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def copy_until(moved: Path, folder: Path, step: int) -> Path:
    """The run as it was after this step. Its plan.json has only the first plan."""
    folder.mkdir()
    shutil.copy(moved / "config.yaml", folder)
    for name in ("metrics.jsonl", "spans.jsonl"):
        lines = (moved / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text(
            "".join(line for line in lines if json.loads(line)["step"] <= step)
        )
    RunFolder(folder).add_plan(1, read_run(moved).plans[0].plan)
    return folder


def history_in(folder: RunFolder) -> list[tuple[int, Plan]]:
    document = json.loads((folder.path / "plan.json").read_text(encoding="utf-8"))
    return [
        (entry["first_step"], Plan.model_validate(entry["plan"])) for entry in document["plans"]
    ]


def text_of(watched: WatchedRun) -> str:
    output = io.StringIO()
    Terminal(width=200, file=output).print(watched.frame())
    return output.getvalue()


# What is written


def test_plan_json_has_each_plan_with_its_first_step(folder: RunFolder, plans: list[Plan]) -> None:
    one, two = plans
    for first_step, plan in ((1, one), (8, two), (15, one)):
        folder.add_plan(first_step, plan)
    assert history_in(folder) == [(1, one), (8, two), (15, one)]
    assert [path.name for path in folder.path.iterdir()] == ["plan.json"], (
        "nothing temporary is left"
    )


def test_a_resumed_run_drops_the_plans_of_steps_that_it_repeats(
    folder: RunFolder, plans: list[Plan]
) -> None:
    one, two = plans
    for first_step, plan in ((1, one), (8, two), (15, one)):
        folder.add_plan(first_step, plan)
    folder.add_plan(11, two)
    assert history_in(folder) == [(1, one), (8, two)], "the plan of step 11 has not changed"
    folder.add_plan(8, one)
    assert history_in(folder) == [(1, one)]
    folder.add_plan(5, two)
    assert history_in(folder) == [(1, one), (5, two)]


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "{}", '{"plans": []}', '{"plans": [{"first_step": 1}]}']
)
def test_a_damaged_plan_json_is_replaced(
    folder: RunFolder, plans: list[Plan], text: str | None
) -> None:
    if text is not None:
        folder.write("plan.json", text)
        folder.add_metrics(1, {"a": 1.0})
        assert read_run(folder.path).unread.keys() == {"plan.json"}
    folder.add_plan(8, plans[1])
    assert history_in(folder) == [(8, plans[1])]


def test_plan_json_has_the_schedule_of_each_plan_and_of_the_last_one_the_newest(
    folder: RunFolder, plans: list[Plan]
) -> None:
    config = load_config([], ["trainer.n_gpus_per_node=4"]).config
    once, twice = (schedule_of(config.with_value("critic.ppo_epochs", number)) for number in (1, 2))
    folder.add_plan(1, plans[0])
    folder.add_plan(4, plans[1], once)
    folder.add_metrics(1, {"a": 1.0})
    assert [planned.schedule for planned in read_run(folder.path).plans] == [None, once]
    folder.add_plan(6, plans[1], twice)  # resumed with the same placement, and two epochs
    assert [(one.first_step, one.schedule) for one in read_run(folder.path).plans] == [
        (1, None),
        (4, twice),
    ]


def test_a_move_is_a_row_without_numbers(moved: Path) -> None:
    rows = [
        json.loads(line)
        for line in (moved / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    what = f"{GLOBAL_WORDS} -> {SPLIT_WORDS}"
    move = {"what": what, "after_step": 7, "seconds": MOVE_S, "pools": [ACTOR, CRITIC]}
    assert next(row for row in rows if "move" in row) == {"step": 8, "move": move}
    run = read_run(moved)
    assert run.notes == []
    assert run.events[0][:4] == ("move", 8, what, MOVE_S)
    assert run.event_counts == {"moves": 2}
    assert list(run.metrics) == list(range(22))


def test_a_move_does_not_count_as_a_step(folder: RunFolder) -> None:
    folder.add_metrics(7, {"a": 1.0})
    folder.add_event("move", 8, "a -> b", 1.0, ["b"], after_step=7)
    assert last_step(folder.path) == 7


def test_a_move_that_a_resumed_run_has_undone_goes_aside_and_a_restart_stays(
    folder: RunFolder,
) -> None:
    for step in range(1, 7):
        folder.add_metrics(step, {"a": 1.0})
        if step == 3:
            folder.add_event("move", 4, "a -> b", 1.0, ["b"], after_step=3)
            folder.add_event("restart", 4, "driver, killed by signal 9", 1.0, repeated_from_step=3)
    aside = folder.begin(after_step=2)
    assert aside is not None
    assert [event.kind for event in read_run(folder.path).events] == ["restart"]
    assert [event.kind for event in read_run(aside).events] == ["move"]


# Reading it


def test_a_run_without_moves_is_its_only_part(tmp_path: Path) -> None:
    run = make_run()
    assert parts_of(run)[0] is run and len(parts_of(run)) == 1
    never_planned = ReadRun(tmp_path, "run", {}, [], [], {}, [], {})
    assert parts_of(never_planned) == [never_planned]


def test_each_part_has_only_its_own_steps_pools_and_samples(moved: Path, plans: list[Plan]) -> None:
    run = read_run(moved)
    parts = parts_of(run)
    assert run.plan == plans[0]
    assert [part.plan for part in parts] == [plans[0], plans[1], plans[0]]
    assert [part.name for part in parts] == [
        "run (steps 1 to 7)",
        "run (steps 8 to 14)",
        "run (steps 15 to 21)",
    ]
    assert [[*part.metrics] for part in parts] == [[*range(8)], [*range(8, 15)], [*range(15, 22)]]
    for part, steps in zip(parts, (range(1, 8), range(8, 15), range(15, 22)), strict=True):
        assert {recorded.step for recorded in part.spans} == {*steps}
        assert part.plan is not None
        pools = {*part.plan.pools}
        assert {recorded.span.pool for recorded in part.spans} == pools | {"driver", "reward_cpu"}
        assert {
            process["pool"] for sample in part.monitor for process in sample["processes"]
        } == pools
    starts_s = [step_bounds(run.spans)[step][0] for step in (8, 15)]
    during = [
        one
        for one in run.monitor
        if any(start_s - MOVE_S < one["time_s"] < start_s for start_s in starts_s)
    ]
    assert during and not any(sample in part.monitor for part in parts for sample in during)


def test_the_api_gives_the_newest_plan(moved: Path, tmp_path: Path, plans: list[Plan]) -> None:
    assert rp.Run(moved).plan.plan == plans[0]
    shutil.copytree(moved, tmp_path / "run")
    RunFolder(tmp_path / "run").add_plan(20, plans[1])
    assert rp.Run(tmp_path / "run").plan.plan == plans[1]


# Comparing


def test_a_run_that_moved_is_compared_as_one_run_for_each_placement(
    moved: Path, tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", "split", num_steps=9)
    runs = read_runs([other, moved])
    assert list(runs) == [
        "other",
        "run (steps 1 to 7)",
        "run (steps 8 to 14)",
        "run (steps 15 to 21)",
    ]
    lines = compare(runs)
    busy = {(line.measure, line.run) for line in lines if line.measure.endswith("/busy_fraction")}
    assert busy == {
        *(
            (f"pool/{pool}/busy_fraction", name)
            for pool in (ACTOR, CRITIC)
            for name in ("other", "run (steps 8 to 14)")
        ),
        *(
            ("pool/global_pool/busy_fraction", name)
            for name in ("run (steps 1 to 7)", "run (steps 15 to 21)")
        ),
    }
    (shown_s,) = [
        line.mean for line in lines if line[:2] == ("timing_s/step", "run (steps 8 to 14)")
    ]
    times_s = finite_values(read_run(moved).metrics, "timing_s/step")
    assert shown_s == pytest.approx(fmean(times_s[step] for step in range(9, 15)))


def test_one_run_that_moved_can_be_compared_with_itself(
    moved: Path, tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    code, out, err = rolepool("compare", str(moved), "--output-dir", str(tmp_path))
    assert (code, err) == (0, "")
    sentence = (
        r"compared with run \(steps 1 to 7\): run \(steps 8 to 14\) is 1\.\d\dx slower \(1\.\d\d to 1\.\d\d\), "
        r".*run \(steps 15 to 21\).*"
    )
    assert re.fullmatch(sentence, out.splitlines()[0])
    assert "run (steps 15 to 21)" in (tmp_path / "comparison.html").read_text(encoding="utf-8")


def test_a_placement_without_a_step_yet_is_not_compared(moved: Path, tmp_path: Path) -> None:
    folder = copy_until(moved, tmp_path / "run", 7)
    RunFolder(folder).add_plan(8, read_run(moved).plans[1].plan)
    runs = read_runs([folder, moved])
    assert [name for name in runs if str(folder) in name] == [f"{folder} (steps 1 to 7)"]
    assert (
        len(headline(runs, compare(runs)).split(", ")) == 3
    )  # one for each of the other run's placements


def test_plots_show_each_placement_as_a_line_of_its_own(moved: Path) -> None:
    logs = read_logs([moved])
    assert list(logs) == ["run (steps 1 to 7)", "run (steps 8 to 14)", "run (steps 15 to 21)"]
    assert sum(map(len, logs.values())) == 22


# The page


def test_the_page_is_about_the_last_placement_and_curves_show_all_steps(
    moved: Path, tmp_path: Path
) -> None:
    folder = copy_until(moved, tmp_path / "run", 14)
    RunFolder(folder).add_plan(8, read_run(moved).plans[1].plan)
    data = data_in(render(read_run(folder)))
    assert data["pools"].keys() == {ACTOR, CRITIC, "driver", "reward_cpu"}
    assert data["plan"].keys() == {ACTOR, CRITIC}
    assert data["num_steps"] == 7
    assert {lane["pool"] for window in data["windows"] for lane in window["lanes"]} == data[
        "pools"
    ].keys()
    assert {step for window in data["windows"] for step, _ in window["starts"]} == {*range(8, 15)}
    (reward,) = [chart["series"][0] for chart in data["curves"] if chart["title"] == "Reward"]
    assert reward["x"] == list(range(1, 15))
    assert data["breakdown"]["series"][0]["x"] == list(range(1, 15))
    first, last = data["placements"]
    assert (first["first_step"], first["pools"]) == (1, GLOBAL_WORDS)
    assert (last["first_step"], last["pools"]) == (8, SPLIT_WORDS)
    times_s = finite_values(read_run(folder).metrics, "timing_s/step")
    assert last["step_s"] == pytest.approx(fmean(times_s[step] for step in range(9, 15)), rel=1e-4)
    (move,) = data["events"]
    assert (move["kind"], move["step"], move["seconds"]) == ("move", 8, MOVE_S)


def test_the_findings_are_those_of_a_run_that_always_had_the_last_placement(moved: Path) -> None:
    run = read_run(moved)
    whole, last = page_data(run), page_data(parts_of(run)[-1])
    assert whole["findings"] == last["findings"]
    assert whole["predicted"] == last["predicted"]
    assert next(pools for pools, *_ in whole["predicted"]) == "global_pool [4]"


def test_a_page_is_made_right_after_a_move(moved: Path, tmp_path: Path) -> None:
    folder = copy_until(moved, tmp_path / "run", 7)
    RunFolder(folder).add_plan(8, read_run(moved).plans[1].plan)
    data = data_in(render(read_run(folder)))
    assert (data["num_steps"], data["findings"], data["windows"]) == (0, [], [])
    assert [placement["step_s"] is None for placement in data["placements"]] == [False, True]


def test_texts_about_moves_cannot_leave_the_data(folder: RunFolder, plans: list[Plan]) -> None:
    roles = dict.fromkeys(plans[1].roles, HOSTILE)
    hostile = plans[1].model_copy(
        update={"pools": {HOSTILE: plans[1].pools[ACTOR]}, "roles": roles}
    )
    folder.add_plan(1, plans[0])
    folder.add_plan(2, hostile)
    folder.add_metrics(1, {"timing_s/step": 1.0})
    plain = render(read_run(folder.path))
    folder.add_event("move", 2, HOSTILE, 1.0, [HOSTILE], after_step=1)
    page = render(read_run(folder.path))
    for opening in ("<script", "</script", "<!--", "<img"):
        assert page.count(opening) == plain.count(opening)
    assert data_in(page)["placements"][1]["pools"] == f"{HOSTILE} [2]"
    assert data_in(page)["events"][0]["what"] == HOSTILE


# The terminal and the list of runs


def test_watch_counts_moves_and_shows_the_lanes_of_the_current_pools(
    moved: Path, tmp_path: Path
) -> None:
    folder = copy_until(moved, tmp_path / "run", 7)
    shown = text_of(WatchedRun(folder))
    assert "moves" not in shown
    assert re.search(r"^global_pool, busy", shown, re.M)
    RunFolder(folder).add_plan(8, read_run(moved).plans[1].plan)
    shown = text_of(WatchedRun(folder))
    assert "moves: 1" in shown
    assert "global_pool" not in shown, "no step with the new pools is recorded yet"
    for name in ("metrics.jsonl", "spans.jsonl"):
        later = [
            line
            for line in (moved / name).open(encoding="utf-8")
            if json.loads(line)["step"] in (8, 9)
        ]
        with (folder / name).open("a", encoding="utf-8") as file:
            file.writelines(later)
    shown = text_of(WatchedRun(folder))
    assert "step 9, the last one recorded" in shown
    assert re.search(rf"^{ACTOR}, busy", shown, re.M) and re.search(
        rf"^{CRITIC}, busy", shown, re.M
    )
    assert "global_pool" not in shown
    times_s = finite_values(read_run(folder).metrics, "timing_s/step")
    assert f"{times_s[9]:.3g} s per step" in shown


def test_watch_shows_the_first_step_while_it_runs(moved: Path, tmp_path: Path) -> None:
    folder = copy_until(moved, tmp_path / "run", 0)
    now_s = time.time()
    state = State(now_s, "step 1", now_s - 4, {"global_pool": [("gen", now_s - 4, None)]})
    (folder / "state.json").write_text(json.dumps(state._asdict()), encoding="utf-8")
    assert "global_pool: gen for 4" in text_of(WatchedRun(folder))


def test_names_of_pools_are_escaped_in_the_terminal(folder: RunFolder, plans: list[Plan]) -> None:
    name = "pool\x1b[2J[bold]"
    folder.add_plan(1, plans[0])
    roles = dict.fromkeys(plans[1].roles, name)
    folder.add_plan(
        2, plans[1].model_copy(update={"pools": {name: plans[1].pools[ACTOR]}, "roles": roles})
    )
    folder.add_metrics(1, {"timing_s/step": 10.0})
    now_s = time.time()
    state = State(now_s, "step 2", now_s - 4, {name: [("gen", now_s - 4, None)]})
    folder.write("state.json", json.dumps(state._asdict()))
    shown = text_of(WatchedRun(folder.path))
    assert "\x1b[2J" not in shown
    assert "[bold]: gen for 4" in shown


def test_the_list_of_runs_counts_moves_and_shows_the_newest_pools(
    moved: Path, tmp_path: Path
) -> None:
    folder = copy_until(moved, tmp_path / "run", 14)
    RunFolder(folder).add_plan(8, read_run(moved).plans[1].plan)
    with serving(tmp_path) as client:
        row = client.row("run")
        assert " moves: 1 " in row
        assert " 2 pools, 4 GPUs " in row
        times_s = sorted(
            list(finite_values(read_run(folder).metrics, "timing_s/step").values())[7:]
        )
        assert row.endswith(f"{times_s[3]:.3g} s per step")
        assert ", moves: 1" in client.get("/report?run=run").text
