#!/usr/bin/env bash
# The demo with all roles in one pool. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
exec .venv/bin/rolepool plan recipes/demo.yaml "$@"
