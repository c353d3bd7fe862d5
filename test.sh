#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor minutes. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest "$@"
fi
# Tests that start Ray mostly wait for it, so others run beside them. What measures a run has the machine to itself.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
measuring=tests/train/test_demo.py
# Both halves take about as long if these files run in the second one.
second=(tests/train/test_first_pages.py tests/train/test_api_training.py tests/train/test_recovery.py)
second+=(tests/train/test_verl_scripts_train.py)
ignored=("${second[@]/#/--ignore=}" "--ignore=$measuring")
.venv/bin/python -m pytest tests/unit tests/train "${ignored[@]}" > "$log" 2>&1 &
beside=$!
failed=0
.venv/bin/python -m pytest tests/cluster tests/invariant "${second[@]}" || failed=1
# CPUs round differently, and no test may depend on that: generation once more, with the instructions of an old CPU.
ATEN_CPU_CAPABILITY=default .venv/bin/python -m pytest tests/unit/test_rollout_*.py -k "not noise" || failed=1
wait "$beside" || failed=1
cat "$log"
.venv/bin/python -m pytest "$measuring" tests/gpu || failed=1
exit "$failed"
