"""The page in a real browser: it draws itself without an error, answers the mouse, and opens at
once."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import ACTOR, make_long_run, make_run
from synthetic_runs import write_run
from test_report import HOSTILE, make_hostile
from web_driver import CONTRAST

from rolepool.metrics.run_folder import RunFolder
from rolepool.report.metrics_by_step import metric_names
from rolepool.report.page import page_data, render
from rolepool.report.run import read_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]

USE_THE_MOUSE = """<script>
const chart = document.querySelector("canvas"), box = chart.getBoundingClientRect();
const at = {clientX: box.left + 205, clientY: box.top + 30, bubbles: true, cancelable: true};
chart.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -2000}));
chart.dispatchEvent(new PointerEvent("pointermove", at));
</script></body>"""
FAIL = "<script>document.nothing.fails()</script></body>"

USE_THE_BUTTONS = """<script>
const chooser = document.querySelector("select"), shown = [chooser.selectedOptions[0].textContent];
for (const words of ["Next step ›", "‹ Previous step", "‹ Previous step"]) {
  [...document.querySelectorAll("button")].find((one) => one.textContent === words).click();
  const box = document.getElementById("timeline").getBoundingClientRect();
  const at = {clientX: box.left + 205, clientY: box.top + 30, bubbles: true};
  document.getElementById("timeline").dispatchEvent(new PointerEvent("pointermove", at));
  shown.push(document.getElementById("tip").textContent.split("\\n")[0]);
}
document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: shown.join(", ")}));
</script></body>"""

MEASURE = (
    f"<script>{CONTRAST}"
    + """
function measure(frame) {
  const shown = frame.contentDocument, view = frame.contentWindow, root = shown.documentElement;
  const all = (selector) => [...shown.querySelectorAll(selector)];
  const widthOf = (one) => one.getBoundingClientRect().width;
  const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const texts = all("main *").filter((one) => hasText(one) && one.getClientRects().length && one.tagName !== "OPTION");
  const colorOf = (one) => view.getComputedStyle(one)[one.tagName === "text" ? "fill" : "color"];
  const pixels = (chart) => chart.getContext("2d").getImageData(0, 0, chart.width, chart.height).data.buffer;
  const contrasts = texts.map((one) => [contrast(colorOf(one), background(one)), one.textContent]);
  return {
    width: view.innerWidth, overflow: root.scrollWidth - root.clientWidth,
    page: view.getComputedStyle(shown.body).backgroundColor,
    errors: shown.getElementById("errors").textContent,
    bars: all(".bar").map(widthOf), parts: all(".bar i").map(widthOf),
    pictures: all("canvas, .charts svg").map(widthOf),
    small: all(".small-charts svg").map(widthOf),
    colors: all("canvas").map((chart) => new Set(new Uint32Array(pixels(chart))).size),
    texts: texts.length, faint: contrasts.filter(([ratio]) => ratio < 4.5),
  };
}
addEventListener("load", () => {
  document.getElementById("result").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
});
</script></body>"""
)

Open = Callable[..., str]


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    """The page's elements after its scripts have run, as text; `more` goes to the end of its
    body."""

    def call(page: str, more: str = "</body>", *further_options: str) -> str:
        file = tmp_path / "report.html"
        file.write_text(page.replace("</body>", more), encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=5000",
            profile,
            *further_options,
            "--dump-dom",
        ]
        ended = subprocess.run(
            [str(CHROMIUM), *options, file.as_uri()],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
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
        assert all(
            f'title="click to copy">{override}</code>' in elements
            for override in finding["overrides"]
        )
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


def test_the_page_of_a_run_that_moved_says_so_and_marks_moves_in_all_curves(
    open_page: Open, tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path / "run", num_steps=12, moves={5: "split", 9: "standard"}))
    first, second, third = run.plans
    hostile = second.plan.model_copy(update={"pools": {HOSTILE: second.plan.pools[ACTOR]}})
    run = replace(run, plans=[first, replace(second, plan=hostile), third], events=run.events[:1])
    elements = open_page(render(run))
    assert errors_in(elements) == ""
    assert "<img" not in elements
    name = f"{html.escape(HOSTILE, quote=False)} [2]"
    assert f"since step 9, when the run moved from {name} to global_pool [4]." in elements
    (table,) = re.findall(r"<h2>Moves</h2>.*?</table>", elements, flags=re.DOTALL)
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", table)[1:]]
    assert [row[:4] for row in rows] == [
        ["4", "global_pool [4]", name, "3 s"],
        ["8", name, "global_pool [4]", "resumed"],  # there is no row about this one
    ]
    assert re.fullmatch(r"0\.\d+ steps", rows[0][4]) and rows[1][4] == ""
    assert rows[0][6] == rows[1][5] != ""
    assert elements.count('class="move"') == 2 * len(page_data(run)["curves"])


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
    assert tip.splitlines()[:3] == [
        "gen · step 4",
        "actor_rollout_ref_pool rank 0",
        "start 0 s · took 4 s",
    ]
    assert errors_in(elements) == ""


TOUCH = """<script>
const chart = document.getElementById("timeline"), box = chart.getBoundingClientRect();
const at = {clientX: box.left + 205, clientY: box.top + 30, bubbles: true, pointerId: 1, pointerType: "touch"};
chart.setPointerCapture = () => {};
const shown = [], say = () => shown.push(tip.style.display === "none" ? "" : tip.textContent.split("\\n")[0]);
for (const kind of ["pointerdown", "pointerup", "pointerleave"]) {
  chart.dispatchEvent(new PointerEvent(kind, at));
  say();
}
document.body.dispatchEvent(new PointerEvent("pointerdown", {...at, clientY: 0}));
say();
document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: JSON.stringify(shown)}));
</script></body>"""


def test_a_touch_shows_the_tip_of_a_span_until_the_next_touch(open_page: Open) -> None:
    elements = open_page(render(make_run()), TOUCH)
    assert errors_in(elements) == ""
    assert shown_in(elements) == ["gen · step 4", "gen · step 4", "gen · step 4", ""]


ZOOM = """<script>
const press = (words) => [...document.querySelectorAll("button")].find((one) => one.textContent === words).click();
const chart = document.getElementById("timeline"), shown = [];
function say() {
  const box = chart.getBoundingClientRect();
  const at = {clientX: box.left + 205, clientY: box.top + 30, bubbles: true};
  chart.dispatchEvent(new PointerEvent("pointermove", at));
  shown.push(tip.textContent.split("\\n")[0].split(" ")[0]);
}
say();
for (let times = 0; times < 3; times++) press("Zoom in");
say();
for (let times = 0; times < 3; times++) press("Zoom out");
say();
document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: JSON.stringify(shown)}));
</script></body>"""


def test_buttons_zoom_the_timeline(open_page: Open) -> None:
    elements = open_page(render(make_run()), ZOOM)
    assert errors_in(elements) == ""
    assert shown_in(elements) == ["gen", "old_log_prob", "gen"]


def test_the_page_opens_on_the_median_step_and_others_can_be_seen(open_page: Open) -> None:
    elements = open_page(render(make_run()), USE_THE_BUTTONS)
    assert (
        '<pre id="shown">step 4 (median), gen · step 5, gen · step 4, gen · step 3</pre>'
        in elements
    )
    assert errors_in(elements) == ""


@pytest.fixture
def measure(open_page: Open) -> Callable[..., list[dict[str, Any]]]:
    """What a browser shows of pages in frames of 1,400 and 420 pixels. (A window cannot be as
    narrow as a phone.)"""

    def call(pages: list[str], scheme: str) -> list[dict[str, Any]]:
        frames = [
            f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{html.escape(page)}"></iframe>'
            for page in pages
            for width in (1400, 420)
        ]
        setting = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
        elements = open_page(
            f"<body>{''.join(frames)}<pre id='result'></pre></body>", MEASURE, setting
        )
        (found,) = re.findall(r'<pre id="result">(.*?)</pre>', elements, flags=re.DOTALL)
        return json.loads(html.unescape(found))  # type: ignore[no-any-return]

    return call


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_wide_and_narrow_in_light_and_dark_every_bar_has_a_width_and_all_text_is_readable(
    measure: Callable[..., list[dict[str, Any]]], scheme: str
) -> None:
    gpu = {
        "index": 0,
        "utilization": 90.0,
        "memory_bytes": 79 * 2**30,
        "memory_total_bytes": 80 * 2**30,
    }
    samples = [
        {
            "time_s": 1000.0 + second,
            "node": "n",
            "gpus": [{**gpu, "power_w": 1.0, "pools": [ACTOR]}],
            "processes": [],
        }
        for second in range(9)
    ]
    plain = make_run(late={("gen", 1): 2.0}, seconds={"adv": 2.5}, monitor=samples)
    found = measure([render(plain), render(make_hostile(plain))], scheme)
    assert [page["width"] for page in found] == [1400, 420] * 2
    for page in found:
        assert page["errors"] == ""
        assert page["overflow"] <= 0
        assert (page["page"] == "rgb(246, 247, 249)") == (scheme == "light")
        assert len(page["bars"]) >= 7
        assert min(page["bars"]) > 200
        assert min(page["parts"]) >= 1
        assert min(page["pictures"]) > 300
        assert min(page["small"]) > 130
        assert min(page["colors"]) > 5  # something is drawn on every canvas
        assert page["texts"] > 60
        assert page["faint"] == []


def test_the_page_of_a_cpu_run_says_nothing_about_gpus(open_page: Open) -> None:
    run = make_run()
    on_cpu = [each._replace(span=each.span._replace(device="cpu")) for each in run.spans]
    rows = {step: {**row, "perf/throughput": 10.0 * step} for step, row in run.metrics.items()}
    elements = open_page(render(replace(run, spans=on_cpu, metrics=rows)))
    (shown,) = re.findall(r"<main.*</main>", elements, flags=re.DOTALL)
    assert "node:CPU slot of each rank" in shown
    assert "Tokens per second and CPU slot" in shown
    assert "GPU" not in shown
    assert "node:GPU of each rank" in open_page(render(run))


USE_THE_SEARCH = """<script>
const shown = [], part = document.getElementById("responses");
const [chooser, order] = part.querySelectorAll("select"), field = part.querySelector("input");
const cells = () => [...part.querySelectorAll("td:not(:last-child)")].map((one) => one.textContent);
function change(node, kind, value) {
  node.value = value;
  node.dispatchEvent(new Event(kind));
  shown.push(cells());
}
shown.push(cells());
change(order, "change", "lowest score first");
change(field, "input", "FIVE  nine");
change(chooser, "change", "2");
shown.push([part.querySelector("[role=status]").textContent]);
shown.push([...chooser.options].map((one) => one.textContent));
document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: JSON.stringify(shown)}));
</script></body>"""


def shown_in(elements: str) -> Any:
    (found,) = re.findall(r'<pre id="shown">(.*?)</pre>', elements, flags=re.DOTALL)
    return json.loads(html.unescape(found))


def test_responses_are_chosen_by_step_ordered_by_score_and_searched(
    open_page: Open, tmp_path: Path
) -> None:
    folder = RunFolder(write_run(tmp_path / "run", num_steps=2))
    for step in (0, 2):
        rows = [("five and nine?", "13", 0.5 * step), (f"one? {HOSTILE}", str(step), 0.0)]
        samples = [
            {"question": asked, "response": text, "ground_truth": "14", "score": score}
            for asked, text, score in rows
        ]
        folder.add_samples(step, samples)
    folder.add_samples(
        1, [{"question": "trained", "response": "yes", "score": 1}], "training_responses"
    )
    elements = open_page(render(read_run(folder.path)), USE_THE_SEARCH)
    assert errors_in(elements) == ""
    assert "<img" not in elements
    recorded, by_score, found, in_all, (count,), options = shown_in(elements)
    first, second = ["five and nine?", "13", "14"], [f"one? {HOSTILE}", "2", "14"]
    assert recorded == [*first, *second]
    assert by_score == [*second, *first]
    assert found == first
    assert in_all == ["0", *first, "2", *first]
    assert count == "2 of 4 match"
    assert options == [
        "validation after step 2: 2 responses, score 0.286",
        "validation after step 0: 2 responses, score 0.1",
        "all validations",
        "training step 1: 1 response, reward 0.167",
    ]


OPEN_A_RESPONSE = """<script>
const summary = document.querySelector("#responses summary"), shown = [summary.textContent];
summary.parentElement.addEventListener("toggle", () => {
  shown.push(summary.textContent);
  document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: JSON.stringify(shown)}));
});
summary.click();
</script></body>"""


def test_a_long_response_shows_its_beginning_and_end_until_it_is_opened(
    open_page: Open, tmp_path: Path
) -> None:
    text = f"{'thinking ' * 60}\n\\boxed{{72}}"
    folder = RunFolder(write_run(tmp_path / "run", num_steps=2))
    folder.add_samples(
        2, [{"question": "how many?", "response": text, "ground_truth": "72", "score": 1.0}]
    )
    elements = open_page(render(read_run(folder.path)), OPEN_A_RESPONSE)
    assert errors_in(elements) == ""
    short, opened = shown_in(elements)
    assert len(short) < 260
    assert short.startswith("thinking thinking") and short.endswith("\\boxed{72}")
    assert opened == text


USE_THE_FILTER = """<script>
const part = document.getElementById("metrics"), field = part.querySelector("input"), shown = [];
const open = "details[open]:not([hidden])";
const names = () => [...part.querySelectorAll(`${open} h4 span, ${open} td:first-child`)].map((one) => one.textContent);
function filter(words) {
  field.value = words;
  field.dispatchEvent(new Event("input"));
  shown.push([...names(), part.querySelector("[role=status]").textContent]);
}
for (const words of ["", "mine", "ADV timing", "constant", "nothing"]) filter(words);
document.body.append(Object.assign(document.createElement("pre"), {id: "shown", textContent: JSON.stringify(shown)}));
</script></body>"""


def test_every_logged_metric_has_a_chart_or_a_value_that_the_filter_finds(open_page: Open) -> None:
    run = make_run()
    rows = {
        step: {**row, f"mine/{HOSTILE}": 1.0 / step, "constant": 2.5, "timing_s/adv": 0.1 * step}
        for step, row in run.metrics.items()
    }
    run = replace(run, metrics=rows)
    elements = open_page(render(run), USE_THE_FILTER)
    assert errors_in(elements) == ""
    assert "<img" not in elements
    everything, mine, timing, constant, nothing = shown_in(elements)
    num_metrics = len(metric_names(rows))
    assert everything == [
        "critic/score/mean",
        f"mine/{HOSTILE}",
        f"{num_metrics} of {num_metrics} metrics",
    ]
    assert mine == [f"mine/{HOSTILE}", f"1 of {num_metrics} metrics"]
    assert timing == ["timing_s/adv", f"1 of {num_metrics} metrics"]
    assert constant == ["constant", f"1 of {num_metrics} metrics"]
    assert nothing == [f"0 of {num_metrics} metrics"]


def test_the_overrides_of_other_placements_are_on_the_page_without_pointing(
    open_page: Open, tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path / "run", num_steps=6))
    others = page_data(run)["predicted"][1:]
    assert others
    elements = open_page(render(run))
    assert errors_in(elements) == ""
    (section,) = re.findall(
        r"<h2>What other placements would have cost</h2>.*?</section>", elements, flags=re.DOTALL
    )
    chips = re.findall(r'<code [^>]*role="button" tabindex="0"[^>]*>(.*?)</code>', section)
    assert [html.unescape(chip) for chip in chips] == [overrides for _, overrides, *_ in others]


def test_the_header_has_reward_and_validation_score(open_page: Open, tmp_path: Path) -> None:
    elements = open_page(render(read_run(write_run(tmp_path / "run", num_steps=12))))
    (facts,) = re.findall(r'<div class="facts">(.*?)</div>', elements, flags=re.DOTALL)
    text = re.sub(r"<.*?>", "", facts)
    assert text.startswith("reward 0.167 → 0.706validation score 0.1 → 0.706 after step 12steps 12")


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
