#!/usr/bin/env bash
# Train the demo with the critic in a pool of its own. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/rolepool plan demo_split "$@"
.venv/bin/rolepool train demo_split "$@"
echo "try next: bash demo.sh, or bash demo_split.sh trainer.n_gpus_per_node=4"
