#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor minutes. `quick` runs the core of them, which is for every
# commit. Other arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [ $# -gt 0 ] && [ "$1" != quick ]; then
    .venv/bin/mypy
    exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m compileall -q src  # once for hundreds of processes, also if PYTHONDONTWRITEBYTECODE is set
logs=$(mktemp -d)
trap 'jobs -rp | xargs -r kill || true; rm -rf "$logs"' EXIT
# These tests measure times, so they have the machine to themselves.
measuring=(tests/unit/test_speed.py)
measuring+=(tests/train/test_demo.py::test_the_split_demo_learns_in_time_and_its_pools_overlap)
programs=(tests/train/test_demo.py tests/train/test_extending.py tests/train/test_first_pages.py)
programs+=(tests/train/test_restarts.py)

# The lines of a command are printed when it has ended, because lines of commands that run side by side would be mixed.
run() {
    local began=$SECONDS log
    log=$(mktemp -p "$logs")
    "$@" > "$log" 2>&1 || touch "$logs/failed"
    printf '\n%s\n' "$*"
    cat "$log"
    echo "$((SECONDS - began)) s"
}

run_tests() {
    run .venv/bin/python -m pytest "$@"
}

# The parts of the suite. One of the unit tests runs mypy, which is fast after a first run.
units() {
    run .venv/bin/mypy
    run_tests tests/unit tests/gpu "${measuring[@]/#/--deselect=}"
}

clusters() {
    run_tests tests/cluster tests/invariant
}

# Half of the trainings, so that no part is much longer than the others.
trainings() {
    local files=() file
    for file in tests/train/test_[$1]*.py; do
        [[ " ${programs[*]} " == *" $file "* ]] || files+=("$file")
    done
    run_tests "${files[@]}"
}

training_programs() {
    run_tests "${programs[@]}" "${measuring[@]/#/--deselect=}"
}

# CPUs round differently, and no test may depend on that: generation once more, with the instructions of an old CPU.
old_cpu() {
    ATEN_CPU_CAPABILITY=default run_tests tests/unit/test_rollout_{native,sampling,schedule}.py -k "not noise"
}

# The core: algorithms, batches, plans and the step; that placements change no number; each way in which a run goes on
# after a death; a move; and the demo.
core_units() {
    local files=(tests/unit/test_{algorithm_*,batches,data_proto,encoding,estimator,pipeline,recorder,schedule,role_table}.py)
    files+=(tests/unit/test_{parallel_dims,placement,snapshots,import_rules,held_states,trained_model}.py)
    files+=(tests/unit/test_{packed_passes,rollout_native,rollout_schedule,supervisor}.py)
    run .venv/bin/mypy
    run_tests "${files[@]}"
}

core_runs() {
    run_tests tests/invariant/test_ranks.py tests/invariant/test_placements.py
    run_tests tests/train/test_recovery.py -k several_deaths
    run_tests tests/train/test_demo.py::test_a_run_with_validation_data_validates_after_its_last_step
    run_tests tests/invariant/test_moves.py -k "when_a_run_moves"
}

if [ "${1:-}" = quick ]; then
    core_units &
    core_runs &
    wait
    [ ! -e "$logs/failed" ]
    exit
fi

# Parts run side by side, because tests that start Ray often wait for it: two while the unit tests run, of which some
# measure time, and then three.
for part in units clusters "trainings m-z" training_programs "trainings a-l" old_cpu; do
    while [ "$(jobs -rp | wc -l)" -ge "$(kill -0 "${units:-$$}" 2> /dev/null && echo 2 || echo 3)" ]; do sleep 1; done
    $part &
    units=${units:-$!}
done
wait
run_tests "${measuring[@]}"
[ ! -e "$logs/failed" ]
