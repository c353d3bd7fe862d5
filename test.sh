#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor minutes. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [ $# -gt 0 ]; then
    .venv/bin/mypy
    exec .venv/bin/python -m pytest "$@"
fi
# This test measures a run, so it has the machine to itself.
measuring=tests/train/test_demo.py::test_the_split_demo_learns_in_time_and_its_pools_overlap
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

# Prints the lines of a command when it has ended, so that the lines of commands that run side by side are not mixed.
run() {
    local began=$SECONDS code=0 log
    log=$(mktemp -p "$logs")
    "$@" > "$log" 2>&1 || code=1
    printf '\n%s\n' "$*" | cat - "$log"
    echo "$((SECONDS - began)) s"
    return "$code"
}

pytest() {
    run .venv/bin/python -m pytest "$@"
}

# Both halves take about as long.
first_half() {
    local failed=0
    pytest tests/cluster tests/invariant || failed=1
    # CPUs round differently, and no test may depend on that: generation once more, with the instructions of an old CPU.
    ATEN_CPU_CAPABILITY=default pytest tests/unit/test_rollout_*.py -k "not noise" || failed=1
    return "$failed"
}

second_half() {
    local failed=0
    run .venv/bin/mypy || failed=1
    pytest tests/unit tests/gpu || failed=1
    pytest tests/train --deselect "$measuring" || failed=1
    return "$failed"
}

first_half &
beside=$!
second_half || failed=1
wait "$beside" || failed=1
pytest "$measuring" || failed=1
exit "$failed"
