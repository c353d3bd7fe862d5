#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor minutes. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
