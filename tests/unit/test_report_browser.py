"""The page in a real browser: it draws itself without an error, answers the mouse, and opens at once."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import make_long_run, make_run
from test_report import HOSTILE, make_hostile

from rolepool.report.views import page_data, render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]

USE_THE_MOUSE = """<script>
const chart = document.querySelector("canvas"), box = chart.getBoundingClientRect();
const at = {clientX: box.left + 205, clientY: box.top + 30, bubbles: true, cancelable: true};
chart.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -2000}));
chart.dispatchEvent(new PointerEvent("pointermove", at));
</script></body>"""
FAIL = "<script>document.nothing.fails()</script></body>"

Open = Callable[..., str]


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    """The page's elements after its scripts have run, as text; `more` goes to the end of its body."""

    def call(page: str, more: str = "</body>") -> str:
        file = tmp_path / "report.html"
        file.write_text(page.replace("</body>", more), encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=5000",
            profile,
            "--dump-dom",
        ]
        ended = subprocess.run(
            [str(CHROMIUM), *options, file.as_uri()], capture_output=True, text=True, timeout=100, check=True
        )
        return re.sub(r'<script id="data".*?</script>', "", ended.stdout, flags=re.DOTALL)

    return call


def errors_in(elements: str) -> str:
    (found,) = re.findall(r'<div id="errors">(.*?)</div>', elements, flags=re.DOTALL)
    return found


def load_time_s(elements: str) -> float:
    (found,) = re.findall(r'data-ready-ms="(\d+)"', elements)
    return int(found) / 1000


def test_the_page_draws_findings_charts_and_tables_without_an_error(open_page: Open) -> None:
    run = make_run()
    elements = open_page(render(run))
    assert errors_in(elements) == ""
    for finding in page_data(run)["findings"]:
        assert html.escape(finding["text"], quote=False) in elements
        assert all(f'title="click to copy">{override}</code>' in elements for override in finding["overrides"])
    for title in (
        "Timeline",
        "Where each pool's time went",
        "Critical path",
        "Step time",
        "Training",
        "Plan",
        "Config",
    ):
        assert f"<h2>{title}</h2>" in elements
    assert elements.count("<canvas") == 2
    assert "<polyline" in elements
    assert "<code>data.train_batch_size</code>" in elements


def test_an_error_in_a_script_would_be_seen(open_page: Open) -> None:
    assert "Cannot read properties of undefined" in errors_in(open_page(render(make_run()), FAIL))


def test_hostile_text_is_shown_and_not_run(open_page: Open) -> None:
    elements = open_page(render(make_hostile(make_run())))
    assert errors_in(elements) == ""
    assert f"<h1>{html.escape(HOSTILE, quote=False)}</h1>" in elements
    assert "<img" not in elements
    assert "<script>window.broken" not in elements


def test_hovering_tells_what_a_rank_did_and_waited_for(open_page: Open) -> None:
    elements = open_page(render(make_run()), USE_THE_MOUSE)
    (tip,) = re.findall(r'<div id="tip".*?>(.*?)</div>', elements, flags=re.DOTALL)
    assert tip.splitlines()[:3] == ["gen · step 1", "actor_rollout_ref_pool rank 0", "start 0 s · took 4 s"]
    assert errors_in(elements) == ""


def test_a_run_without_anything_makes_a_page_without_an_error(open_page: Open) -> None:
    elements = open_page(render(make_run(num_steps=0)))
    assert errors_in(elements) == ""
    assert "Nothing stands out." in elements


@pytest.mark.slow
def test_ten_thousand_steps_of_sixteen_ranks_open_in_five_seconds(open_page: Open) -> None:
    elements = open_page(render(make_long_run()))
    assert errors_in(elements) == ""
    assert re.search(r"The page contains 1[0-2] of 10000 steps", elements)
    assert load_time_s(elements) < 5
