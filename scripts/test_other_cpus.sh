#!/usr/bin/env bash
# The tests that compare generations and updates, with the vector instructions of older CPUs and with one and two threads.
# Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case $(.venv/bin/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())') in
    AVX512) capabilities="default avx2 avx512" ;;
    AVX2) capabilities="default avx2" ;;
    *) capabilities=default ;;
esac
failed=0
for capability in $capabilities; do
    for num_threads in 1 2; do
        echo "$capability, $num_threads thread(s)"
        ATEN_CPU_CAPABILITY=$capability OMP_NUM_THREADS=$num_threads .venv/bin/python -m pytest \
            tests/unit/test_rollout_*.py tests/unit/test_same_tokens.py tests/invariant "$@" || failed=1
    done
done
exit "$failed"
