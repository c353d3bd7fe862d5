#!/usr/bin/env bash
# The demo with the critic in a pool of its own. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
exec .venv/bin/rolepool plan recipes/demo_split.yaml "$@"
