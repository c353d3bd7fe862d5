# Sourced by the shell scripts of the root: makes sure that .venv holds exactly what is pinned.
#
# The packages are installed with uv if it is on PATH, because that is faster, and with pip otherwise, or if uv fails: uv
# does not read pip's configuration, so it may not know the package index. INSTALLER=pip does not try uv.
#
# A stamp is written into .venv at the very end of an install. It names the pinned files and the folder. If it is
# missing or differs, .venv is made again, so an install that failed or was interrupted cannot break the next try.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_WAIT_POLICY=PASSIVE

# The version and the place of a Python; in a virtual environment, of the Python that it was made with.
describe_python() {
    "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2], "of", sys.base_prefix)' 2> /dev/null
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null
}

# PYTHON=... is used or refused, never ignored.
check_chosen_python() {
    local found
    if [ -z "${PYTHON:-}" ]; then
        return
    elif ! found=$(describe_python "$PYTHON") || [ -z "$found" ]; then
        echo "error: PYTHON=$PYTHON: is not a Python that can be started; give its path, or do not set PYTHON" >&2
        exit 2
    elif ! is_supported "$PYTHON"; then
        echo "error: PYTHON=$PYTHON: is $found; Python 3.11 to 3.14 is needed" >&2
        exit 2
    elif [ -e .venv/stamp ] && [ "$(describe_python .venv/bin/python)" != "$found" ]; then
        echo "error: PYTHON=$PYTHON: is $found, and .venv was made with $(describe_python .venv/bin/python);" \
            "remove the folder .venv to make it again, or do not set PYTHON" >&2
        exit 2
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: python3 of version 3.11 to 3.14 is needed, and none is on PATH; name one with PYTHON=/path/to/python3" >&2
    exit 2
}

find_installer() {
    case "${INSTALLER:-}" in
        "") if command -v uv > /dev/null; then echo uv; else echo pip; fi ;;
        uv | pip) echo "$INSTALLER" ;;
        *)
            echo "error: INSTALLER=$INSTALLER: must be uv or pip; do not set it to use uv if it is on PATH" >&2
            exit 2
            ;;
    esac
}

wanted_stamp() {
    echo "$PWD"
    cat pyproject.toml constraints.txt | cksum
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@"
}

# Reads pip's output, keeps it in .venv/setup.log and shows what is downloaded, every tenth package and all large ones.
show_progress() {
    local line name num=0 total
    total=$(grep -c == constraints.txt)
    while IFS= read -r line; do
        echo "$line" >> .venv/setup.log
        case "$line" in
            "Collecting "*)
                num=$((num + 1))
                name=${line#Collecting }
                if [ $((num % 10)) -eq 1 ]; then echo "  package $num of about $total: ${name%% *}" >&2; fi
                ;;
            *Downloading*[0-9][0-9].[0-9]" MB)"* | *Downloading*" GB)"*) echo "  ${line#"${line%%[! ]*}"}" >&2 ;;
            "Installing collected packages"*) echo "  writing $num packages to disk ..." >&2 ;;
        esac
    done
}

install_with_uv() {
    local options=(--python .venv/bin/python --compile-bytecode -c constraints.txt)
    uv venv --quiet --seed --python "$1" .venv &&
        uv pip install "${options[@]}" --quiet setuptools &&
        uv pip install "${options[@]}" --no-build-isolation -e '.[dev]' 2>&1 |
        tee .venv/setup.log | sed '/^ + /d' >&2 # without the list of installed packages
}

install_with_pip() {
    if ! "$1" -m venv .venv; then
        rm -rf .venv
        echo "error: $1 cannot make a virtual environment; install its venv package (Debian: apt install python3-venv)" >&2
        exit 2
    fi
    if ! pip_install --quiet setuptools || ! pip_install --no-build-isolation -e '.[dev]' | show_progress; then
        echo "error: pip could not install the packages (see above); start the script again to try again" >&2
        exit 2
    fi
}

install_project() {
    local python installer began=$SECONDS
    python=$(find_python)
    installer=$(find_installer)
    echo "Setting up .venv with $(describe_python "$python") and $installer, once: about 2 GB, 1 to 10 minutes" >&2
    rm -rf .venv
    if [ "$installer" = uv ] && ! install_with_uv "$python"; then
        echo "uv could not install the packages (see above), so pip tries it" >&2
        rm -rf .venv
        installer=pip
    fi
    if [ "$installer" = pip ]; then
        install_with_pip "$python"
    fi
    wanted_stamp > .venv/stamp.tmp
    mv .venv/stamp.tmp .venv/stamp
    echo "Set up in $((SECONDS - began)) s" >&2
}

check_chosen_python
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
