"""The terminal view of a run, while it is written and after."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from synthetic_runs import write_run

from commands import Outcome
from rolepool.metrics.run_folder import RunFolder, State
from rolepool.metrics.run_rows import last_lines
from rolepool.report.watch import LAST_STEPS, WatchedRun, lane


def text_of(watched: WatchedRun) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(watched.frame())
    return console.export_text()


def test_one_frame_shows_pools_operations_busy_time_reward_and_time_left(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(tmp_path / "run", "split", overrides=("trainer.total_training_steps=20",))
    code, out, err = rolepool("watch", str(folder), "--once")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    row = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-2])
    assert lines[0].startswith(
        f"run: step 12 of 20, {row['timing_s/step']:.3g} s per step, about 0:01:0"
    )
    assert lines[1].startswith("step 12, the last one recorded; a line is ")
    lane_of = {line.split(",")[0]: after for line, after in itertools.pairwise(lines)}
    assert re.fullmatch(
        r" gen=+ old_\w+ ref=+ update_actor=+ u *", lane_of["actor_rollout_ref_pool"]
    )
    assert re.fullmatch(r" \.+ values? \.+ update_critic=+ *", lane_of["critic_pool"])
    assert re.search(r"^critic_pool, busy \d+%, use \d+%, \d\.\d GiB *$", out, re.M)
    assert lines[-1].startswith("reward ▂▃")
    assert lines[-1].endswith("0.167 -> 0.706")
    assert max(map(len, lines)) <= 80


def test_the_number_of_restarts_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "restarts" not in text_of(WatchedRun(folder))
    RunFolder(folder).add_event(
        "restart", 3, "driver, killed by signal 9", 9.0, repeated_from_step=2
    )
    assert ", restarts: 1" in text_of(WatchedRun(folder))


def write_state(folder: Path, *, age_s: float = 0.5) -> None:
    """The state of a run in step 13, which began 4 s ago."""
    now_s = time.time() - age_s
    actor = [
        ("gen", now_s - 4, now_s - 3),
        ("old_log_prob", now_s - 3, now_s - 2),
        ("update_actor", now_s - 2, None),
    ]
    critic = [("update_critic", now_s - 5, now_s - 3.5), ("values", now_s - 3, now_s - 2)]
    state = State(
        now_s, "step 13", now_s - 4, {"actor_rollout_ref_pool": actor, "critic_pool": critic}
    )
    (folder / "state.json").write_text(json.dumps(state._asdict()), encoding="utf-8")


def test_while_a_run_trains_the_operations_of_the_current_step_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "split", overrides=("trainer.total_training_steps=20",))
    write_state(folder)
    lines = text_of(WatchedRun(folder)).splitlines()
    assert lines[0].startswith("run: step 13 of 20, ")
    assert re.fullmatch(r"step 13, running for 4\.\d+ s; a line is 8\.\d+ s", lines[1].strip())
    assert lines[2].startswith("actor_rollout_ref_pool: update_actor for 2.")
    assert re.fullmatch(r" gen=+ old_\w+ +update_actor=+ *", lines[3])
    assert lines[4].startswith("critic_pool: waiting, busy ")
    assert re.fullmatch(r" upda? \.+ values=* *", lines[5])
    assert max(map(len, lines)) <= 80


def test_an_old_or_unreadable_state_is_not_taken_for_what_runs_now(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "split", overrides=("trainer.total_training_steps=20",))
    before = text_of(WatchedRun(folder))
    write_state(folder, age_s=100)
    assert text_of(WatchedRun(folder)) == before
    for content in (
        "",
        "[]",
        '{"time_s": "now"}',
        '{"time_s": 1e12, "what": 3, "since_s": 0, "pools": {"a": 1}}',
    ):
        (folder / "state.json").write_text(content, encoding="utf-8")
        assert text_of(WatchedRun(folder)) == before


def test_a_lane_is_as_wide_as_the_time_that_has_passed_and_every_operation_is_in_it() -> None:
    assert lane([("gen", 0.0, 1.0)], 2.0).plain.rstrip() == " gen" + "=" * 35
    assert (
        lane([("gen", 0.0, 1.9), ("adv", 1.9, 1.9001)], 2.0).plain.rstrip()
        == " gen" + "=" * 70 + " a"
    )
    assert lane([("gen", 1.0, 2.0)], 2.0).plain == " " + "." * 38 + " gen" + "=" * 35 + " "
    assert lane([], 0.0).plain == " "


def test_busy_time_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "split")
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    fractions = [
        row["pool/critic_pool/busy_fraction"]
        for row in rows
        if "pool/critic_pool/busy_fraction" in row
    ]
    expected = sum(fractions[-LAST_STEPS:]) / LAST_STEPS
    line = next(
        line for line in text_of(WatchedRun(folder)).splitlines() if line.startswith("critic_pool")
    )
    assert f", busy {expected:.0%}, " in line


def test_a_running_run_is_followed_line_by_line(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", "split", overrides=("trainer.total_training_steps=12",))
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole / "config.yaml", folder)
    watched = WatchedRun(folder)
    assert "step 0 of 12" in text_of(watched)
    for name in ("metrics.jsonl", "spans.jsonl"):
        lines = (whole / name).read_text(encoding="utf-8").splitlines(keepends=True)
        half = [line for line in lines if json.loads(line)["step"] <= 6]
        with (folder / name).open("w", encoding="utf-8") as file:
            file.write("".join(half) + lines[len(half)][:25])
    watched = WatchedRun(folder)
    assert watched.run.step == 6
    assert not watched.run.is_finished
    for name in ("metrics.jsonl", "spans.jsonl"):
        text = (whole / name).read_text(encoding="utf-8")
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(text[(folder / name).stat().st_size :])
    watched = WatchedRun(folder)
    assert watched.run.step == 12
    assert "finished" in text_of(watched)


def test_in_a_terminal_the_view_follows_until_interrupted(tmp_path: Path, root: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "rolepool", "watch", str(folder)]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = ""
        for step in (2, 3):
            while f"run: step {step}" not in shown:
                shown += os.read(ours, 65536).decode(errors="replace")
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write('{"step": 3, "timing_s/step": 1.0, "critic/score/mean": 0.5}\n')
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    assert "Traceback" not in shown


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(100_000)), encoding="utf-8")
    numbers = [json.loads(line)["n"] for line in last_lines(path, last_bytes=1000)]
    assert 50 < len(numbers) < 100
    assert numbers[-1] == 99_999


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "split")
    before = text_of(WatchedRun(folder))
    for name in ("metrics.jsonl", "spans.jsonl", "monitor.jsonl"):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(
                '[]\n7\n{"step": "x"}\n{"step": 99, "oper\n{"step": 99, "operation": "gen", "pool": 1}\n{"gpus": [3]}\n'
            )
            file.write(b"\xff\xfe".decode("latin-1") + "\n")
    assert text_of(WatchedRun(folder)) == before


def test_the_number_of_steps_follows_from_the_rows_where_the_config_names_epochs(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", overrides=("trainer.total_epochs=1",))
    assert WatchedRun(folder).run.num_steps is None
    for step, is_finished in ((13, False), (14, True)):
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": step, "timing_s/step": 1.0, "training/num_steps": 14.0}) + "\n"
            )
        run = WatchedRun(folder).run
        assert (run.num_steps, run.is_finished) == (14, is_finished)


def test_a_run_that_only_validates_ends_with_its_validation(tmp_path: Path) -> None:
    config = (write_run(tmp_path / "run", num_steps=2) / "config.yaml").read_text(encoding="utf-8")
    folder = tmp_path / "validated"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        config.replace("val_only: false", "val_only: true"), encoding="utf-8"
    )
    assert not WatchedRun(folder).run.is_finished
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "timing_s/testing": 1.0}\n', encoding="utf-8"
    )
    assert WatchedRun(folder).run.is_finished


def test_a_number_of_steps_that_is_none_is_unknown(
    tmp_path: Path, rolepool: Callable[..., Outcome]
) -> None:
    folder = write_run(
        tmp_path / "run", num_steps=2, overrides=("trainer.total_training_steps=20",)
    )
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(
        config.replace("steps: 20", "steps: many"), encoding="utf-8"
    )
    code, out, err = rolepool("watch", str(folder), "--once")
    assert (code, err) == (0, "")
    assert out.startswith("run: step 2, ")


def test_the_first_line_says_whether_the_run_still_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert text_of(WatchedRun(folder)).splitlines()[0].endswith(", stopped")
    for process, state in ((os.getpid(), "running"), (999_999_999, "failed")):
        (folder / ".lock").write_text(
            f"process {process} on {os.uname().nodename}", encoding="utf-8"
        )
        assert text_of(WatchedRun(folder)).splitlines()[0].endswith(f", {state}")
    (folder / ".lock").write_text("process 12 on elsewhere", encoding="utf-8")
    assert text_of(WatchedRun(folder)).splitlines()[0].endswith(", unknown")
    write_state(folder)
    assert text_of(WatchedRun(folder)).splitlines()[0].endswith(", running")
