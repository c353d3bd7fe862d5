#!/usr/bin/env bash
# Train the demo with all roles in one pool. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/rolepool plan demo "$@"
.venv/bin/rolepool train demo "$@"
echo "try next: bash demo_split.sh, or bash demo.sh trainer.n_gpus_per_node=4"
