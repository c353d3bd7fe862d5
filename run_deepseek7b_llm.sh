#!/usr/bin/env bash
# DeepSeek-LLM 7B in split placement on 8 GPUs. Further key=value overrides are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
.venv/bin/rolepool plan deepseek7b_split "$@"
exec .venv/bin/rolepool train deepseek7b_split "$@"
