# Sourced by the shell scripts of the root: makes sure that .venv holds exactly what is pinned.
#
# A stamp is written into .venv as the very last act of an install. It names the pinned files, the Python and the
# place; where it is missing or differs, .venv is made anew, so an install that failed or was interrupted cannot
# break the next try.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_WAIT_POLICY=PASSIVE

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: python3 of version 3.11 or 3.12 is needed, and none is on PATH; name one with PYTHON=/path/to/python3" >&2
    exit 2
}

wanted_stamp() {
    echo "$PWD"
    cat pyproject.toml constraints.txt | cksum
}

install_project() {
    local python
    python=$(find_python)
    echo "Setting up .venv (once; takes a few minutes) ..." >&2
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "error: $python cannot make a virtual environment; install its venv package (Debian: apt install python3-venv)" >&2
        exit 2
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
    wanted_stamp > .venv/stamp.tmp
    mv .venv/stamp.tmp .venv/stamp
}

if [ "$(cat .venv/stamp 2>/dev/null)" != "$(wanted_stamp)" ]; then
    (
        # Two scripts started at the same time: the second waits, and finds the work done.
        if command -v flock > /dev/null; then
            exec 9> .venv.lock
            flock -w 1800 9 || { echo "error: another set-up holds .venv.lock for 30 minutes; stop it and try again" >&2; exit 2; }
        fi
        if [ "$(cat .venv/stamp 2>/dev/null)" != "$(wanted_stamp)" ]; then
            install_project
        fi
    )
fi
