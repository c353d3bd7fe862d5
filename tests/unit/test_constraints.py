"""`constraints.txt` pins one version of every package that rolepool or an extra needs, for all
supported Pythons."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

OF_TORCH = re.compile(r"cuda-|nvidia-|triton$")
"""Packages that torch brings in the exact versions that it needs, and that its builds for CPUs do
not need."""
NOT_ON_3_14 = ("verifiers",)
WITHOUT_WHEELS = ("skyrl-gym",)
"""Extras whose packages need one that has no wheel."""


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.fixture(scope="module")
def extras(root: Path) -> dict[str, list[Requirement]]:
    """The requirements of each extra; those of rolepool itself have the name ''."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    texts = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [Requirement(text) for text in requirements] for extra, requirements in texts.items()
    }


def needed_by(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package needs here, with the extras that are asked for; nothing if it is
    not installed."""
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return
    for needed in map(Requirement, texts):
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        if needed.marker is None or any(map(needed.marker.evaluate, environments)):
            yield needed


def test_every_package_that_rolepool_or_an_extra_needs_has_a_pin_that_it_accepts(
    pins: dict[str, str], extras: dict[str, list[Requirement]]
) -> None:
    checked: set[str] = set()
    waiting = [requirement for requirements in extras.values() for requirement in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if not OF_TORCH.match(name):
            assert name in pins, f"{requirement}: constraints.txt does not pin it"
            assert requirement.specifier.contains(Version(pins[name]), prereleases=True), (
                str(requirement),
                pins[name],
            )
        if str(requirement) not in checked:
            checked.add(str(requirement))
            waiting.extend(needed_by(requirement))
    assert len(checked) > 100


def pip(*arguments: str | Path) -> None:
    """Let pip find out what it would install. Needs a package index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]


def versions(report: Path) -> dict[str, str]:
    metadata = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(one["name"]): one["version"].partition("+")[0] for one in metadata}
    return {
        name: version
        for name, version in found.items()
        if name != "rolepool" and not OF_TORCH.match(name)
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_extras_can_be_installed_together_in_the_pinned_versions(
    root: Path, tmp_path: Path, pins: dict[str, str], extras: dict[str, list[Requirement]]
) -> None:
    names = [
        name
        for name in extras
        if name and not (name in NOT_ON_3_14 and sys.version_info >= (3, 14))
    ]
    report = tmp_path / "report.json"
    pip("-c", root / "constraints.txt", "--report", report, "-e", f"{root}[{','.join(names)}]")
    assert versions(report) == {name: pins.get(name) for name in versions(report)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_supported_python_has_wheels_of_the_pinned_versions(
    root: Path,
    tmp_path: Path,
    pins: dict[str, str],
    extras: dict[str, list[Requirement]],
    python: str,
) -> None:
    left_out = WITHOUT_WHEELS + (NOT_ON_3_14 if python == "3.14" else ())
    needed = [
        str(one)
        for extra, requirements in extras.items()
        if extra not in left_out
        for one in requirements
    ]
    report = tmp_path / "report.json"
    wheels = ("--python-version", python, "--only-binary", ":all:", "--target", tmp_path / "target")
    pip("-c", root / "constraints.txt", "--report", report, *wheels, *needed)
    assert versions(report) == {name: pins.get(name) for name in versions(report)}
