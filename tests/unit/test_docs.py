"""The pages of the documentation: their links lead somewhere, and none of them is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors that a Git host makes from the headings of a page."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    """The links of a page to files of this repository."""
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    return [link for link in LINK.findall(prose) if "://" not in link]


def problem_of(page: Path, link: str) -> str | None:
    """Why a link leads nowhere."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: there is no such file"
    if anchor and anchor not in anchors_of(target):
        return f"{link}: that page has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    problems = [problem for link in links_of(page) if (problem := problem_of(page, link))]
    assert problems == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    page = ROOT / "README.md"
    assert problem_of(page, "docs/nowhere.md") == "docs/nowhere.md: there is no such file"
    assert (
        problem_of(page, "docs/placement.md#nowhere")
        == "docs/placement.md#nowhere: that page has no such heading"
    )
    assert problem_of(page, "docs/placement.md#cuda-mps") is None


def test_the_readme_links_every_page() -> None:
    linked = {link.partition("#")[0] for link in links_of(ROOT / "README.md")}
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()
