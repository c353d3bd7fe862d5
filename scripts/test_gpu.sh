#!/usr/bin/env bash
# Runs the tests that need a GPU (tests/gpu). Arguments go to pytest. CONTRIBUTING.md describes the variables:
#
#   NCCL_LIBRARY=path/to/libnccl.so.2   a NCCL of version 2.30 or newer, for several ranks on one GPU
#   LIMIT_S=900                         the time limit for all tests
#   REPORT=report.json                  a file for the metrics of all trainings
#   PYTHON=python3                      the interpreter; default: the one of .venv
#   ROLEPOOL_GPU_TESTS_ON=cpu           only the tests that train, on CPU slots
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    source scripts/setup.sh
    PYTHON=.venv/bin/python
fi
if [ -n "${NCCL_LIBRARY:-}" ]; then
    if [ ! -f "$NCCL_LIBRARY" ]; then
        echo "error: NCCL_LIBRARY=$NCCL_LIBRARY: there is no such file; give the path of libnccl.so.2" >&2
        exit 2
    fi
    # It takes the place of torch's own NCCL, in this process and all that it starts.
    LD_PRELOAD="$(realpath "$NCCL_LIBRARY")${LD_PRELOAD:+:$LD_PRELOAD}"
    export LD_PRELOAD NCCL_MULTI_RANK_GPU_ENABLE=1
fi
if [ -n "${REPORT:-}" ]; then
    ROLEPOOL_GPU_TESTS_REPORT=$(realpath "$REPORT")
    export ROLEPOOL_GPU_TESTS_REPORT
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
limit_s=${LIMIT_S:-900}
options=(-m gpu --durations=30 -o "timeout=$limit_s")
# The first signal lets the tests end the processes that they have started.
exec timeout --signal=INT --kill-after=30 "$limit_s" "$PYTHON" -m pytest tests/gpu "${options[@]}" "$@"
