"""The runs of a folder in the browser: who may see them, what the list says, and that it follows
the runs."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import psutil
import pytest
from markupsafe import escape
from synthetic_runs import write_run
from web_driver import CHROMIUM, DRIVER, browser

from commands import Outcome
from rolepool.metrics.run_folder import RunFolder
from rolepool.report.run import NUM_SAMPLES, TAIL_BYTES, read_run, sampled_lines
from rolepool.report.serve import SPAN_BYTES, Server, describe, find_runs
from rolepool.units import duration

HOSTILE = "<img src=x onerror=alert(1)>'\"&"
TEN_STEPS = "trainer.total_training_steps=10"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class Client:
    """Asks a server, with its cookie unless told otherwise."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def get(self, path: str = "/", cookie: str | None = None, host: str | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        headers = {"Cookie": f"other=1; {self.server.cookie}" if cookie is None else cookie}
        connection.request(
            "GET", path, headers={**headers, "Host": host or f"127.0.0.1:{self.server.server_port}"}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Answer(answer.status, dict(answer.getheaders()), text)

    def row(self, name: str) -> str:
        """The text of a run's row, in one line."""
        rows = re.findall(r"<tr data-[^>]*>(.*?)</tr>", self.get().text, flags=re.DOTALL)
        (row,) = (row for row in rows if f'value="{escape(name)}"' in row)
        return " ".join(re.sub(r"<[^>]*>", " ", row).split())


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    with Server(folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same work, which no test changes."""
    folder = tmp_path_factory.mktemp("served") / "runs"
    write_run(
        folder / "one", num_steps=10, overrides=(TEN_STEPS, "trainer.experiment_name=first try")
    )
    write_run(folder / "group" / "two", "split", num_steps=6, overrides=(TEN_STEPS,))
    return folder


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with serving(runs) as client:
        yield client


def lock(folder: Path, text: str) -> None:
    (folder / ".lock").write_text(text, encoding="utf-8")


def set_age(folder: Path, seconds: float) -> None:
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def copy_of(runs: Path, name: str, folder: Path) -> Path:
    return Path(shutil.copytree(runs / name, folder))


# Who may see it


def test_the_token_gives_a_cookie_and_leaves_the_address(client: Client) -> None:
    url = urlsplit(client.server.url)
    answer = client.get(f"{url.path}?{url.query}", cookie="")
    assert (answer.status, answer.headers["Location"], answer.text) == (303, "/", "")
    cookie, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(attributes)
    assert client.get(cookie=cookie).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/?token=%C3%A9", "/report?run=one", "/nothing"]
)
@pytest.mark.parametrize("cookie", ["", "rolepool_1=x", "\xe9=\xe9"])
def test_without_token_or_cookie_there_is_nothing_but_a_refusal(
    client: Client, path: str, cookie: str
) -> None:
    status, headers, text = client.get(path, cookie)
    assert (status, text) == (403, "403: open the URL that `rolepool serve` printed\n")
    assert not {"Set-Cookie", "Location"} & headers.keys()


def test_the_cookie_of_another_server_is_refused(client: Client, runs: Path) -> None:
    with serving(runs) as other:
        name = client.server.cookie.split("=")[0]
        assert client.get(cookie=other.server.cookie).status == 403
        assert client.get(cookie=f"{name}={other.server.token}").status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("evil.example:127", 403),
    ],
)
def test_the_name_of_another_site_is_refused(client: Client, host: str, status: int) -> None:
    assert client.get(host=host).status == status
    url = urlsplit(client.server.url)
    with_token = client.get(f"/?{url.query}", cookie="", host=host)
    assert with_token.status == (303 if status == 200 else 403)


def test_every_page_has_headers_that_protect_it(client: Client) -> None:
    for path in ("/", "/report?run=one", "/report?run=none"):
        headers = client.get(path).headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none';")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    nonces = {re.search(r"script-src 'nonce-([\w-]+)'", client.get().text)[1] for _ in range(2)}  # type: ignore[index]
    assert len(nonces) == 2


@pytest.mark.parametrize("path", ["/report", "/compare"])
def test_only_runs_below_the_folder_can_be_opened(tmp_path: Path, runs: Path, path: str) -> None:
    outside = copy_of(runs, "one", tmp_path / "outside")
    folder = tmp_path / "runs"
    copy_of(runs, "one", folder / "one")
    (folder / "link").symlink_to(outside)
    with serving(folder) as client:
        for name in (
            "../outside",
            str(outside),
            "link",
            "one/../../outside",
            "one/",
            "",
            ".",
            "%2e%2e/outside",
        ):
            answer = client.get(
                f"{path}?run={quote(name)}&run=one"
                if path == "/compare"
                else f"{path}?run={quote(name)}"
            )
            assert answer.status == 400
            assert "Timeline" not in answer.text
        assert client.get(path).status == 400
        assert "link" not in find_runs(folder)


def test_nothing_is_written_to_the_runs(client: Client, runs: Path) -> None:
    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (runs, *runs.rglob("*"))}

    before = state()
    for path in ("/", "/report?run=one", "/report?run=group/two"):
        assert client.get(path).status == 200
    assert state() == before


# What the list says


def test_a_row_tells_state_step_reward_placement_and_speed(client: Client, runs: Path) -> None:
    rows = [
        json.loads(line)
        for line in (runs / "one" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    times_s = sorted(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    median_s = (times_s[4] + times_s[5]) / 2
    row = client.row("one")
    assert row.startswith("one first try finished last written ")
    assert (
        "step 10 of 10 0.167 → 0.667 validation 0.667 gae standard 1 pool, 4 GPUs started 2023-11-14 "
        in row
    )
    spans = read_run(runs / "one").spans
    duration_s = max(span.end_s for _, _, span in spans) - min(
        span.queued_s for _, _, span in spans
    )
    assert row.endswith(f"{duration(duration_s)} {median_s:.3g} s per step")
    assert "stopped" in client.row("group/two")
    assert "step 6 of 10" in client.row("group/two")
    assert "split 2 pools, 4 GPUs" in client.row("group/two")


def test_restarts_are_counted_wherever_they_are_in_a_long_file(tmp_path: Path, runs: Path) -> None:
    folder = copy_of(runs, "one", tmp_path / "one")
    RunFolder(folder).add_event(
        "restart", 3, "driver, killed by signal 9", 9.0, repeated_from_step=2
    )
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(
            f'{{"step": {10 + number}, "a": 1.0}}\n' for number in range(TAIL_BYTES // 10)
        )
    with serving(tmp_path) as client:
        assert " restarts: 1 " in client.row("one")
        assert ", restarts: 1" in client.get("/report?run=one").text


def test_the_newest_validation_is_found_between_the_lines_that_are_read(
    tmp_path: Path, runs: Path
) -> None:
    folder = copy_of(runs, "one", tmp_path / "one")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(
            f'{{"step": {step}, "timing_s/step": 1.0, "a": 1.0}}\n' for step in range(11, 5_000)
        )
        file.write('{"step": 5000, "val-core/demo/reward/mean@1": 0.875}\n')
        file.writelines(
            f'{{"step": {step}, "timing_s/step": 1.0, "a": 1.0}}\n' for step in range(5_001, 12_000)
        )
        file.write('{"step": 12000, "val-core/demo/reward/mean@1": 0.9')
    with serving(tmp_path) as client:
        assert " validation 0.875 gae " in client.row("one")


@pytest.mark.parametrize(
    ("planned", "recorded", "unit"),
    [
        ("auto", "cpu", "4 CPU slots"),
        ("auto", "cuda:0", "4 GPUs"),
        ("auto", None, "4 GPUs"),
        ("cpu", "cpu", "4 CPU slots"),
        ("cuda", "cuda:0", "4 GPUs"),
    ],
)
def test_a_run_on_cpu_slots_says_so_even_if_its_device_was_chosen_automatically(
    tmp_path: Path, runs: Path, planned: str, recorded: str | None, unit: str
) -> None:
    folder = copy_of(runs, "one", tmp_path / "run")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["plans"][0]["plan"]["device"] = planned
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    lines = (folder / "spans.jsonl").read_text(encoding="utf-8")
    lines = re.sub(r'"device": "cuda:\d+"', f'"device": "{recorded}"', lines) if recorded else ""
    (folder / "spans.jsonl").write_text(lines, encoding="utf-8")
    with serving(tmp_path) as client:
        assert unit in client.row("run")


def test_start_and_duration_come_from_the_spans_of_a_long_run_and_not_from_its_files(
    tmp_path: Path, runs: Path
) -> None:
    folder = copy_of(runs, "one", tmp_path / "run")
    first, *_, last = (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()
    other = {**json.loads(last), "step": 11, "end_s": json.loads(first)["queued_s"] + 7200}
    with (folder / "spans.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(f"{last}\n" for _ in range(2 * SPAN_BYTES // len(last)))
        file.write(f'{json.dumps(other)}\n{{"step": 12, "oper')
    row = describe("run", folder)
    assert (row["duration_s"], row["started_s"]) == (7200, json.loads(first)["queued_s"])
    assert row["run"].notes == []
    (folder / "spans.jsonl").write_text("", encoding="utf-8")
    set_age(folder, 50)
    row = describe("run", folder)
    assert row["started_s"] == pytest.approx(time.time() - 50, abs=20)
    assert row["duration_s"] == pytest.approx(0, abs=5)


def test_the_duration_of_a_running_run_grows(tmp_path: Path, runs: Path) -> None:
    folder = copy_of(runs, "group/two", tmp_path / "run")
    lock(folder, f"process {os.getpid()} on {os.uname().nodename}")
    row = describe("run", folder)
    assert row["state"] == "running"
    assert row["duration_s"] == pytest.approx(time.time() - row["started_s"], abs=20)


def test_the_curve_has_a_point_for_each_step(client: Client) -> None:
    points = [line.split() for line in re.findall(r'<polyline points="(.*?)"', client.get().text)]
    assert sorted(map(len, points)) == [6, 10]
    assert all((one[0].split(",")[0], one[-1]) == ("0.0", "150.0,0.0") for one in points)


@pytest.mark.parametrize(
    ("text", "age_s", "state"),
    [
        ("process {pid} on {machine}", 0, "running"),
        ("process {pid} on {machine}", 9000, "failed"),  # another process, younger than the lock
        ("process 999999999 on {machine}", 0, "failed"),
        ("process 12 on elsewhere", 0, "running"),
        ("process 12 on elsewhere", 9000, "unknown"),
        ("", 0, "running"),
        ("nonsense", 9000, "unknown"),
        (None, 0, "stopped"),
    ],
)
def test_the_state_follows_from_the_lock(
    tmp_path: Path, runs: Path, text: str | None, age_s: float, state: str
) -> None:
    folder = copy_of(runs, "group/two", tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        if text is not None:
            lock(folder, text.format(pid=process.pid, machine=os.uname().nodename))
        set_age(folder, age_s)
        assert describe("run", folder)["state"] == state
        process.communicate(b"\n")


def test_a_run_that_has_all_its_steps_is_finished_even_if_it_left_its_lock(
    tmp_path: Path, runs: Path
) -> None:
    folder = copy_of(runs, "one", tmp_path / "run")
    for text in (f"process 999999999 on {os.uname().nodename}", "process 12 on elsewhere"):
        lock(folder, text)
        set_age(folder, 9000)
        assert describe("run", folder)["state"] == "finished"


def test_a_run_that_only_validates_is_finished_after_its_validation(
    tmp_path: Path, runs: Path
) -> None:
    folder = copy_of(runs, "one", tmp_path / "run")
    config = (
        (folder / "config.yaml")
        .read_text(encoding="utf-8")
        .replace("val_only: false", "val_only: true")
    )
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    assert describe("run", folder)["state"] == "stopped"
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "timing_s/testing": 1.0}\n', encoding="utf-8"
    )
    assert describe("run", folder)["state"] == "finished"


def test_the_list_follows_a_run(tmp_path: Path, runs: Path) -> None:
    folder = copy_of(runs, "group/two", tmp_path / "runs" / "run")
    with serving(tmp_path / "runs") as client:
        assert "step 6 of 10" in client.row("run")
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                '{"step": 7, "timing_s/step": 1.0, "training/num_steps": 12.0}\n{"step": 8, "timing'
            )
        assert "step 7 of 12" in client.row("run")
        assert "unreadable" not in client.row("run")
        copy_of(runs, "one", tmp_path / "runs" / "another")
        assert "step 10 of 10" in client.row("another")


def test_earlier_runs_and_hidden_folders_are_not_listed(tmp_path: Path, runs: Path) -> None:
    for name in ("run", "run/earlier/1", ".hidden/run", "deep/er/run"):
        copy_of(runs, "one", tmp_path / name)
    assert set(find_runs(tmp_path)) == {"run", "deep/er/run"}
    assert find_runs(tmp_path / "run") == {"run": tmp_path / "run"}


def test_a_broken_run_says_so_in_its_row_and_the_others_are_shown(
    tmp_path: Path, runs: Path
) -> None:
    for name in ("good", "rows", "config", "plan", "folders", "nesting"):
        copy_of(runs, "one", tmp_path / name)
    (tmp_path / "rows" / "metrics.jsonl").write_bytes(b"\xff\x00\n[]\n7\n" + b"x" * 3 * TAIL_BYTES)
    (tmp_path / "config" / "config.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "plan" / "plan.json").write_text("{", encoding="utf-8")
    (tmp_path / "nesting" / "config.yaml").write_text("[" * 2_000, encoding="utf-8")
    for file in (tmp_path / "folders").iterdir():
        file.unlink()
    (tmp_path / "folders" / "plan.json").write_text("{}", encoding="utf-8")
    (tmp_path / "folders" / "metrics.jsonl").mkdir()
    with serving(tmp_path) as client:
        assert "finished" in client.row("good")
        assert "skipped" in client.row("rows")
        assert "config.yaml cannot be read: not valid YAML" in client.row("config")
        assert "plan.json cannot be read: Invalid JSON: EOF" in client.row("plan")
        assert "unreadable run" in client.row("folders")
        assert "config.yaml cannot be read: is nested more than 40 levels deep" in client.row(
            "nesting"
        )
        answer = client.get("/report?run=folders")
        assert (answer.status, "This page cannot be shown" in answer.text) == (400, True)
        for name in ("rows", "config", "plan", "nesting"):
            assert client.get(f"/report?run={name}").status == 200


def test_names_are_shown_as_text(tmp_path: Path, runs: Path) -> None:
    folder = copy_of(runs, "one", tmp_path / HOSTILE)
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    quoted = json.dumps(f"experiment {HOSTILE}")
    (folder / "config.yaml").write_text(config.replace("first try", quoted), encoding="utf-8")
    (tmp_path / os.fsdecode(b"not \xff utf-8")).mkdir()
    shutil.copy(folder / "metrics.jsonl", tmp_path / os.fsdecode(b"not \xff utf-8"))
    with serving(tmp_path) as client:
        assert client.row(HOSTILE).startswith(
            f"{escape(HOSTILE)} experiment {escape(HOSTILE)} finished"
        )
        for path in ("/", f"/report?run={quote(HOSTILE)}", f"/report?run={quote(HOSTILE * 2)}"):
            assert "<img" not in client.get(path).text
        assert client.get(f"/report?run={quote(HOSTILE)}").status == 200
        assert client.get(f"/report?run={quote('not ? utf-8')}").status == 200


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        assert "There is no run yet." in client.get().text


# Long runs


def test_of_a_long_file_the_end_and_some_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {number:06d}}}\n' for number in range(100_000)), encoding="utf-8"
    )
    numbers = [int(line[9:15]) for line in sampled_lines(path)]
    num_at_the_end = TAIL_BYTES // 17
    assert numbers == sorted(set(numbers))
    assert NUM_SAMPLES - 1 <= len(numbers) - num_at_the_end <= NUM_SAMPLES + 1
    assert numbers[0] == 0
    assert numbers[-num_at_the_end:] == list(range(100_000 - num_at_the_end, 100_000))
    assert max(after - before for before, after in pairwise(numbers)) < 100_000 / (NUM_SAMPLES - 2)


@pytest.mark.slow
def test_two_hundred_runs_of_four_thousand_steps_are_listed_at_once(
    tmp_path: Path, runs: Path
) -> None:
    first = copy_of(runs, "one", tmp_path / "runs" / "run_0")
    row = json.loads((first / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[5])
    lines = (
        json.dumps({**row, "step": step, "training/num_steps": 4000.0}) for step in range(1, 4001)
    )
    (first / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number in range(1, 200):
        shutil.copytree(first, tmp_path / "runs" / f"run_{number}", copy_function=os.link)
    with serving(tmp_path / "runs") as client:
        assert client.get().text.count("step 4000 of 4000") == 200
        start_s = time.perf_counter()
        assert client.get().status == 200
        assert time.perf_counter() - start_s < 1


# Reports and comparisons


def page_process_of(folder: Path) -> psutil.Process:
    """The process that makes the page of a folder, when there is one."""
    for _ in range(500):
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if str(folder) in child.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError(f"no process makes the page of {folder}")


def test_a_folder_that_takes_too_long_is_stopped_and_blocks_no_other(
    tmp_path: Path, runs: Path
) -> None:
    root = tmp_path / "runs"
    slow = copy_of(runs, "one", root / "slow")
    copy_of(runs, "one", root / "other")
    before = psutil.Process().children()
    with serving(root) as client, ThreadPoolExecutor() as threads:
        client.server.limit_s = 5.0
        asked = [threads.submit(client.get, "/report?run=slow") for _ in range(6)]
        process = page_process_of(slow)
        process.suspend()
        assert client.get("/report?run=other").status == 200
        assert not asked[0].done()
        process.resume()
        process.kill()
        client.server.limit_s = 0.01
        answers = [answer.result() for answer in asked]
        assert "was not ready after 0.01 s" in answers[-1].text
        assert all(answer.status == 400 for answer in answers)
        client.server.limit_s = 60.0
        assert client.get("/report?run=slow").status == 200
        assert set(psutil.Process().children()) <= set(before)


def test_a_report_is_that_of_the_run_as_it_is_now(tmp_path: Path, runs: Path) -> None:
    folder = copy_of(runs, "group/two", tmp_path / "run")
    lock(folder, "process 12 on elsewhere")
    set_age(folder, 0)
    with serving(tmp_path) as client:
        before = client.get("/report?run=run").text
        assert "running, step 6 of 10" in before
        assert "load again every" in before
        assert '"Timeline"' in before
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 10, "timing_s/step": 77.0}\n')
        (folder / ".lock").unlink()
        after = client.get("/report?run=run").text
        assert "finished, step 10 of 10" in after
        assert "load again every" not in after
        assert after.count("77.0") > before.count("77.0")


@pytest.mark.parametrize("names", [[], ["one", "none"], ["one"] * 9])
def test_a_comparison_of_the_wrong_runs_is_refused(client: Client, names: list[str]) -> None:
    answer = client.get(f"/compare?{urlencode([('run', name) for name in names])}")
    assert answer.status == 400
    assert "choose 1 to 8 runs" in answer.text


def test_runs_of_different_work_are_compared_with_what_differs(tmp_path: Path, runs: Path) -> None:
    copy_of(runs, "one", tmp_path / "one")
    write_run(tmp_path / "other", num_steps=6, overrides=("data.max_response_length=8",))
    with serving(tmp_path) as client:
        answer = client.get("/compare?run=one&run=other")
        assert answer.status == 200
        assert "<title>one and other</title>" in answer.text
        (row,) = re.findall(r"<tr><th><code>data.max_response_length</code>.*?</tr>", answer.text)
        assert re.findall(r'<td data-name="(.*?)"><code>(.*?)<', row) == [
            ("one", "512"),
            ("other", "8"),
        ]


# The command


def test_what_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, rolepool: Callable[..., Outcome], client: Client
) -> None:
    port = client.server.server_port
    for arguments, words in {
        (str(tmp_path / "none"),): "none: is not a folder; give the folder that holds your runs",
        (
            str(tmp_path),
            "--port",
            str(port),
        ): f"--port {port}: cannot be used (Address already in use)",
        (
            str(tmp_path),
            "--port",
            "70000",
        ): "--port 70000: cannot be used (bind(): port must be 0-65535.)",
        (str(tmp_path), "--port", "x"): "argument --port: invalid int value: 'x'",
        (
            str(tmp_path),
            "--host",
            "no.such.host.invalid",
        ): "--host no.such.host.invalid --port 0: cannot be used",
    }.items():
        code, out, err = rolepool("serve", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


@pytest.mark.parametrize(("host", "is_warned"), [("localhost", False), ("0.0.0.0", True)])
def test_the_command_prints_the_address_and_ends_with_ctrl_c(
    tmp_path: Path, root: Path, host: str, is_warned: bool
) -> None:
    command = [sys.executable, "-m", "rolepool", "serve", str(tmp_path), "--host", host]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == f"runs in {tmp_path}; press Ctrl-C to stop\n"
        url = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=120)
        connection.request("GET", f"/?{url.query}")
        assert connection.getresponse().status == 303
        socket.create_connection(
            ("127.0.0.1", url.port or 0)
        ).close()  # a client that leaves is no error
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "stopped\n")
    warning = (
        f"warning: --host {host}: other machines can reach this page, and it is not encrypted\n"
    )
    assert err == (warning if is_warned else "")


# In a browser


needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine"
)


@pytest.fixture
def three_runs(tmp_path: Path, runs: Path) -> Path:
    """A finished run, a running one and one with a hostile name."""
    for name, copied in (("one", "one"), ("two", "group/two"), (HOSTILE, "one")):
        copy_of(runs, copied, tmp_path / name)
    lock(tmp_path / "two", f"process {os.getpid()} on {os.uname().nodename}")
    return tmp_path


@pytest.mark.browser
@needs_browser
def test_in_a_browser_runs_are_listed_and_opened(three_runs: Path) -> None:
    with serving(three_runs) as client, browser() as window:
        window.open(client.server.url)
        assert window.run("return location.search") == ""
        names = window.run(
            "return [...document.querySelectorAll('tbody a')].map((link) => link.textContent)"
        )
        assert sorted(names) == sorted(["one", "two", HOSTILE])
        assert window.run("return document.querySelector('#compare').disabled")
        window.click("a[href='/report?run=two']")
        window.wait_for("return document.body.innerText.includes('Timeline')")
        assert window.run("return document.querySelector('nav').innerText").startswith(
            "All runs\nrunning, step 6 of 10"
        )
        assert window.run("return document.getElementById('errors').textContent") == ""
        assert window.errors() == []


@pytest.mark.browser
@needs_browser
def test_in_a_browser_runs_are_searched_and_sorted_also_after_an_update(three_runs: Path) -> None:
    slow = write_run(three_runs / "slow", num_steps=3, slower={"gen": 9.0})
    config = (
        (slow / "config.yaml")
        .read_text(encoding="utf-8")
        .replace("adv_estimator: gae", "adv_estimator: grpo")
    )
    (slow / "config.yaml").write_text(config, encoding="utf-8")

    def shown() -> list[str]:
        links = "[...document.querySelectorAll('tbody tr:not([hidden]) a')]"
        return list(window.run(f"return {links}.map((link) => link.textContent)"))

    def search(words: str) -> None:
        window.run(
            "const field = document.getElementById('search'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('input'))",
            words,
        )

    with serving(three_runs) as client, browser() as window:
        window.resize(1400)
        window.open(client.server.url)
        window.click("button[data-sort=speed]")
        assert shown()[0] == "slow"
        window.click("button[data-sort=speed]")
        assert shown()[-1] == "slow"
        head = window.run("return document.querySelector('[aria-sort]').textContent")
        assert head == "s per step"
        window.click("button[data-sort=name]")
        assert shown() == [HOSTILE, "one", "slow", "two"]
        search("GRPO")
        assert shown() == ["slow"]
        search("split  running")
        assert shown() == ["two"]
        window.click("input[value=two]")
        search("grpo")
        assert shown() == ["slow", "two"]  # a ticked run stays in sight
        with (three_runs / "slow" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 4, "timing_s/step": 1.0}\n')
        window.wait_for("return document.body.innerText.includes('step 4')")
        assert shown() == ["slow", "two"]
        window.click("#clear")
        assert shown() == ["slow"]
        window.open(client.server.url.split("?")[0])
        assert shown() == ["slow"]  # search and order are kept
        assert window.errors() == []


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_in_a_browser_ticks_survive_updates_and_ticked_runs_are_compared(three_runs: Path) -> None:
    with serving(three_runs) as client, browser() as window:
        window.open(client.server.url)
        window.click("input[value=one]")
        window.click("input[value=two]")
        assert (
            window.run("return document.querySelector('#compare').textContent") == "Compare 2 runs"
        )
        with (three_runs / "two" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 7, "timing_s/step": 1.0, "critic/score/mean": 0.5}\n')
        window.wait_for("return document.body.innerText.includes('step 7 of 10')")
        ticked = window.run(
            "return [...document.querySelectorAll('input:checked')].map((box) => box.value)"
        )
        assert sorted(ticked) == ["one", "two"]

        window.click("#compare")
        heading = window.wait_for("return document.querySelector('h1').textContent", timeout_s=60)
        assert "one" in heading
        assert "two" in heading
        assert window.run("return document.querySelectorAll('.bar').length") >= 2
        window.click("nav a")
        window.wait_for("return document.querySelectorAll('input:checked').length === 2")
        assert window.errors() == []

        client.server.cookie = "the cookie of a server that was started again"
        window.wait_for(
            "return document.getElementById('connection').textContent.includes('rolepool serve printed')"
        )


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_in_a_browser_the_report_of_a_running_run_follows_it(three_runs: Path) -> None:
    with serving(three_runs) as client, browser() as window:
        window.open(client.server.url)
        window.click("a[href='/report?run=two']")
        window.wait_for("return document.body.innerText.includes('Timeline')")
        window.run("scrollTo(0, 400)")
        with (three_runs / "two" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 7, "timing_s/step": 1.0, "critic/score/mean": 0.5}\n')
        window.wait_for("return document.querySelector('nav')?.innerText.includes('step 7 of 10')")
        window.wait_for("return scrollY === 400", timeout_s=3)
        window.run("scrollTo(0, 0)")
        window.click("#follow")
        with (three_runs / "two" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 8, "timing_s/step": 1.0, "critic/score/mean": 0.5}\n')
        time.sleep(11)
        assert "step 7 of 10" in window.run("return document.querySelector('nav').innerText")
