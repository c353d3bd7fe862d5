"""A report or a comparison, made in a process of its own, with limits on its time and memory.

A run folder can come from anywhere, and some are made to keep their reader busy for hours.
`rolepool serve` stays usable because it waits for such a process only for a limited time, and then
ends it. The page goes to standard output; problems of the user go to standard error, one in each
line.
"""

import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rolepool.errors import ConfigError, RolepoolError

LIMIT_S = 120
"""How long a page may take. The reports of the longest runs that were tried take some seconds."""
MEMORY_BYTES = 2**33
"""The address space of the process. Libraries take a part of it that they do not use."""
REPORT_BYTES = 2**25
"""How much of the end of spans and samples a report reads."""
USER_ERROR = 2


class PageError(Exception):
    """A page could not be made because of a mistake in rolepool. A note has the traceback."""


def make_page(kind: str, folders: Sequence[Path], limit_s: float = LIMIT_S) -> str:
    """The page of a kind, `report` or `compare`, about these run folders. Raises ConfigError if
    there is none."""
    # -P: do not look for modules in the current folder, which may be one of the run folders.
    module = "rolepool.report.page_process"
    command = [sys.executable, "-P", "-m", module, kind, *map(str, folders)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        ended = None
    if ended is None or ended.returncode == -signal.SIGALRM:
        names = ", ".join(folder.name for folder in folders)
        what = f"{names}: the page was not ready after {limit_s:g} s, so it was stopped"
        raise ConfigError(
            f"{what}; write the page with `rolepool report` or `rolepool compare`, which have no limit"
        )
    errors = ended.stderr.decode(errors="replace").strip()
    if ended.returncode == USER_ERROR:
        raise ConfigError(errors.splitlines())
    if ended.returncode:
        problem = f"the process ended with code {ended.returncode}"
        if errors:
            problem = errors.splitlines()[-1]
        error = PageError(problem)
        error.add_note(errors)
        raise error
    return ended.stdout.decode(errors="replace")


def main(kind: str, *folders: str) -> int:
    """Make the page and write it to standard output. Return the exit code."""
    signal.alarm(LIMIT_S)  # also if the server was killed, so that nobody waits for this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    from rolepool.config.functions import only_reading

    try:
        with only_reading():
            page = _page(kind, folders)
    except RolepoolError as error:
        sys.stderr.write("\n".join(error.problems))
        return USER_ERROR
    except MemoryError:
        names = ", ".join(folders)
        limit_gib = MEMORY_BYTES // 2**30
        sys.stderr.write(f"{names}: has more in it than fits in {limit_gib} GiB of memory")
        return USER_ERROR
    sys.stdout.buffer.write(page.encode(errors="replace"))
    return 0


def _page(kind: str, folders: Sequence[str]) -> str:
    if kind == "report":
        from rolepool.report.page import render
        from rolepool.report.run import read_run

        return render(read_run(folders[0], REPORT_BYTES))

    from rolepool.report.compare import compare, read_runs
    from rolepool.report.comparison_page import render_comparison

    runs = read_runs(folders)
    if len(runs) < 2:
        raise ConfigError(f"{', '.join(runs)}: choose at least two runs")
    return render_comparison(runs, compare(runs))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
