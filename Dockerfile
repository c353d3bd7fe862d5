# rolepool in a container, for CPUs or for NVIDIA GPUs (docs/multinode.md, "In a container"):
#
#   docker build --target cpu -t rolepool:cpu .
#   docker build --target cuda -t rolepool:cuda .
#
# Both use the versions of constraints.txt. The torch that pip installs on Linux contains CUDA, so the same small base
# image serves both targets, and the machine has to bring only the NVIDIA driver. A CPU image without CUDA is several GB
# smaller. Its torch comes from another package index, which --build-arg TORCH_INDEX=... names.

FROM python:3.11.14-slim-bookworm AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=PASSIVE \
    RAY_USAGE_STATS_ENABLED=0
# Older versions of KubeRay check the health of a container with wget.
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
# The number of the user is fixed, because Kubernetes and mounted folders need it.
RUN useradd --create-home --uid 1000 rolepool && install --directory --owner=rolepool /work
WORKDIR /opt/rolepool
COPY constraints.txt pyproject.toml README.md LICENSE ./
# An empty package stands in for the source, so that a change of the source does not install all packages again.
RUN mkdir --parents src/rolepool && touch src/rolepool/__init__.py
RUN pip install -c constraints.txt setuptools
ENTRYPOINT ["rolepool"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then pip install -c constraints.txt --no-deps --index-url "$TORCH_INDEX" torch; fi
RUN pip install -c constraints.txt --no-build-isolation '.[dashboard,datasets,math]' && rm -rf build src
COPY src src
COPY recipes recipes
RUN pip install --no-build-isolation --no-deps --force-reinstall . && rm -rf build
WORKDIR /work
USER 1000

FROM base AS cuda
# Triton compiles small programs when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install -c constraints.txt --no-build-isolation '.[dashboard,datasets,math]' && rm -rf build src
COPY src src
COPY recipes recipes
RUN pip install --no-build-isolation --no-deps --force-reinstall . && rm -rf build
WORKDIR /work
USER 1000
