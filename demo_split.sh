#!/usr/bin/env bash
# Train the demo with the critic in a pool of its own. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/rolepool demo runs/demo_data > /dev/null
.venv/bin/rolepool plan recipes/demo_split.yaml "$@"
.venv/bin/rolepool train recipes/demo_split.yaml "$@"
echo "try next: bash demo.sh, or bash demo_split.sh trainer.n_gpus_per_node=4"
