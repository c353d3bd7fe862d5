"""The runs below a folder in the browser: a list that follows them, the report of each run, and
comparisons.

Owns the web server, who may use it, and what is read for the list. It only reads run folders, and
opens only those that it lists. The cost of a request is limited: the list reads the end and some
other rows of a long metrics.jsonl, reports and comparisons are made in processes with limits
(`rolepool.report.page_process`), and what was read is kept until a file changes. The pages are
`serve*.html`.
"""

import math
import os
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypedDict
from urllib.parse import parse_qs

from rolepool.errors import ConfigError, RolepoolError, encodable, one_line
from rolepool.metrics.row_text import validation_score
from rolepool.metrics.run_rows import last_lines
from rolepool.metrics.spans import Recorded
from rolepool.reading import open_regular
from rolepool.report.comparison_page import TEMPLATES
from rolepool.report.metrics_by_step import TIMING, finite_values
from rolepool.report.page_process import LIMIT_S, REPORT_BYTES, make_page
from rolepool.report.run import ReadRun, parts_of, read_run, sampled_lines, value_at
from rolepool.report.run_lines import read_span
from rolepool.report.run_state import state_of
from rolepool.units import duration

READ_FILES = {
    "config.yaml",
    "metrics.jsonl",
    "spans.jsonl",
    "monitor.jsonl",
    "plan.json",
    "state.json",
}
SHOWN_METRICS = (
    "critic/score/mean",
    "training/num_steps",
    f"{TIMING}step",
    f"{TIMING}testing",
)
VALIDATIONS = "val-core/"
"""What the names of the scores of a validation begin with."""
SPAN_BYTES = 2**16
"""How much of the beginning and of the end of spans.jsonl the list reads."""
MAX_FOLDERS = 5_000
"""Folders that are searched for runs."""
MAX_COMPARED = 8
RECENT_STEPS = 10
"""Steps whose median time is shown."""
MAX_PROCESSES = 4
"""Reports and comparisons that are made at the same time."""
SILENT_S = 60.0
"""A run on another machine that has written nothing for this time, and for five steps, may have
ended."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
TEXT = {"Content-Type": "text/plain"}
HTML = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
}
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TEMPLATES.globals.update(
    value_at=value_at,
    finite_values=finite_values,
    duration=duration,
    REPORT_BYTES=REPORT_BYTES,
    MAX_COMPARED=MAX_COMPARED,
)


Signature = tuple[tuple[str, int, int], ...]
"""The names of the files of a run, when they were written, and their sizes."""
Query = dict[str, list[str]]


class ShownRun(TypedDict, total=False):
    """What the pages show of a run, by the names that the templates use. A run folder that cannot
    be read has only the fields up to `error`."""

    name: str
    state: str
    started_s: float
    error: str
    run: ReadRun
    files: Signature
    score: float | None
    unit: str
    start: str
    duration_s: float
    silent_s: float
    step_s: float


# Reading run folders


def find_runs(root: Path) -> dict[str, Path]:
    """The run folders below `root`, by their path from there. Links to folders are not followed.
    Earlier runs inside a run folder are not listed."""
    runs = {}
    for folder, names, files in islice(os.walk(root), MAX_FOLDERS):
        # `os.walk` continues with the folders that are left in `names`.
        if READ_FILES.isdisjoint(files):
            names[:] = sorted(name for name in names if not name.startswith("."))
            continue
        names.clear()
        name = os.path.relpath(folder, root)
        if folder == str(root):
            name = root.name
        runs[encodable(name)] = Path(folder)
    return runs


@lru_cache(maxsize=MAX_FOLDERS)
def sample_run(folder: Path, signature: Signature) -> ReadRun:
    """The run with the metrics and spans that the list shows. The result is kept until the
    signature of its files changes."""
    run = read_run(folder, 0, sampled_lines)
    for step, row in run.metrics.items():
        shown = {}
        for name, value in row.items():
            if name in SHOWN_METRICS or name.startswith(VALIDATIONS):
                shown[name] = value
        run.metrics[step] = shown
    run.spans = list(run.read_lines("spans.jsonl", read_span, outer_lines))
    return run


def outer_lines(path: Path) -> Iterator[bytes]:
    """The first line of a file, and the lines at its end, without one that is being written."""
    with open_regular(path) as file:
        first = file.readline(SPAN_BYTES)
    for line in (first, *last_lines(path, SPAN_BYTES)):
        if line.endswith(b"\n"):
            yield line


def newest_score(run: ReadRun) -> float | None:
    """The score of the newest validation that was read."""
    for row in reversed(run.metrics.values()):
        score = validation_score(row)
        if score is not None:
            return score if math.isfinite(score) else None
    return None


def unit_of(run: ReadRun) -> str:
    """What a rank of this run holds. The plan does not say it if `trainer.device` is auto, but the
    spans do."""
    if run.plan is None:
        return "GPU"
    devices = {run.plan.device}
    if run.plan.device == "auto":
        devices = set()
        for _, _, span in run.spans:
            if span.pool in run.plan.pools:
                devices.add(span.device)
    return "CPU slot" if devices == {"cpu"} else "GPU"


def work_times(spans: Sequence[Recorded]) -> tuple[float, float] | None:
    """When the first recorded work began and the last one ended; None if there is no span."""
    if not spans:
        return None
    began_s = min(span.queued_s for _, _, span in spans)
    ended_s = max(span.end_s for _, _, span in spans)
    return began_s, ended_s


def signature_of(folder: Path) -> Signature:
    """What changes when a run writes."""
    files = []
    for file in os.scandir(folder):
        if file.name in READ_FILES and file.is_file():
            status = file.stat()
            files.append((file.name, status.st_mtime_ns, status.st_size))
    return tuple(sorted(files))


def recent_step_s(run: ReadRun) -> float:
    """The median time of the last steps with the newest placement; 0 if there is none."""
    since_move = parts_of(run)[-1]
    times_s = list(finite_values(since_move.metrics, f"{TIMING}step").values())
    if not times_s:
        return 0.0
    return median(times_s[-RECENT_STEPS:])


def describe(name: str, folder: Path) -> ShownRun:
    """What the pages show of a run. If the run folder cannot be read, that is only its name and the
    error."""
    try:
        signature = signature_of(folder)
        run = sample_run(folder, signature)
        written_s = [time_ns / 1e9 for _, time_ns, _ in signature]
        first_written_s = min(written_s)
        last_written_s = max(written_s)
        silent_s = max(0.0, time.time() - last_written_s)
        step_s = recent_step_s(run)
        is_silent = silent_s > max(SILENT_S, 5 * step_s)
        state = state_of(run, is_silent=is_silent)
    except Exception as error:  # no run folder may break the list
        return {
            "name": name,
            "state": "unreadable",
            "started_s": 0.0,
            "error": one_line(error),
        }
    began_s, ended_s = work_times(run.spans) or (first_written_s, last_written_s)
    if state == "running":
        ended_s = max(ended_s, time.time())
    return {
        "name": name,
        "state": state,
        "run": run,
        "files": signature,
        "score": newest_score(run),
        "unit": unit_of(run),
        "started_s": began_s,
        "start": start_in_words(began_s),
        "duration_s": ended_s - began_s,
        "silent_s": silent_s,
        "step_s": step_s,
    }


def start_in_words(time_s: float) -> str:
    """A time on this machine's clock; empty if there is no such time."""
    with suppress(ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
    return ""


# Pages


def list_page(server: "Server", query: Query) -> str:
    rows = []
    for name, folder in find_runs(server.root).items():
        rows.append(describe(name, folder))
    # The newest run comes first.
    rows.sort(key=lambda row: (-row["started_s"], row["name"]))
    template = TEMPLATES.get_template("serve.html")
    return template.render(
        root=server.root,
        rows=rows,
        nonce=secrets.token_urlsafe(),
    )


def report_page(server: "Server", query: Query) -> str:
    runs = server.chosen(query)
    name, folder = next(iter(runs.items()))
    page = server.make("report", [folder])
    return _with_bar(page, row=describe(name, folder))


def comparison_page(server: "Server", query: Query) -> str:
    runs = server.chosen(query)
    folders = list(runs.values())
    page = server.make("compare", folders)
    return _with_bar(page)


def _with_bar(page: str, **values: object) -> str:
    """Add a line with a link to the list at the beginning of a page."""
    bar = TEMPLATES.get_template("serve_bar.html").render(**values)
    return re.sub(r"<body[^>]*>|(?=<h1)", lambda match: match[0] + bar, page, count=1)


PAGES = {"/": list_page, "/report": report_page, "/compare": comparison_page}


# The server


class Server(ThreadingHTTPServer):
    """Serves the runs below a folder to everyone who knows the token."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.root = folder.resolve()
        if not self.root.is_dir():
            raise ConfigError(f"{folder}: is not a folder; give the folder that holds your runs")
        self.token = secrets.token_urlsafe()
        self.limit_s: float = LIMIT_S
        """How long a report or a comparison may take."""
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._making: dict[tuple[str, ...], threading.Lock] = defaultdict(threading.Lock)
        """Held while the page of a kind about these folders is made: one folder that takes long has
        only one place."""
        own_names = rf"localhost|{re.escape(host)}|{re.escape(os.uname().nodename)}"
        self.hosts = re.compile(rf"({own_names}|[\d.]+)(:\d+)?", re.IGNORECASE)
        """Addresses, and names of this machine. Any other name in a Host header could be that of a
        site that sends its visitors' browsers here (DNS rebinding)."""
        super().__init__((host, port), Handler)
        self.cookie = f"rolepool_{self.server_port}={self.token}"
        self.url = f"http://{host}:{self.server_port}/?token={self.token}"

    def chosen(self, query: Query) -> dict[str, Path]:
        """The runs that a query names. Raises ConfigError if there are too many, or if one is not
        in the list."""
        runs = find_runs(self.root)
        names = query.get("run", [])
        are_listed = runs.keys() >= set(names)
        has_right_number = 1 <= len(names) <= MAX_COMPARED
        if not has_right_number or not are_listed:
            asked = ", ".join(names) or "no run"
            raise ConfigError(f"{asked}: choose 1 to {MAX_COMPARED} runs that are in {self.root}")
        return {name: runs[name] for name in names}

    def make(self, kind: str, folders: Sequence[Path]) -> str:
        """The page of a kind about run folders, made in another process."""
        key = (kind, *map(str, folders))
        with self._making[key], self._places:
            return make_page(kind, folders, self.limit_s)


class Handler(BaseHTTPRequestHandler):
    """Answers one request, which can only be a GET."""

    server: Server
    server_version = "rolepool"
    sys_version = ""
    timeout = 30

    def handle(self) -> None:
        with suppress(ConnectionError):  # a browser may close its connection at any time
            super().handle()

    def log_message(self, *arguments: object) -> None:
        """Requests are not logged, because the first one contains the token."""

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        query = parse_qs(text)
        first_token = query.get("token", [""])[0]
        knows_token = self._is_token(first_token)
        host = self.headers.get("Host", "")
        is_for_us = self.server.hosts.fullmatch(host)
        if not is_for_us or not (knows_token or self._has_cookie()):
            self._send(403, "403: open the URL that `rolepool serve` printed\n", TEXT)
        elif knows_token:
            # From now on the browser sends the cookie, and its address bar does not show the token.
            cookie = f"{self.server.cookie}; Path=/; HttpOnly; SameSite=Strict"
            headers = {"Location": "/", "Set-Cookie": cookie}
            self._send(303, "", headers)
        elif path not in PAGES:
            self._send(404, "404: there is no such page\n", TEXT)
        else:
            self._answer(path, query)

    def _is_token(self, word: str) -> bool:
        return secrets.compare_digest(word.encode(), self.server.token.encode())

    def _has_cookie(self) -> bool:
        expected = self.server.cookie.encode()
        cookies = self.headers.get("Cookie", "").split(";")
        for word in cookies:
            cookie = word.strip().encode()
            if secrets.compare_digest(cookie, expected):
                return True
        return False

    def _answer(self, path: str, query: Query) -> None:
        status = 200
        problems: Sequence[str]
        try:
            page = PAGES[path](self.server, query)
        except Exception as error:  # no run folder may end the server
            status = 400
            if isinstance(error, RolepoolError):
                problems = error.problems
            else:
                problems = [one_line(error)]
                self.server.handle_error(self.request, self.client_address)  # prints the traceback
            template = TEMPLATES.get_template("serve_error.html")
            page = template.render(problems=problems, query=query)
        self._send(status, page, HTML)

    def _send(self, status: int, text: str, headers: dict[str, str]) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        all_headers = {
            **HEADERS,
            **headers,
            "Content-Length": str(len(body)),
        }
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
