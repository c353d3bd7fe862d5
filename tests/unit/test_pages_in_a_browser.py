"""The list of runs and comparisons in a real browser, wide and narrow, light and dark: everything
can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from synthetic_runs import write_run
from test_serve import HOSTILE, serving
from web_driver import CHROMIUM, CONTRAST, DRIVER, Browser, browser

from rolepool.report.compare import compare, read_runs
from rolepool.report.comparison_page import write_comparison

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine"
    ),
]

FAINT = f"""{CONTRAST}
const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
const texts = [...document.querySelectorAll("main *")].filter((one) => hasText(one) && one.getClientRects().length);
const shown = texts.filter((one) => !["OPTION", "TITLE", "SCRIPT"].includes(one.tagName));
const colorOf = (one) => getComputedStyle(one)[one.tagName === "text" ? "fill" : "color"];
const faint = shown.filter((one) => contrast(colorOf(one), background(one)) < 4.5);
return [shown.length, faint.map((one) => one.textContent)];
"""
OUTSIDE = """
const isInside = (one) => one.getBoundingClientRect().right <= innerWidth + 0.5;
const parts = [...document.querySelectorAll("main *")].filter((one) => one.getClientRects().length);
const outside = parts.filter((one) => !isInside(one) && !one.closest(".wide") && one.tagName !== "OPTION");
return [document.documentElement.scrollWidth, outside.map((one) => one.outerHTML.slice(0, 80))];
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with different work, one with a long and hostile name."""
    home = tmp_path_factory.mktemp("runs")
    write_run(home / "one", num_steps=8)
    other = write_run(
        home / f"{HOSTILE}{'long_name_' * 8}", "split", num_steps=7, overrides=("trainer.seed=7",)
    )
    config = (
        (other / "config.yaml")
        .read_text(encoding="utf-8")
        .replace("train_batch_size: 64", "train_batch_size: 32")
    )
    (other / "config.yaml").write_text(config, encoding="utf-8")
    (write_run(home / "broken", num_steps=2) / "plan.json").unlink()
    return home


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


def check_page(window: Browser, address: str, least_texts: int) -> None:
    """Open a page in both widths and colour schemes. Nothing is outside of the window, and all text
    has contrast."""
    for dark in (False, True):
        for width in (1400, 420):
            window.screenshot(width, dark=dark)
            window.open(address)
            shown_width, outside = window.run(OUTSIDE)
            num_texts, faint = window.run(FAINT)
            assert (shown_width, outside) == (width, [])
            assert faint == []
            assert num_texts > least_texts
            assert window.run("return document.querySelectorAll('main img').length") == 0
    assert window.errors() == []


def test_the_list_of_runs_can_be_read_in_both_widths_and_schemes(
    folder: Path, window: Browser
) -> None:
    with serving(folder) as client:
        window.open(client.server.url)
        check_page(window, client.server.url.split("?")[0], least_texts=25)


def test_a_comparison_can_be_read_in_both_widths_and_schemes(
    folder: Path, window: Browser, tmp_path: Path
) -> None:
    runs = read_runs(sorted(folder.iterdir()))
    check_page(window, write_comparison(runs, compare(runs), tmp_path).as_uri(), least_texts=150)


def test_the_check_finds_what_cannot_be_read(tmp_path: Path, window: Browser) -> None:
    breaks: dict[str, Callable[[str], str]] = {
        "faint": lambda page: page.replace(".soft { color: var(--dim);", ".soft { color: #888a;"),
        "wide": lambda page: page.replace(
            "svg { display: block; width: 100%", "svg { display: block; width: 1500px"
        ),
    }
    runs = read_runs(
        [write_run(tmp_path / "one", num_steps=6), write_run(tmp_path / "two", num_steps=6)]
    )
    page = write_comparison(runs, compare(runs), tmp_path)
    whole = page.read_text(encoding="utf-8")
    for change in breaks.values():
        assert change(whole) != whole
        page.write_text(change(whole), encoding="utf-8")
        with pytest.raises(AssertionError):
            check_page(window, page.as_uri(), least_texts=50)
