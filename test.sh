#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor minutes. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# Tests that start Ray mostly wait for it, so unit tests run beside them. What measures a run has the machine to itself.
unit_log=$(mktemp)
trap 'rm -f "$unit_log"' EXIT
.venv/bin/python -m pytest tests/unit > "$unit_log" 2>&1 &
unit=$!
failed=0
.venv/bin/python -m pytest tests/cluster tests/invariant || failed=1
wait "$unit" || failed=1
cat "$unit_log"
.venv/bin/python -m pytest tests/train tests/gpu || failed=1
exit "$failed"
