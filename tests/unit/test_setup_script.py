"""`PYTHON=...` is used or refused by the set-up of the shell scripts, and the set-up shows what it
does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OLD = 'import sys; sys.version_info, sys.base_prefix = (3, 9, 2), "/opt/old"; exec(sys.argv[1])'
MOVED = 'import sys; sys.base_prefix = "/opt/other"; exec(sys.argv[1])'


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """What the set-up reads, and a finished .venv of this Python."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_python(tmp_path / ".venv" / "bin" / "python", "import sys; exec(sys.argv[1])")
    stamp = subprocess.check_output(
        "pwd; cat pyproject.toml constraints.txt | cksum", shell=True, cwd=tmp_path
    )
    (tmp_path / ".venv" / "stamp").write_bytes(stamp)
    return tmp_path


def write_python(path: Path, code: str) -> str:
    """An executable that runs `python -c CODE ARGUMENT` if it is called as `path -c ARGUMENT`."""
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$2\"\n")
    path.chmod(0o755)
    return str(path)


def source(
    checkout: Path, then: str = "echo ready", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHON"},
        **variables,
    }
    command = ["bash", "-c", f"source scripts/setup.sh; {then}"]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_finished_set_up_is_used_as_it_is_also_with_its_own_python(checkout: Path) -> None:
    for variables in ({}, {"PYTHON": ""}, {"PYTHON": sys.executable}):
        ended = source(checkout, **variables)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ready\n", "")


def test_a_python_that_cannot_be_used_is_refused_in_one_line(
    checkout: Path, tmp_path: Path
) -> None:
    old, moved = write_python(tmp_path / "old", OLD), write_python(tmp_path / "moved", MOVED)
    expected = {
        "no-such-python": "is not a Python that can be started; give its path, or do not set PYTHON",
        "/bin/true": "is not a Python that can be started; give its path, or do not set PYTHON",
        old: "is Python 3.9 of /opt/old; Python 3.11 to 3.14 is needed",
        moved: f"is Python 3.{sys.version_info[1]} of /opt/other, and .venv was made with Python ",
    }
    for python, reason in expected.items():
        ended = source(checkout, PYTHON=python)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert ended.stderr.startswith(f"error: PYTHON={python}: {reason}")
        assert (checkout / ".venv" / "stamp").exists(), "a refusal changes nothing"


def test_the_chosen_python_is_the_one_that_makes_the_environment(
    checkout: Path, tmp_path: Path
) -> None:
    chosen = write_python(tmp_path / "chosen", "import sys; exec(sys.argv[1])")
    assert source(checkout, "find_python", PYTHON=chosen).stdout == f"{chosen}\n"


def with_uv(folder: Path, code: str = "exit 1") -> dict[str, str]:
    """Variables with which `uv` is a script with this code."""
    (folder / "with_uv").mkdir()
    (folder / "with_uv" / "uv").write_text(f"#!/bin/sh\n{code}\n")
    (folder / "with_uv" / "uv").chmod(0o755)
    return {"PATH": f"{folder / 'with_uv'}:{os.environ['PATH']}"}


def test_uv_installs_if_it_is_on_path_and_pip_if_it_is_not_or_is_chosen(
    checkout: Path, tmp_path: Path
) -> None:
    with_it = with_uv(tmp_path)
    without_it = {
        "PATH": ":".join(
            part for part in os.environ["PATH"].split(":") if not (Path(part) / "uv").exists()
        )
    }
    for variables, expected in (
        (with_it, "uv\n"),
        (without_it, "pip\n"),
        ({**with_it, "INSTALLER": "pip"}, "pip\n"),
        ({**without_it, "INSTALLER": "uv"}, "uv\n"),
    ):
        ended = source(checkout, "find_installer", **variables)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, "")
    ended = source(checkout, "find_installer", INSTALLER="conda")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: INSTALLER=conda: must be uv or pip; ")


def test_pip_installs_if_uv_fails(checkout: Path, tmp_path: Path) -> None:
    code = 'echo "$@" >> calls.txt; echo "no such index" >&2; mkdir -p .venv; [ "$1" = venv ]'
    fakes = "install_with_pip() { mkdir .venv; echo pip with $1; }; wanted_stamp() { echo stamp; }"
    ended = source(
        checkout, f"{fakes}; install_project", **with_uv(tmp_path, code), PYTHON=sys.executable
    )
    assert (ended.returncode, ended.stdout) == (0, f"pip with {sys.executable}\n")
    assert (
        "no such index\nuv could not install the packages (see above), so pip tries it\n"
        in ended.stderr
    )
    assert (checkout / ".venv" / "stamp").read_text() == "stamp\n"
    made, installed = (checkout / "calls.txt").read_text().splitlines()
    assert made == f"venv --quiet --seed --python {sys.executable} .venv"
    assert installed.startswith(
        "pip install --python .venv/bin/python --compile-bytecode -c constraints.txt"
    )


def test_uv_installs_rolepool_and_its_output_is_kept(checkout: Path, tmp_path: Path) -> None:
    code = 'mkdir -p .venv; echo "Resolved 3 packages" >&2; echo " + numpy==2" >&2'
    fakes = "install_with_pip() { echo pip; }; wanted_stamp() { echo stamp; }"
    ended = source(
        checkout, f"{fakes}; install_project", **with_uv(tmp_path, code), PYTHON=sys.executable
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.count("Resolved 3 packages\n") == 3 and ended.stderr.count("numpy") == 2
    assert (checkout / ".venv" / "setup.log").read_text() == "Resolved 3 packages\n + numpy==2\n"


def test_progress_shows_every_tenth_package_and_large_downloads(checkout: Path) -> None:
    said = [f"Collecting package{number}==1.0 (from rolepool)" for number in range(1, 22)]
    said.insert(3, "  Downloading torch-2.9-cp312.whl (899.8 MB)")
    said.insert(3, "  Downloading small-1.whl (1.2 MB)")
    (checkout / "pip.txt").write_text(
        "\n".join([*said, "Installing collected packages: package1", ""])
    )
    ended = source(checkout, "show_progress < pip.txt")
    assert [re.sub(r" of about \d+", "", line.strip()) for line in ended.stderr.splitlines()] == [
        "package 1: package1==1.0",
        "Downloading torch-2.9-cp312.whl (899.8 MB)",
        "package 11: package11==1.0",
        "package 21: package21==1.0",
        "writing 21 packages to disk ...",
    ]
    assert (checkout / ".venv" / "setup.log").read_text() == (checkout / "pip.txt").read_text()
